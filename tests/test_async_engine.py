"""AsyncEngine: boot, answers, admission, live events."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from nanoserve.admission import Limits
from nanoserve.async_engine import AsyncEngine, expect
from nanoserve.boot import BootProgress, Report
from nanoserve.errors import (
    ContextLengthExceeded,
    Draining,
    EngineFailed,
    InvalidRequest,
    NotReady,
    OutOfMemory,
    QueueFull,
)
from nanoserve.intake import LONG_CHARACTERS
from nanoserve.metrics import Metrics
from nanoserve.request import Request, TokenPrompt
from tests.async_serving import ask, idle, in_flight, read, run, serving, status, until
from tests.engines import ScriptedRunner, text_script
from tests.fakes import ByteTokenizer

# --- boot ---------------------------------------------------------------------------------------------------------


def test_requests_are_refused_with_the_stage_until_the_boot_is_done() -> None:
    go = threading.Event()

    def slow(report: Report) -> None:
        report(BootProgress("loading", 3, 10, 4.0))
        go.wait(10)

    async def main() -> None:
        async with serving(before=slow) as (engine, _):
            with pytest.raises(NotReady):
                await engine.submit(ask())
            await until(lambda: status(engine) == "loading")
            with pytest.raises(NotReady, match="stage loading, 3 of 10") as refused:
                await engine.submit(ask())
            assert refused.value.retry_after_seconds == 4.0
            snapshot = engine.snapshot()
            assert not snapshot.health["ready"]
            assert snapshot.health["progress"] == {"stage": "loading", "done": 3, "total": 10, "eta_seconds": 4.0}
            assert snapshot.max_model_len is None
            assert snapshot.metrics["kv"]["blocks_total"] is None
            engine.abort("nothing yet")
            go.set()
            await until(lambda: status(engine) == "ready")
            assert engine.snapshot().max_model_len == 128
            assert (await read(await engine.submit(ask(max_tokens=2)))).text() == "xx"

    run(main())


def test_live_events_tell_the_boot_from_its_present_stage_on() -> None:
    go = threading.Event()

    def slow(report: Report) -> None:
        report(BootProgress("loading", 1, 2))
        go.wait(10)
        report(BootProgress("warming", 0, 4, 1.0))

    async def main() -> None:
        async with serving(before=slow) as (engine, _):
            await until(lambda: status(engine) == "loading")
            events = engine.events()
            stages = [(await anext(events))["stage"]]
            go.set()
            while stages[-1] != "ready":
                event = await anext(events)
                stages += [event["stage"]] if event["type"] == "boot" else []
            assert stages == ["loading", "warming", "ready"]

    run(main())


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(OutOfMemory("lower --kv-memory"), 6, "lower --kv-memory"), (ValueError("oops"), 1, "ValueError: oops")],
    ids=["startup error", "bug"],
)
def test_boot_failure_is_an_event_with_the_exit_code(error: Exception, code: int, message: str) -> None:
    def boot(report: Report) -> Any:
        raise error

    async def main() -> None:
        async with serving(boot=boot) as (engine, _):
            event = await anext(engine.events())
            assert (event["stage"], event["message"]) == ("failed", message)
            assert engine.snapshot().health["message"] == message
            with pytest.raises(EngineFailed, match=message):
                await engine.submit(ask())
            await engine.drain(1.0)

    async def watched() -> None:
        metrics = Metrics("1.0")
        engine = AsyncEngine(boot, metrics, model_names=("tiny",), version="1.0")
        events = engine.events()
        assert (await anext(events))["stage"] == "starting"
        async with engine:
            assert (await anext(events))["exit_code"] == code

    run(main())
    run(watched())


# --- answers ------------------------------------------------------------------------------------------------------


def test_text_streams_when_it_is_scripted() -> None:
    runner = ScriptedRunner(text_script({"a": "Grüße 😊", "b": "second"}))

    async def main() -> None:
        async with serving(runner) as (engine, metrics):
            first, second = await asyncio.gather(
                *(read(stream) for stream in [await engine.submit(ask("a")), await engine.submit(ask("b"))])
            )
            assert (first.text(), second.text()) == ("Grüße 😊", "second")
            assert first.finished.finish_reasons == ("stop",)
            assert second.finished.usage.completion_tokens == len("second") + 1
            await idle(metrics)
            assert metrics.counters.finished == 2
            assert first.finished.timings.queue_seconds < 1
            latency = metrics.snapshot()["latency"]
            assert (latency["queue_seconds"]["count"], latency["ttft_seconds"]["count"]) == (2, 2)

    run(main())


def test_slow_reader_gets_one_delta_and_slows_nobody_when_it_reads_at_the_end() -> None:
    runner = ScriptedRunner(text_script({"slow": "s" * 90, "quick": "q" * 60}))

    async def main() -> None:
        async with serving(runner) as (engine, metrics):
            slow = await engine.submit(ask("slow"))
            quick = await read(await engine.submit(ask("quick")))
            await idle(metrics)
            answer = await read(slow)
            assert (answer.text(), len(answer.deltas)) == ("s" * 90, 1)
            assert quick.text() == "q" * 60
            assert answer.tokens() == 91

    run(main())


def test_loop_is_never_blocked_when_steps_are_slow() -> None:
    runner = ScriptedRunner(seconds=0.5)

    async def main() -> None:
        async with serving(runner) as (engine, _):
            stream = await engine.submit(ask(max_tokens=3))
            reader = asyncio.create_task(read(stream))
            turns = 0
            while not reader.done():
                await asyncio.sleep(0.005)
                engine.snapshot()
                turns += 1
            assert turns > 10, "three steps of half a second each"

    run(main())


def test_stop_string_costs_one_discarded_token_when_the_next_step_already_runs() -> None:
    runner = ScriptedRunner(text_script({"a": "one STOP two three"}))

    async def main() -> None:
        async with serving(runner) as (engine, metrics):
            answer = await read(await engine.submit(ask("a", stop=("STOP",))))
            await idle(metrics)
            assert (answer.text(), answer.finished.finish_reasons) == ("one ", ("stop",))
            assert answer.tokens() == answer.finished.usage.completion_tokens == len("one STOP")
            assert len(runner.plans) <= len("one STOP") + 1

    run(main())


def test_four_choices_have_their_indices_and_one_finish_each() -> None:
    runner = ScriptedRunner(lambda request, choice, index: ord("a") + choice)

    async def main() -> None:
        async with serving(runner) as (engine, metrics):
            answer = await read(await engine.submit(ask(n=4, max_tokens=5)))
            assert [answer.text(index) for index in range(4)] == ["aaaaa", "bbbbb", "ccccc", "ddddd"]
            assert sorted(d.index for d in answer.deltas if d.finish_reason == "length") == [0, 1, 2, 3]
            assert answer.finished.usage.completion_tokens == 20
            assert answer.finished.finish_reasons == ("length",) * 4
            await idle(metrics)

    run(main())


# --- admission ----------------------------------------------------------------------------------------------------


def test_request_is_refused_with_a_wait_when_the_queue_is_full() -> None:
    runner = ScriptedRunner()
    runner.gate.clear()

    async def main() -> None:
        async with serving(runner, limits=Limits(max_queued=2), max_sequences=1) as (engine, metrics):
            streams = [await engine.submit(ask(max_tokens=2))]
            await in_flight(runner)
            streams += [await engine.submit(ask(max_tokens=2)) for _ in range(2)]
            with pytest.raises(QueueFull, match="2 sequences wait and this request adds 1; the limit is 2") as refused:
                await engine.submit(ask("late"))
            assert refused.value.retry_after_seconds is not None
            assert refused.value.retry_after_seconds > 0
            assert (metrics.counters.rejected, metrics.gauges.waiting) == (1, 2)
            with pytest.raises(InvalidRequest, match="n is 4; 1 sequences run at once and the queue holds 2; lower n"):
                await engine.submit(ask("many", n=4))  # no wait would ever make room for it
            runner.gate.set()
            assert [(await read(stream)).text() for stream in streams] == ["xx"] * 3
            assert (await read(await engine.submit(ask(max_tokens=1)))).text() == "x"

    run(main())


def test_impossible_requests_leave_nothing_behind_and_neighbours_are_served() -> None:
    """A pool of 8 blocks of 16: 200 prompt tokens, or 100 and 500 to come, can never fit; nor can ids that are none."""
    runner = ScriptedRunner(text_script({"neighbour": "n" * 50, "s0": "a", "s1": "b", "s2": "c"}))

    async def main() -> None:
        async with serving(runner, blocks=8, block_size=16, max_model_len=128) as (engine, metrics):
            neighbour = asyncio.create_task(read(await engine.submit(ask("neighbour"))))
            for bad, error in [
                (ask(prompt="x" * 200, max_tokens=1), ContextLengthExceeded),
                (ask(prompt="x" * 100, max_tokens=500), ContextLengthExceeded),
                (ask(logit_bias=((300, 1.0),)), InvalidRequest),
                (ask(stop_token_ids=(300,)), InvalidRequest),
                (Request("bad", TokenPrompt((2**62,))), InvalidRequest),
            ]:
                with pytest.raises(error):
                    await engine.submit(bad)
            short = await asyncio.gather(*[read(await engine.submit(ask(f"s{n}"))) for n in range(3)])
            assert [answer.text() for answer in short] == ["a", "b", "c"]
            assert (await neighbour).text() == "n" * 50
            assert metrics.counters.rejected == 5
            await idle(metrics)

    run(main())


def long_prompt(reading: threading.Event, go: threading.Event) -> tuple[ScriptedRunner, dict[str, Any]]:
    """A server whose tokenizer, at a long text, sets `reading` and waits for `go`."""

    class Slow(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
            if len(text) > LONG_CHARACTERS:
                reading.set()
                assert go.wait(10)
            return super().encode(text)

        def fewest_tokens(self, text: str) -> int:
            return 0

    return ScriptedRunner(), {"tokenizer": Slow()}


def test_others_are_served_while_a_long_prompt_is_read() -> None:
    reading, go = threading.Event(), threading.Event()
    runner, fields = long_prompt(reading, go)

    async def main() -> None:
        async with serving(runner, **fields) as (engine, metrics):
            long = asyncio.create_task(engine.submit(ask(prompt="x" * (LONG_CHARACTERS + 1))))
            await until(reading.is_set)
            assert (await read(await engine.submit(ask(max_tokens=3)))).text() == "xxx"
            go.set()
            with pytest.raises(ContextLengthExceeded, match="the prompt is 8,193 tokens"):
                await long
            assert metrics.counters.rejected == 1
            await idle(metrics)

    run(main())


@pytest.mark.parametrize("end", ["drain", "cancel"])
def test_nothing_is_left_behind_when_a_long_prompt_is_read_too_late(end: str) -> None:
    reading, go = threading.Event(), threading.Event()
    runner, fields = long_prompt(reading, go)

    async def main() -> None:
        async with serving(runner, **fields, max_model_len=10_000, blocks=1000) as (engine, metrics):
            long = asyncio.create_task(engine.submit(ask(prompt="x" * (LONG_CHARACTERS + 1))))
            await until(reading.is_set)
            if end == "drain":
                await engine.drain(1.0)
            else:
                long.cancel()
            go.set()
            with pytest.raises(Draining if end == "drain" else asyncio.CancelledError):
                await long
            await idle(metrics)
            assert runner.plans == []

    run(main())


# --- live events --------------------------------------------------------------------------------------------------


def test_steps_are_told_once_and_at_most_ten_times_a_second_when_watched() -> None:
    runner = ScriptedRunner(seconds=0.01)

    async def main() -> None:
        async with serving(runner) as (engine, _):
            await read(await engine.submit(ask(max_tokens=5)))
            watched = engine.events()
            assert (await anext(watched))["stage"] == "ready"
            before = len(runner.plans)
            started = time.monotonic()
            await read(await engine.submit(ask(max_tokens=60)))
            seen: list[dict[str, Any]] = []
            while sum(event["steps"] for event in seen) < len(runner.plans) - before:
                seen.append(await anext(watched))
            elapsed = time.monotonic() - started
            assert all(event["type"] == "steps" for event in seen)
            assert sum(event["steps"] for event in seen) == 60
            assert next(event["first_step"] for event in seen) == before
            assert len(seen) <= elapsed * 10 + 1
            for event in seen:
                assert event["steps"] == sum(shape["count"] for shape in event["shapes"])
                assert event["blocks_total"] == 64
            await watched.aclose()  # type: ignore[attr-defined]

    run(main())


def test_idle_engine_still_says_so_once_a_second_when_watched() -> None:
    async def main() -> None:
        async with serving() as (engine, _):
            events = engine.events()
            await anext(events)
            started = time.monotonic()
            event = await asyncio.wait_for(anext(events), 30)
            assert time.monotonic() - started > 0.5
            assert (event["steps"], event["running"], event["waiting"]) == (0, 0, 0)

    run(main())


def test_answers_match_when_the_tokenizer_strips_a_leading_space() -> None:
    """A text prompt's answer keeps the space that continues it."""
    tokenizer = ByteTokenizer(pieces=(b" Paris",), strips_leading_space=True)
    runner = ScriptedRunner(lambda request, choice, index: 258 if index == 0 else ByteTokenizer.EOS)

    async def main() -> None:
        async with serving(runner, tokenizer=tokenizer) as (engine, _):
            assert (await read(await engine.submit(ask(prompt="The capital of")))).text() == " Paris"

    run(main())


def test_live_events_say_degraded_when_the_engine_serves_less_than_it_promises() -> None:
    async def main() -> dict[str, Any]:
        async with serving(ScriptedRunner(), degraded="4 shapes without a graph") as (engine, _):
            async for event in engine.events():
                return event
        raise AssertionError("no event")

    event = run(main())
    assert (event["type"], event["stage"]) == ("boot", "degraded")


def test_a_slow_step_hardly_moves_what_the_next_is_expected_to_take() -> None:
    assert expect(0.0, 0.02) == 0.02, "nothing was known"
    assert expect(0.01, 0.03) == pytest.approx(0.011)
    assert expect(0.01, 0.004) == 0.004
