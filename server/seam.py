"""The five methods through which the server sees the engine. `nanoserve.async_engine.AsyncEngine` is the one product
implementation; tests hand in a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Protocol

from nanoserve.request import Delta, Request


class Generation(Protocol):
    """One accepted request's output. Iterating yields merged deltas until the one that bears `finished`.

    Nothing is lost when a reader is slow: deltas of the same choice merge. Leaving the iteration early aborts nothing;
    call `abort`.
    """

    request_id: str
    prompt_tokens: int

    def __aiter__(self) -> AsyncIterator[Delta]: ...


class Engine(Protocol):
    async def submit(self, request: Request) -> Generation:
        """Render, tokenise, validate against the loaded model and enqueue.

        Raises ClientError (bad or impossible request), NotReady, Draining, QueueFull or EngineFailed; a request that
        raised left nothing behind. From acceptance on exactly one delta with `finished` is certain to come.
        """

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason `cancelled`. Unknown or finished ids are ignored. Returns at once; the
        blocks are back by the next step boundary."""

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """Live events from now on: `{"type": "boot", …}` and `{"type": "steps", …}`, with the fields of CONTRACT.md;
        the state of the moment first. Any number of subscribers; a slow one skips, it never blocks the step loop.

        A boot that fails ends in `{"type": "boot", "stage": "failed", "message": …, "exit_code": …}`, upon which the
        process ends with that code. A failure after ready carries no `exit_code`: the process stays and says so."""

    def snapshot(self) -> Snapshot:
        """`/health` and `/metrics` as JSON-ready dicts. Cheap, never blocks, valid in every stage."""

    async def drain(self, seconds: float) -> None:
        """Accept nothing more; return when all generations have ended, at the latest after `seconds`, when what is
        left ends with finish_reason `draining`. Also ends a boot in progress. A second call with fewer seconds
        shortens the first."""


class Snapshot(Protocol):
    """Taken for every request: what is costly, such as percentiles, is best computed when it is read."""

    @property
    def health(self) -> dict[str, Any]: ...

    @property
    def metrics(self) -> dict[str, Any]: ...

    @property
    def model_names(self) -> tuple[str, ...]: ...

    @property
    def max_model_len(self) -> int | None: ...

    @property
    def created(self) -> int:
        """Unix seconds at which the model was opened."""

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """`SamplingParams` fields the model's generation_config sets, for requests that leave them out. Empty until
        known."""


class BootableEngine(Engine, Protocol):
    """Entering starts the boot (a background thread) and the step loop and returns at once; leaving stops both."""

    async def __aenter__(self) -> BootableEngine: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...
