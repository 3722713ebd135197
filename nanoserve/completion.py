"""Completion: how compute threads that are not Python's tell the event loop that a step is over."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress


class Completion:
    """A descriptor that is written to at the end of a step, and a coroutine that waits for it.

    An eventfd where the system has one (and `eventfd` is true), else a pipe. Belongs to the running event loop; one
    waiter at a time.
    """

    def __init__(self, *, eventfd: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        if eventfd and hasattr(os, "eventfd"):
            self._read_fd = self.write_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self._read_fd, self.write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
        self._done = asyncio.Event()
        self._loop.add_reader(self._read_fd, self._notice)

    def _notice(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read_fd, 8)
        self._done.set()

    async def wait(self) -> None:
        """Return once the descriptor has been written to since the last call."""
        await self._done.wait()
        self._done.clear()

    def close(self) -> None:
        self._loop.remove_reader(self._read_fd)
        for fd in {self._read_fd, self.write_fd}:
            os.close(fd)
