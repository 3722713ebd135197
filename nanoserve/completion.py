"""Completion: how compute threads that are not Python's tell the event loop that a step is over."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress


class Completion:
    """A descriptor that is written to at the end of each step, and a coroutine that waits for the next such end.

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
        self._ends = 0
        self._done = asyncio.Event()
        self._loop.add_reader(self._read_fd, self._notice)

    def _notice(self) -> None:
        """An eventfd adds up what was written to it; a pipe keeps it apart."""
        with suppress(BlockingIOError):
            data = os.read(self._read_fd, 64)
            self._ends += sum(int.from_bytes(data[at : at + 8], sys.byteorder) for at in range(0, len(data), 8))
        if self._ends:
            self._done.set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Return once one more step has ended than this has returned True for; False if that takes `seconds`."""
        timer = self._loop.call_later(seconds, self._done.set) if seconds is not None else None
        await self._done.wait()
        if timer is not None:
            timer.cancel()
        ended = self._ends > 0
        self._ends -= ended
        if not self._ends:
            self._done.clear()
        return ended

    def close(self) -> None:
        self._loop.remove_reader(self._read_fd)
        for fd in {self._read_fd, self.write_fd}:
            os.close(fd)
