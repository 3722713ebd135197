"""Every error a client can meet, and the one table that gives it a status, a type and a code on the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from nanoserve.errors import ClientError, EngineFailed, ModelNotFound, QueueFull, Unavailable

MAX_RETRY_AFTER_SECONDS = 120  # the openai client stops retrying when it is told to wait longer
ROUTES_TEXT = (
    "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/{id}, WS /ws, GET /steps, "
    "GET /metrics, GET /health, GET /livez, GET /openapi.json, GET /"
)


class Unauthorized(ClientError):
    """No key, or a wrong one."""

    code = "invalid_api_key"


class OriginRefused(ClientError):
    """A browser page of another origin opens a WebSocket."""

    code = "origin_not_allowed"


class RouteNotFound(ClientError):
    """No route at this path."""

    code = "not_found"


class MethodNotAllowed(ClientError):
    """The route exists, with other methods. `allowed` goes into the Allow header."""

    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: str) -> None:
        super().__init__(f"{path} does not take {method}; it takes {allowed}")
        self.allowed = allowed


class BodyTooLarge(ClientError):
    """The body exceeds `ServerConfig.max_body_bytes`."""

    code = "body_too_large"


class BodyTimeout(ClientError):
    """The body did not come whole within `ServerConfig.body_seconds`. The connection is closed: what may still come
    could not be told from a next request."""

    code = "body_timeout"


class UpgradeRequired(ClientError):
    """A plain HTTP request for the WebSocket's path."""

    code = "upgrade_required"


class HeadersTooLarge(ClientError):
    """The headers exceed `ServerConfig.max_header_bytes`."""

    code = "headers_too_large"


class UnsupportedMediaType(ClientError):
    """The body is not declared as JSON."""

    code = "unsupported_media_type"


class GenerationFailed(Unavailable):
    """An accepted generation that ended without its answer: the text of `Finished.error`."""

    code = "generation_failed"


# The first class that matches wins, so a subclass stands before its base.
TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (Unauthorized, 401, "invalid_request_error"),
    (OriginRefused, 403, "invalid_request_error"),
    (RouteNotFound, 404, "invalid_request_error"),
    (ModelNotFound, 404, "invalid_request_error"),
    (MethodNotAllowed, 405, "invalid_request_error"),
    (BodyTimeout, 408, "invalid_request_error"),
    (BodyTooLarge, 413, "invalid_request_error"),
    (UnsupportedMediaType, 415, "invalid_request_error"),
    (UpgradeRequired, 426, "invalid_request_error"),
    (HeadersTooLarge, 431, "invalid_request_error"),
    (ClientError, 400, "invalid_request_error"),
    (QueueFull, 429, "rate_limit_error"),
    (GenerationFailed, 500, "server_error"),
    (EngineFailed, 503, "server_error"),
    (Unavailable, 503, "server_error"),
    (Exception, 500, "server_error"),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the wire shows it: HTTP status, the inner `error` object, and extra response headers."""

    status: int
    error: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error}


def describe(error: Exception) -> Failure:
    """The wire form of `error`. What is not deliberate becomes a 500 that tells nothing of its inside."""
    status, kind = next((status, kind) for base, status, kind in TABLE if isinstance(error, base))
    headers: dict[str, str] = {}
    param: str | None = None
    if isinstance(error, ClientError):
        message, param, code = error.message, error.param, error.code
    elif isinstance(error, Unavailable):
        message, code = error.message, error.code
        if error.retry_after_seconds is not None:
            seconds = min(max(error.retry_after_seconds, 1.0), MAX_RETRY_AFTER_SECONDS)
            headers["retry-after"] = str(math.ceil(seconds))
    elif isinstance(error, HTTPException):
        status, message, code = error.status_code, error.detail, None
        kind = "server_error" if status >= 500 else "invalid_request_error"
        headers.update(error.headers or {})
    else:
        message, code = "internal error; the server's log has the details", "internal_error"
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTimeout):
        headers["connection"] = "close"
    if isinstance(error, UpgradeRequired):
        headers["upgrade"] = "websocket"
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    return Failure(status, {"message": message, "type": kind, "param": param, "code": code}, headers)


def route_not_found(method: str, path: str) -> RouteNotFound:
    return RouteNotFound(f"there is no {method} {path[:200]}; what exists: {ROUTES_TEXT}")
