"""An AsyncEngine over a scripted runner, and readers of its streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from nanoserve.admission import Limits
from nanoserve.async_engine import AsyncEngine
from nanoserve.boot import Boot
from nanoserve.metrics import Metrics
from nanoserve.request import Delta, Request, SamplingParams, TextPrompt
from nanoserve.stream import RequestStream
from tests.engines import ScriptedRunner, scripted_boot

IDS = count()
FOREVER = 100


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 30))


def ask(
    request_id: str | None = None, prompt: str = "hello", *, timeout: float | None = None, **params: Any
) -> Request:
    defaults: dict[str, Any] = {"max_tokens": FOREVER}
    return Request(request_id or f"r{next(IDS)}", TextPrompt(prompt), SamplingParams(**{**defaults, **params}), timeout)


class Answer:
    """Everything a stream said."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.deltas = deltas
        (self.finished,) = [delta.finished for delta in deltas if delta.finished is not None]
        assert deltas[-1].finished is not None, "the finish comes last"

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def tokens(self, index: int = 0) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas if delta.index == index)


async def read(stream: RequestStream) -> Answer:
    return Answer([delta async for delta in stream])


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.002)


def status(engine: AsyncEngine) -> str:
    return str(engine.snapshot().health["status"])


@asynccontextmanager
async def serving(
    runner: ScriptedRunner | None = None, *, boot: Boot | None = None, limits: Limits | None = None, **fields: Any
) -> AsyncIterator[tuple[AsyncEngine, Metrics]]:
    metrics = Metrics("1.0")
    runner = runner or ScriptedRunner()
    boot = boot or scripted_boot(runner, metrics, **fields)
    engine = AsyncEngine(boot, metrics, model_names=("tiny",), version="1.0", limits=limits)
    async with engine:
        if fields.get("before") is None:
            await until(lambda: status(engine) in ("ready", "degraded", "failed"))
        yield engine, metrics
        runner.gate.set()


async def in_flight(runner: ScriptedRunner) -> None:
    """Return once a step has begun."""
    assert await asyncio.to_thread(runner.started.wait, 10)
    runner.started.clear()


async def idle(metrics: Metrics) -> None:
    await until(lambda: metrics.gauges.running == metrics.gauges.waiting == metrics.gauges.blocks_used == 0)
