"""EngineThread: a thread that works for the event loop: the one that boots the engine and runs its steps, and the one
that reads long prompts.

One thread for boot and steps, because OpenMP keeps a pool of workers for every thread that computes and slows down
when two are alive. A daemon, because neither a signal nor a failed bind may wait for a load. Not an Executor: those
join at exit.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]"]


class EngineThread:
    """Jobs run one at a time, in order. Must be made on a running event loop."""

    def __init__(self, name: str = "nanoserve-engine") -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run `function(*args)` on the thread; the future belongs to the event loop."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((function, args, future))
        return future

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """From the thread: run `function(*args)` on the event loop soon. Ignored once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return  # the loop ended while a job was running: nobody is left to be told

    def stop(self) -> None:
        """Let the thread end after the job it is in. Does not wait."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, args, future = job
            try:
                result = function(*args)
            except BaseException as error:
                self.call_soon(_set_exception, future, error)
            else:
                self.call_soon(_set_result, future, result)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
