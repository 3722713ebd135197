"""Admission: what may wait, when to come back, who goes first, and how long anybody may take."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from nanoserve.admission import Limits
from nanoserve.errors import InvalidRequest, QueueFull
from nanoserve.intake import LONG_CHARACTERS
from nanoserve.metrics import StartRate
from tests.async_serving import FOREVER, ask, idle, in_flight, read, run, serving, until
from tests.engines import ScriptedRunner
from tests.test_async_engine import long_prompt

# --- the queue's limits ----------------------------------------------------------------------------------------------


def test_rows_that_are_free_are_no_queue_when_a_burst_meets_an_idle_engine() -> None:
    async def main() -> None:
        async with serving(limits=Limits(max_queued=1), max_sequences=4) as (engine, metrics):
            streams = [await engine.submit(ask(max_tokens=3)) for _ in range(5)]  # before any step is planned
            with pytest.raises(QueueFull, match="5 sequences wait and this request adds 1; the limit is 1"):
                await engine.submit(ask())
            assert [(await read(stream)).text() for stream in streams] == ["xxx"] * 5
            await idle(metrics)

    run(main())


def test_every_choice_counts_when_requests_have_several() -> None:
    async def main() -> None:
        async with serving(limits=Limits(max_queued=3), max_sequences=2) as (engine, _):
            stream = await engine.submit(ask(n=4, max_tokens=2))
            with pytest.raises(QueueFull, match="4 sequences wait and this request adds 2; the limit is 3"):
                await engine.submit(ask(n=2))
            with pytest.raises(InvalidRequest, match="n is 6; 2 sequences run at once and the queue holds 3; lower n"):
                await engine.submit(ask(n=6))
            assert (await read(stream)).finished.usage.completion_tokens == 8

    run(main())


def test_prompt_tokens_that_wait_are_limited_but_never_keep_out_the_first() -> None:
    runner = ScriptedRunner()
    runner.gate.clear()

    async def main() -> None:
        async with serving(runner, limits=Limits(max_queued_tokens=20), max_sequences=1) as (engine, metrics):
            streams = [await engine.submit(ask(prompt="x" * 60, max_tokens=1))]  # nobody waits
            await in_flight(runner)
            streams.append(await engine.submit(ask(prompt="x" * 15, max_tokens=1)))
            streams.append(await engine.submit(ask(prompt="x" * 5, max_tokens=1)))
            with pytest.raises(
                QueueFull, match="20 prompt tokens wait and this request adds 2; the limit is 20"
            ) as full:
                await engine.submit(ask(prompt="xx"))
            assert full.value.retry_after_seconds is not None
            assert full.value.retry_after_seconds >= 1
            runner.gate.set()
            for stream in streams:
                assert (await read(stream)).text() == "x"
            assert metrics.counters.rejected == 1
            assert (await read(await engine.submit(ask(prompt="x" * 60, max_tokens=1)))).text() == "x"

    run(main())


def test_prompts_that_are_still_read_count_as_waiting() -> None:
    reading, go = threading.Event(), threading.Event()
    runner, fields = long_prompt(reading, go)

    async def main() -> None:
        limits = Limits(max_queued=1)
        async with serving(runner, limits=limits, max_sequences=1, max_model_len=10_000, blocks=2600, **fields) as (
            engine,
            metrics,
        ):
            text = "x" * (LONG_CHARACTERS + 1)
            long = [asyncio.create_task(engine.submit(ask(prompt=text, max_tokens=1))) for _ in range(2)]
            await until(reading.is_set)
            with pytest.raises(QueueFull, match="2 sequences wait and this request adds 1"):
                await engine.submit(ask(prompt=text))
            go.set()
            for task in long:
                assert (await read(await task)).text() == "x"
            await idle(metrics)

    run(main())


def test_wait_is_what_the_last_minute_says_when_a_queue_moves_slowly() -> None:
    now = [0.0]
    rate = StartRate(lambda: now[0])
    assert rate.seconds_for(sequences=1) == 1.0, "nothing is known, so as soon as the header can say"
    for second in range(300):
        now[0] = float(second)
        fast = second < 200
        rate.add(0.5, sequences=4 if fast else 1, tokens=400 if fast else 50)
    # The last minute: half a second of steps in each second, one sequence of 50 tokens started.
    assert rate.seconds_for(sequences=10) == pytest.approx(5.0, rel=0.05)
    assert rate.seconds_for(tokens=1000) == pytest.approx(10.0, rel=0.05)
    assert rate.seconds_for(sequences=10, tokens=1000) == pytest.approx(10.0, rel=0.05)
    now[0] = 10_000.0
    for _ in range(8):
        now[0] += 1.0
        rate.add(1.0, sequences=0, tokens=0)
    assert rate.seconds_for(sequences=3) == pytest.approx(8.0), "none has left: as long again as the steps took"


# --- priority --------------------------------------------------------------------------------------------------------


def test_urgent_request_is_answered_first_when_one_row_serves_all() -> None:
    runner = ScriptedRunner()
    runner.gate.clear()
    ended: list[str] = []

    async def main() -> None:
        async with serving(runner, max_sequences=1) as (engine, metrics):

            async def one(name: str, priority: int) -> None:
                stream = await engine.submit(replace(ask(name, max_tokens=2), priority=priority))
                await read(stream)
                ended.append(name)

            running = asyncio.create_task(one("running", 5))
            await in_flight(runner)
            later = (("late", 1), ("normal", 0), ("soon", -1), ("next", 0))
            tasks = [asyncio.create_task(one(*each)) for each in later]
            await until(lambda: metrics.gauges.waiting == 4)
            runner.gate.set()
            await asyncio.gather(running, *tasks)
            assert ended == ["running", "soon", "normal", "next", "late"]

    run(main())


# --- time-outs -------------------------------------------------------------------------------------------------------


def test_default_timeout_ends_requests_that_name_none() -> None:
    runner = ScriptedRunner(seconds=0.02)

    async def main() -> None:
        limits = Limits(request_timeout_seconds=0.2)
        async with serving(runner, limits=limits, max_sequences=2) as (engine, metrics):
            ended, own = await asyncio.gather(
                read(await engine.submit(ask())), read(await engine.submit(ask(timeout=30.0, max_tokens=40)))
            )
            assert ended.finished.finish_reasons == ("timeout",)
            assert ended.tokens() == ended.finished.usage.completion_tokens < FOREVER
            assert (own.finished.finish_reasons, own.tokens()) == (("length",), 40)
            await idle(metrics)

    run(main())


def test_time_spent_on_reading_a_prompt_counts_to_its_timeout() -> None:
    reading, go = threading.Event(), threading.Event()
    runner, fields = long_prompt(reading, go)

    async def main() -> None:
        async with serving(runner, max_model_len=10_000, blocks=2600, **fields) as (engine, metrics):
            started = time.monotonic()
            text = "x" * (LONG_CHARACTERS + 1)
            long = asyncio.create_task(engine.submit(ask(prompt=text, timeout=0.3)))
            await until(reading.is_set)
            await until(lambda: time.monotonic() - started > 0.4)
            go.set()
            answer = await read(await long)
            assert (answer.finished.finish_reasons, answer.tokens()) == (("timeout",), 0)
            await idle(metrics)

    run(main())
