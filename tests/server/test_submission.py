"""Several generations as one stream, and the ways it can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from nanoserve.request import Delta, Finished, GraphUse, Request, SamplingParams, TextPrompt, Timings, Usage
from server.lifecycle import Lifecycle
from server.submission import Submission, combine
from tests.server.fake_engine import Script, ScriptedEngine


def request(name: str, n: int = 1) -> Request:
    return Request(name, TextPrompt(f"prompt of {name}"), SamplingParams(n=n))


def run(work: Callable[[ScriptedEngine], Awaitable[None]], **options: object) -> ScriptedEngine:
    async def inside() -> ScriptedEngine:
        async with ScriptedEngine(**options) as engine:  # type: ignore[arg-type]
            await engine.reached("ready")
            await work(engine)
            return engine

    return asyncio.run(inside())


def finished(reason: str, steps: int, pad: float, ttft: float | None, error: str | None = None) -> Finished:
    timings = Timings(steps / 10, steps / 5, steps / 2, ttft)
    return Finished((reason,), Usage(2, 3, 1), GraphUse(steps, steps, 0, pad), timings, error)  # type: ignore[arg-type]


def test_records_add_up_when_combined() -> None:
    both = combine([finished("stop", 1, 3.0, 0.5), finished("length", 3, 1.0, 0.2)])
    assert both.finish_reasons == ("stop", "length")
    assert both.usage == Usage(4, 6, 2)
    assert both.graph == GraphUse(4, 4, 0, 1.5)
    assert both.timings == Timings(0.3, 0.6, 1.5, 0.2)
    assert combine([finished("stop", 0, 0.0, None), finished("error", 0, 0.0, None, "why")]).error == "why"


def test_reasons_stand_in_the_order_of_the_prompts_when_the_last_ends_first() -> None:
    async def work(engine: ScriptedEngine) -> None:
        scripts = {"a": Script(delay=0.05, finish="stop"), "b": Script(finish="length")}
        engine.script = lambda r: scripts[r.request_id]
        async with Submission(engine, [request("a", 2), request("b", 2)]) as submission:
            deltas = [delta async for delta in submission.deltas()]
        assert [delta.finished is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].finished is not None
        assert deltas[-1].finished.finish_reasons == ("stop", "stop", "length", "length")
        assert {delta.index for delta in deltas} == {0, 1, 2, 3}

    assert run(work).aborted == []


def test_everything_is_aborted_when_the_reader_stops_early() -> None:
    async def work(engine: ScriptedEngine) -> None:
        engine.script = lambda r: Script(delay=0.01)
        async with Submission(engine, [request("a"), request("b")]) as submission:
            async with aclosing(submission.deltas()) as deltas:
                async for _ in deltas:
                    break
        assert not engine.running

    assert run(work).aborted == ["a", "b"]


def test_what_was_accepted_is_aborted_when_a_later_request_is_refused() -> None:
    async def work(engine: ScriptedEngine) -> None:
        engine.script = lambda r: Script(delay=60)
        engine.max_queued = 2
        with pytest.raises(Exception, match="the limit is 2"):
            await Submission(engine, [request(name) for name in "abc"]).submit()

    assert run(work).aborted == ["a", "b"]


def test_failure_of_one_generation_reaches_the_reader_when_there_are_several() -> None:
    class Broken:
        request_id, prompt_tokens = "b", 1

        async def __aiter__(self) -> AsyncIterator[Delta]:
            yield Delta(0, "x")
            raise RuntimeError("the generation broke")

    class Engine(ScriptedEngine):
        async def submit(self, request: Request) -> object:  # type: ignore[override]
            return Broken() if request.request_id == "b" else await super().submit(request)

    async def work() -> None:
        async with Engine() as engine:
            engine.script = lambda r: Script(delay=60)
            await engine.reached("ready")
            async with Submission(engine, [request("a"), request("b")]) as submission:  # type: ignore[arg-type]
                with pytest.raises(RuntimeError, match="the generation broke"):
                    _ = [delta async for delta in submission.deltas()]
            assert engine.aborted == ["a"]

    asyncio.run(work())


# --- the lifecycle


def test_stream_ends_when_its_source_does_or_the_process_closes() -> None:
    async def count(upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number
            await asyncio.sleep(0)

    async def for_ever(ended: asyncio.Event) -> AsyncIterator[int]:
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def work() -> None:
        lifecycle, ended = Lifecycle(), asyncio.Event()
        assert [number async for number in lifecycle.until_closing(count(5))] == [0, 1, 2, 3, 4]
        asyncio.get_running_loop().call_later(0.01, lifecycle.closing.set)
        assert [number async for number in lifecycle.until_closing(for_ever(ended))] == [0]
        assert ended.is_set()

    asyncio.run(work())


def test_close_waits_for_the_sockets_but_not_for_ever() -> None:
    async def work() -> None:
        lifecycle = Lifecycle()
        await lifecycle.close(0)
        with lifecycle.socket():
            started = asyncio.get_running_loop().time()
            await lifecycle.close(0.05)
            assert asyncio.get_running_loop().time() - started >= 0.04
        await asyncio.wait_for(lifecycle.close(60), 1)

    asyncio.run(work())
