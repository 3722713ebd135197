"""The end of the process as the handlers see it: one event that says "close what never ends by itself", and a count of
the WebSockets that have not closed yet. Owned by the app, driven by `server.run`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


class Lifecycle:
    """`closing` is set once every generation has ended: endless streams and sockets then close themselves."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self._sockets = 0
        self._no_sockets = asyncio.Event()
        self._no_sockets.set()

    @contextmanager
    def socket(self) -> Iterator[None]:
        """Counts a WebSocket as open for the time of the block."""
        self._sockets += 1
        self._no_sockets.clear()
        try:
            yield
        finally:
            self._sockets -= 1
            if not self._sockets:
                self._no_sockets.set()

    async def close(self, timeout_seconds: float) -> None:
        """Set `closing` and wait until the sockets are gone, at most `timeout_seconds`."""
        self.closing.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_sockets.wait(), timeout_seconds)

    async def until_closing(self, source: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """The items of `source` until it ends or `closing` is set."""
        closing = asyncio.create_task(self.closing.wait())
        item: asyncio.Future[T] | None = None
        try:
            while True:
                item = asyncio.ensure_future(anext(source))
                await asyncio.wait({item, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    return
                try:
                    value = item.result()
                except StopAsyncIteration:
                    return
                yield value
        finally:
            closing.cancel()
            if item is not None:
                item.cancel()
                await asyncio.wait({item})
