"""uvicorn's httptools protocol with a bound on what a client may send before its headers are complete.

The parser underneath collects a header of any size; the ASGI app would see it only when it is in memory already.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LARGE = b'{"error":{"message":"the headers are over the limit of %d bytes; send fewer or shorter ones",'
_TOO_LARGE += b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, max_header_bytes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_header_bytes = max_header_bytes
        self._in_headers = True
        self._header_bytes = 0

    def on_message_begin(self) -> None:
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_headers:
            return
        self._header_bytes += len(data)
        if self._header_bytes > self._max_header_bytes and not self.transport.is_closing():
            body = _TOO_LARGE % self._max_header_bytes
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            self.transport.write(head + b"connection: close\r\n" + b"content-length: %d\r\n\r\n" % len(body) + body)
            self.transport.close()
