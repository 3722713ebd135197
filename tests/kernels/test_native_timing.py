"""What goes on in the Python process leaves a step's time alone: compute threads share neither the GIL nor OpenMP.

Times are the pool's own. Each comparison is of medians taken in turns, with room for a machine that is busy otherwise,
and is made again before it counts as lost: what these tests are after costs a factor of five and more, every time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch

from nanoserve.completion import Completion
from nanoserve.kernels import native_lib
from nanoserve.kernels.native_ops import segments
from nanoserve.kernels.native_pack import pack_dense
from tests.checkout import ROOT
from tests.kernels.native import Harness
from tests.kernels.test_native_ops import feed

STEPS, ROUNDS, TRIES = 15, 2, 4
PERIOD_SECONDS, BUSY = 0.02, 0.95
SLACK, GRAIN_SECONDS = 3.0, 2e-3
"""A step beside something may take three times as long as without, and a scheduler's time slice."""


def a_step(library: native_lib.NativeLibrary, threads: int) -> tuple[Harness, native_lib.Launch]:
    """One to a few milliseconds of linears."""
    harness = Harness(library, threads=threads)
    x = feed(harness.recorder, torch.ones(8, 512))
    for _ in range(8):
        x = harness.recorder.linear(x, pack_dense(torch.full((512, 512), 1e-3)))
    harness.live[0] = 8
    return harness, segments([harness.recorder.finish()])


def holds(compare: Callable[[], tuple[float, float]]) -> None:
    """`compare` gives median seconds of a step alone, and beside something."""
    seen = []
    for _ in range(TRIES):
        alone, beside = compare()
        seen.append((alone, beside))
        if beside < SLACK * alone + GRAIN_SECONDS:
            return
    raise AssertionError(f"a step's seconds alone, and beside something: {seen}")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_takes_as_long_while_the_event_loop_is_busy(fastest: native_lib.NativeLibrary, threads: int) -> None:
    harness, launch = a_step(fastest, threads)

    async def occupy() -> None:
        while True:
            until = time.perf_counter() + BUSY * PERIOD_SECONDS
            while time.perf_counter() < until:
                pass
            await asyncio.sleep((1 - BUSY) * PERIOD_SECONDS)

    async def steps(completion: Completion) -> list[float]:
        seconds = []
        for _ in range(STEPS):
            harness.pool.launch(launch, completion.write_fd)
            await completion.wait()
            seconds.append(harness.pool.last_seconds)
        return seconds

    async def in_turns() -> tuple[float, float]:
        completion = Completion()
        idle, busy = [], []
        for _ in range(ROUNDS):
            idle += await steps(completion)
            hog = asyncio.create_task(occupy())
            await asyncio.sleep(0)
            busy += await steps(completion)
            hog.cancel()
        completion.close()
        return median(idle), median(busy)

    holds(lambda: asyncio.run(in_turns()))
    harness.pool.close()


AFTER_TORCH = """
import torch
from statistics import median
from nanoserve.kernels import native_lib
from tests.kernels.test_native_timing import a_step
harness, launch = a_step(native_lib.load(), 2)
def steps():
    seconds = []
    for _ in range(30):
        harness.pool.run(launch)
        seconds.append(harness.pool.last_seconds)
    return median(seconds)
steps()
before, after = steps(), []
torch.set_num_threads(2)
for _ in range(3):
    torch.mm(torch.ones(700, 700), torch.ones(700, 700))  # starts OpenMP's threads, which look for work for a while
    after.append(steps())
print(before, median(after))
"""


def test_a_step_takes_as_long_after_a_torch_operation_on_the_main_thread() -> None:
    def compare() -> tuple[float, float]:
        done = subprocess.run(
            [sys.executable, "-c", AFTER_TORCH], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
        )
        before, after = done.stdout.split()
        return float(before), float(after)

    holds(compare)


def test_a_launch_tells_how_long_it_took(fastest: native_lib.NativeLibrary) -> None:
    harness, launch = a_step(fastest, 1)
    started = time.perf_counter()
    harness.pool.run(launch)
    assert 0 < harness.pool.last_seconds <= time.perf_counter() - started
    harness.pool.close()
