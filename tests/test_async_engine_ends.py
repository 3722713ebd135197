"""AsyncEngine: aborts, time-outs, drain, failure. Whatever ends a request, it gets one `finished`."""

from __future__ import annotations

import asyncio
import threading
import time
from random import Random
from typing import Any

import pytest

from nanoserve.async_engine import AsyncEngine
from nanoserve.boot import Booted, Report
from nanoserve.buckets import DecodeShape
from nanoserve.errors import (
    Draining,
    EngineFailed,
)
from nanoserve.metrics import Metrics
from nanoserve.request import Finished
from tests.async_serving import FOREVER, Answer, ask, idle, in_flight, read, run, serving, status, until
from tests.engines import ScriptedRunner, scripted_boot, text_script

# --- aborts and time-outs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_abort_ends_a_request_at_once_and_gives_its_blocks_back_by_the_next_step(when: str) -> None:
    runner = ScriptedRunner()

    async def main() -> None:
        rows = 1 if when == "queued" else 4
        async with serving(runner, max_sequences=rows, max_step_rows=4) as (engine, metrics):
            runner.gate.clear()
            other = await engine.submit(ask("other", max_tokens=30)) if when == "queued" else None
            victim = await engine.submit(ask("victim", prompt="a prompt of several chunks"))
            await in_flight(runner)
            if when == "decode":
                runner.gate.set()
                await until(lambda: metrics.counters.generated_tokens > 3)
                runner.gate.clear()
                runner.started.clear()
                await in_flight(runner)
            for _ in range(2):
                engine.abort("victim")
            answer = await asyncio.wait_for(read(victim), 1)  # a step is still in flight
            assert answer.finished.finish_reasons == ("cancelled",)
            assert (answer.tokens() > 0) is (when == "decode")
            assert answer.tokens() == answer.finished.usage.completion_tokens
            runner.gate.set()
            if other is not None:
                assert (await read(other)).text() == "x" * 30
            await idle(metrics)
            engine.abort("victim")
            engine.abort("never seen")
            assert (metrics.counters.aborted, metrics.counters.finished) == (1, int(when == "queued"))

    run(main())


def test_abort_is_ignored_when_the_request_has_just_finished() -> None:
    async def main() -> None:
        async with serving() as (engine, metrics):
            stream = await engine.submit(ask("a", max_tokens=3))
            await until(lambda: metrics.counters.finished == 1)
            engine.abort("a")
            answer = await read(stream)
            assert (answer.text(), answer.finished.finish_reasons) == ("xxx", ("length",))
            assert metrics.counters.aborted == 0

    run(main())


def test_all_choices_are_freed_when_a_request_of_four_is_aborted() -> None:
    async def main() -> None:
        async with serving(ScriptedRunner(seconds=0.002)) as (engine, metrics):
            stream = await engine.submit(ask("a", n=4))
            await until(lambda: metrics.counters.generated_tokens > 8)
            engine.abort("a")
            assert (await read(stream)).finished.finish_reasons == ("cancelled",) * 4
            await idle(metrics)

    run(main())


@pytest.mark.parametrize("where", ["queued", "running"])
def test_timeout_ends_a_request_with_the_tokens_so_far(where: str) -> None:
    runner = ScriptedRunner(seconds=0.02)

    async def main() -> None:
        async with serving(runner, max_sequences=1) as (engine, metrics):
            first = await engine.submit(ask("first", timeout=0.6))
            second = await engine.submit(ask("second", timeout=0.15))
            started = time.monotonic()
            waiting = await read(second)
            assert time.monotonic() - started > 0.1
            assert (waiting.finished.finish_reasons, waiting.tokens()) == (("timeout",), 0)
            assert waiting.finished.timings.queue_seconds > 0.1
            if where == "running":
                answer = await read(first)
                assert answer.finished.finish_reasons == ("timeout",)
                assert 0 < answer.tokens() == answer.finished.usage.completion_tokens < FOREVER
                await idle(metrics)

    run(main())


def test_timer_is_gone_when_a_request_ends_before_its_timeout() -> None:
    async def main() -> None:
        async with serving(ScriptedRunner(seconds=0.02)) as (engine, _):
            answer = await read(await engine.submit(ask("a", max_tokens=2, timeout=1.0)))
            assert answer.finished.finish_reasons == ("length",)
            again = await engine.submit(ask("a", max_tokens=80))
            assert (await read(again)).finished.finish_reasons == ("length",), "the first one's timer must not fire"

    run(main())


# --- the end ------------------------------------------------------------------------------------------------------


def test_drain_lets_generations_finish_and_takes_nothing_new() -> None:
    async def main() -> None:
        async with serving(ScriptedRunner(seconds=0.005)) as (engine, _):
            reader = asyncio.create_task(read(await engine.submit(ask(max_tokens=20))))
            draining = asyncio.create_task(engine.drain(10.0))
            await asyncio.sleep(0.01)
            assert status(engine) == "draining"
            with pytest.raises(Draining) as refused:
                await engine.submit(ask())
            assert refused.value.retry_after_seconds is not None
            await draining
            assert (await reader).finished.finish_reasons == ("length",)

    run(main())


@pytest.mark.parametrize(
    "calls",
    [[0.1], [30.0, 0.1], [0.1, 30.0]],
    ids=["one call", "a second one shortens", "a second one cannot lengthen"],
)
def test_drain_ends_what_is_left_when_its_time_is_up(calls: list[float]) -> None:
    async def main() -> None:
        async with serving(ScriptedRunner(seconds=0.05), max_sequences=1) as (engine, _):
            streams = [await engine.submit(ask()) for _ in range(2)]
            started = time.monotonic()
            await asyncio.gather(*(engine.drain(seconds) for seconds in calls))
            assert time.monotonic() - started < 15, "far from the later deadline"
            answers = [await read(stream) for stream in streams]
            assert [answer.finished.finish_reasons for answer in answers] == [("draining",)] * 2

    run(main())


def test_everyone_is_told_when_a_step_raises() -> None:
    runner = ScriptedRunner()
    runner.fail_at = 6

    async def main() -> None:
        async with serving(runner, max_sequences=2) as (engine, _):
            streams = [await engine.submit(ask(n=2 if number == 1 else 1)) for number in range(4)]
            answers = [await read(stream) for stream in streams]
            for answer in answers:
                assert set(answer.finished.finish_reasons) == {"error"}
                assert answer.finished.error == "RuntimeError: the device is on fire"
            health = engine.snapshot().health
            assert (health["status"], health["ready"]) == ("failed", False)
            assert "on fire" in health["message"]
            with pytest.raises(EngineFailed, match="on fire"):
                await engine.submit(ask())
            event = await anext(engine.events())
            assert event["stage"] == "failed"
            assert "exit_code" not in event, "the process stays and says so"
            engine.abort("r0")
            await engine.drain(1.0)

    run(main())


def test_health_says_failed_while_a_recording_in_an_idle_gap_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.async_engine.STUCK_SECONDS", 0.05)
    go = threading.Event()
    metrics = Metrics("1.0")
    plain = scripted_boot(ScriptedRunner(), metrics)

    def boot(report: Report) -> Booted:
        booted = plain(report)

        def capture() -> None:
            assert go.wait(10)
            booted.engine.background.clear()

        booted.engine.capture_in_background = capture  # type: ignore[method-assign]
        booted.engine.background.append(DecodeShape(1, 16))
        return booted

    async def main() -> None:
        async with serving(boot=boot) as (engine, _):
            await until(lambda: status(engine) == "failed")
            go.set()
            await until(lambda: status(engine) == "ready")

    run(main())


def test_open_streams_end_truly_when_the_engine_is_left() -> None:
    async def main() -> None:
        runner = ScriptedRunner(seconds=0.02)
        async with serving(runner, max_sequences=1) as (engine, _):
            streams = [await engine.submit(ask()) for _ in range(3)]
            events = engine.events()
            await anext(events)
            await in_flight(runner)
        answers = [await read(stream) for stream in streams]
        assert [answer.finished.finish_reasons for answer in answers] == [("draining",)] * 3
        rest = [event async for event in events]
        assert {event["type"] for event in rest} <= {"boot", "steps"}

    run(main())


# --- everything at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_each_request_is_exact_or_truly_ended_once_when_all_kinds_of_ends_are_mixed(seed: int) -> None:
    """150 requests in a pool of 1.5 long ones: aborted, timed out, stopped, run to their limit."""
    random = Random(seed)
    texts = {f"m{n}": "".join(random.choice("abc ") for _ in range(random.randrange(60))) for n in range(150)}
    runner = ScriptedRunner(text_script(texts), seconds=0.0003)

    async def one(engine: AsyncEngine, name: str) -> tuple[str, Answer, str, str]:
        await asyncio.sleep(random.random() * 0.5)
        kind = random.choice(["abort", "timeout", "stop", "limit", "plain", "plain"])
        fields: dict[str, Any] = {"max_tokens": FOREVER}
        if kind == "stop":
            fields["stop"] = ("ab",)
        elif kind == "limit":
            fields["max_tokens"] = random.randrange(1, 20)
        timeout = random.random() * 0.1 if kind == "timeout" else None
        stream = await engine.submit(ask(name, prompt="p" * random.randrange(1, 25), timeout=timeout, **fields))
        if kind == "abort":
            asyncio.get_running_loop().call_later(random.random() * 0.05, engine.abort, name)
        expected = texts[name].split("ab")[0] if kind == "stop" else texts[name][: fields["max_tokens"]]
        return kind, await read(stream), expected, name

    async def main() -> None:
        async with serving(runner, blocks=48, max_step_rows=16) as (engine, metrics):
            results = await asyncio.gather(*(one(engine, name) for name in texts))
            for kind, answer, expected, _ in results:
                (reason,) = answer.finished.finish_reasons
                if reason in ("cancelled", "timeout"):
                    assert reason == {"abort": "cancelled", "timeout": "timeout"}[kind]
                    assert expected.startswith(answer.text())
                else:
                    assert answer.text() == expected
                    assert reason == ("length" if answer.tokens() == len(expected) and kind == "limit" else "stop")
                assert answer.tokens() == answer.finished.usage.completion_tokens
            await idle(metrics)
            assert metrics.counters.preempted > 0
            ended: list[Finished] = [answer.finished for _, answer, _, _ in results]
            cancelled = sum("cancelled" in finished.finish_reasons for finished in ended)
            assert (metrics.counters.aborted, metrics.counters.finished) == (cancelled, 150 - cancelled)

    run(main())
