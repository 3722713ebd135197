"""Requests aborted at any moment among others that run to their end: nothing is kept of the former, and nothing of the
latter changes. The real engine on a tiny model, natively where a compiler is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from nanoserve.async_engine import AsyncEngine
from nanoserve.boot import Booted, Report
from nanoserve.build import build_engine
from nanoserve.metrics import Metrics
from nanoserve.request import Request, SamplingParams, TokenPrompt
from nanoserve.sequence import Sequence
from tests.async_serving import idle, read, status, until
from tests.tiny_engine import tiny_config
from tests.tiny_folder import write_served_model

WORKERS = 24
"""Clients at once, on eight table rows: so some abort in the queue, some in a prefill, some while they decode."""
ONE_STEP = 8
"""The step loop may still name the sequences of its last step while it waits for the next one."""


@asynccontextmanager
async def real_engine(folder: Path) -> AsyncIterator[tuple[AsyncEngine, Metrics]]:
    metrics = Metrics("test")
    fields = {"kernels": "auto", "warmup_seconds": None, "blocks": 40, "max_step_rows": 24}

    def boot(report: Report) -> Booted:
        return build_engine(tiny_config(folder, **fields), metrics, report, bar=False)

    async with AsyncEngine(boot, metrics, model_names=("tiny",), version="test") as engine:
        await until(lambda: status(engine) in ("ready", "failed"), 120)
        assert status(engine) == "ready", engine.snapshot().health["message"]
        yield engine, metrics


def request_of(name: str, number: int) -> Request:
    """Greedy and seeded, 1 to 40 prompt tokens, 5 to 30 generated ones, one or two choices."""
    params = SamplingParams(
        temperature=0.0 if number % 2 else 0.9,
        seed=number,
        max_tokens=5 + number * 7 % 26,
        n=1 + number % 3 // 2,
        ignore_eos=True,
    )
    return Request(name, TokenPrompt(tuple((number * 31 + i) % 200 for i in range(1 + number * 13 % 40))), params)


async def answer(engine: AsyncEngine, name: str, number: int) -> list[tuple[int, ...]]:
    request = request_of(name, number)
    got = await read(await engine.submit(request))
    assert set(got.finished.finish_reasons) == {"length"}
    return [
        tuple(token for delta in got.deltas if delta.index == index for token in delta.token_ids)
        for index in range(request.params.n)
    ]


async def abort_one(engine: AsyncEngine, name: str, random: Random) -> str:
    """Send, go away 0 to 20 ms later, and say it twice."""
    stream = await engine.submit(request_of(name, random.randrange(1000)))
    await asyncio.sleep(random.random() * 0.02)
    engine.abort(name)
    engine.abort(name)
    reasons = set((await read(stream)).finished.finish_reasons)
    assert reasons <= {"cancelled", "length"}, "one choice may have ended before it left, and another not"
    return "cancelled" if "cancelled" in reasons else "length"


async def storm(engine: AsyncEngine, aborted: int, wanted: list[list[tuple[int, ...]]], seed: int) -> None:
    """`aborted` requests among one for each of `wanted`, whose answer it is."""
    random = Random(seed)
    jobs: list[int | None] = [*range(len(wanted)), *[None] * aborted]
    random.shuffle(jobs)
    ends: list[str] = []

    async def client() -> None:
        while jobs:
            left, job = len(jobs), jobs.pop()
            if job is None:
                ends.append(await abort_one(engine, f"gone-{seed}-{left}", random))
            else:
                assert await answer(engine, f"kept-{seed}-{job}", job) == wanted[job]

    async with asyncio.TaskGroup() as clients:
        for _ in range(WORKERS):
            clients.create_task(client())
    assert len(ends) == aborted
    assert ends.count("cancelled") > aborted // 4


def live_sequences() -> int:
    gc.collect()
    return sum(type(each) is Sequence for each in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("storm"))


def test_nothing_is_left_and_others_are_exact_when_most_requests_are_aborted(folder: Path) -> None:
    async def main() -> None:
        before = live_sequences()
        async with real_engine(folder) as (engine, metrics):
            wanted = [await answer(engine, f"alone-{number}", number) for number in range(20)]
            await storm(engine, 200, wanted, seed=1)
            await idle(metrics)
            assert live_sequences() <= before + ONE_STEP
            assert metrics.counters.aborted + metrics.counters.finished == 20 + 200 + 20

    asyncio.run(asyncio.wait_for(main(), 240))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_flat_when_2000_requests_are_aborted_among_200_completed(folder: Path) -> None:
    async def main() -> None:
        async with real_engine(folder) as (engine, metrics):
            wanted = [await answer(engine, f"alone-{number}", number) for number in range(200)]
            await storm(engine, 2000, wanted, seed=1)  # what a first storm leaves is pools and caches
            await idle(metrics)
            sequences, resident = live_sequences(), resident_bytes()
            await storm(engine, 2000, wanted, seed=2)
            await idle(metrics)
            assert live_sequences() <= sequences + ONE_STEP
            assert resident_bytes() - resident < 4 << 20

    asyncio.run(asyncio.wait_for(main(), 900))
