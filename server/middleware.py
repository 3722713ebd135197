"""The layers around the router, outermost first: `Envelope`, then `Guard`. Pure ASGI, for HTTP and WebSocket alike.

Envelope turns every exception into the one error shape and puts request id, security and CORS headers on every
response, its own included. Guard lets a request in: header size, key, origin. The open paths are a closed list and all
else needs the key, so no spelling of a path can get around it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import secrets
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.errors import NanoserveError
from server.config import ServerConfig
from server.failures import HeadersTooLarge, OriginRefused, Unauthorized
from server.replies import error_response

AUTHORIZED = "nanoserve.authorized"  # scope key: whether the request carried a good key, or none is needed
KEY_SUBPROTOCOL = "nanoserve.key."
MAX_ECHO = 128
SECURITY_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
PREFLIGHT_MAX_AGE_SECONDS = "600"
DEFAULT_PORTS = {"http": 80, "https": 443}

logger = logging.getLogger("nanoserve.server")


class Envelope:
    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        extra = self._extra_headers(headers)
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                started = True
                response = MutableHeaders(scope=message)
                for name, value in extra:
                    if name == "vary":
                        response.add_vary_header(value)
                    else:
                        response[name] = value
            elif message["type"] == "websocket.accept":
                started = True
                name, value = extra[0]
                message["headers"] = [*message.get("headers", ()), (name.encode(), value.encode())]
            await send(message)

        try:
            if self._is_preflight(scope, headers):
                await self._preflight(headers)(scope, receive, send_with_headers)
            else:
                await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            return  # it left in the middle of its own request: nobody is there to be told
        except Exception as error:
            if not isinstance(error, NanoserveError | HTTPException):
                logger.exception("%s %s failed", scope.get("method", "WS"), scope["path"])
            if started:
                raise
            await error_response(error)(scope, receive, send_with_headers)

    def _allowed_origin(self, headers: Headers) -> str | None:
        origin = headers.get("origin")
        if origin is None or not self._origins:
            return None
        return origin if "*" in self._origins or origin.lower() in self._origins else None

    def _extra_headers(self, headers: Headers) -> list[tuple[str, str]]:
        extra = [("x-request-id", f"req-{secrets.token_hex(12)}"), *SECURITY_HEADERS.items()]
        theirs = headers.get("x-client-request-id") or headers.get("x-request-id")
        if theirs:
            extra.append(("x-client-request-id", "".join(c for c in theirs if " " < c <= "~")[:MAX_ECHO]))
        if self._origins:
            extra.append(("vary", "Origin"))
        origin = self._allowed_origin(headers)
        if origin is not None:
            extra.append(("access-control-allow-origin", origin))
            extra.append(("access-control-expose-headers", "x-request-id, x-client-request-id, retry-after"))
        return extra

    @staticmethod
    def _is_preflight(scope: Scope, headers: Headers) -> bool:
        return (
            scope["type"] == "http"
            and scope["method"] == "OPTIONS"
            and "origin" in headers
            and "access-control-request-method" in headers
        )

    def _preflight(self, headers: Headers) -> Response:
        """204 for any origin; without the allow headers a browser goes no further."""
        response = Response(status_code=204)
        if self._allowed_origin(headers) is not None:
            asked = headers.get("access-control-request-headers", "authorization, content-type")
            response.headers["access-control-allow-methods"] = "GET, POST, OPTIONS"
            response.headers["access-control-allow-headers"] = asked[:1024]
            response.headers["access-control-max-age"] = PREFLIGHT_MAX_AGE_SECONDS
        return response


class Guard:
    def __init__(self, app: ASGIApp, config: ServerConfig, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in config.api_keys)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.allowed_origins)
        self._max_header_bytes = config.max_header_bytes
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        size = len(scope["path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers.raw)
        if size > self._max_header_bytes:
            limit = self._max_header_bytes
            raise HeadersTooLarge(f"the headers are {size:,} bytes; the limit is {limit:,}; send fewer or shorter ones")
        socket = scope["type"] == "websocket"
        if socket:
            self._check_origin(headers)
        authorized = self._has_key(_offered_keys(headers, scope.get("subprotocols") or () if socket else ()))
        scope[AUTHORIZED] = authorized
        if not authorized and (socket or scope["path"] not in self._open_paths):
            raise Unauthorized("no valid API key came with the request; send -H 'authorization: Bearer <key>'")
        await self._app(scope, receive, send)

    def _has_key(self, offered: Iterable[bytes]) -> bool:
        if not self._keys:
            return True
        return any(hmac.compare_digest(key, mine) for key in offered for mine in self._keys)

    def _check_origin(self, headers: Headers) -> None:
        """Browsers open WebSockets across origins without asking; only a page of ours or an allowed one may."""
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return
        if not same_host(origin, headers.get("host", "")):
            shown, host = origin[:100], headers.get("host", "")[:100]
            raise OriginRefused(f"origin {shown!r} is not {host!r}; start the server with --allow-origin {shown}")


def _offered_keys(headers: Headers, subprotocols: Iterable[str]) -> list[bytes]:
    offered = []
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        offered.append(credentials.strip().encode("latin-1"))
    for name in subprotocols:
        if name.startswith(KEY_SUBPROTOCOL):
            text = name.removeprefix(KEY_SUBPROTOCOL)
            try:
                offered.append(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            except (ValueError, binascii.Error):
                continue
    return offered


def same_host(origin: str, host: str) -> bool:
    """Whether `origin` (scheme://host[:port]) names the server a `Host` header names; default ports may be left out."""
    try:
        theirs, ours = urlsplit(origin), urlsplit(f"{urlsplit(origin).scheme}://{host}")
        default = DEFAULT_PORTS.get(theirs.scheme)
        return bool(theirs.hostname) and (theirs.hostname, theirs.port or default) == (
            ours.hostname,
            ours.port or default,
        )
    except ValueError:
        return False
