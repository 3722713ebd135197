"""uvicorn's httptools protocol with a bound on what a client may send before its headers are complete, and with our
error shape where there is no request yet that the app could answer.

The parser underneath collects a header of any size; the ASGI app would see it only when it is in memory already.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanoserve.errors import ClientError, InvalidRequest
from server.failures import HeadersTooLarge, describe


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose client sends more than `max_header_bytes` without finishing its headers, or, inside a
    body, without adding to the body: a trailer or the extension of a chunk has no end of its own either."""

    def __init__(self, *args: Any, max_header_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_header_bytes = max_header_bytes
        self._held_bytes = 0
        self._advanced = False

    def on_message_begin(self) -> None:
        self._held_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._advanced = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advanced = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._advanced = False
        super().data_received(data)
        self._held_bytes = 0 if self._advanced else self._held_bytes + len(data)
        limit = self._max_header_bytes
        if self._held_bytes > limit and not self.transport.is_closing():
            size = self._held_bytes
            message = f"the headers are over {size:,} bytes; the limit is {limit:,}; send fewer or shorter ones"
            self._refuse(HeadersTooLarge(message))

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser gives up."""
        self._refuse(InvalidRequest("this is not a valid HTTP/1.1 request; check its headers", code="invalid_http"))

    def _refuse(self, error: ClientError) -> None:
        failure = describe(error)
        body = msgspec.json.encode(failure.body)
        head = f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(head.encode() + body)
        self.transport.close()
