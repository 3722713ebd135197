"""Steps put together by hand, run on a real engine's runner, and timed: what `calibrate` fits costs to."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

from nanoserve.blocks import blocks_for
from nanoserve.buckets import DecodeRow
from nanoserve.engine import Engine
from nanoserve.request import SamplingParams
from nanoserve.sequence import ChunkPlan, Sequence, StepPlan
from nanoserve.stepper import StepEnds

TOKEN = 5
"""Every prompt is this token: what a step computes does not depend on which."""
FEWEST_PASSES = 2
MOST_REPEATS, ENOUGH_SECONDS = 5, 0.05
"""A figure is the median over the passes of the median of as many runs as take a twentieth of a second."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` of a prompt, the first of them at position `start`; `last` chooses a token after it."""

    start: int
    tokens: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class HandMadeStep:
    """`decode` are the context lengths of its decode rows, their newest token included."""

    decode: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    def blocks(self, block_size: int) -> int:
        lengths = [*self.decode, *(chunk.start + chunk.tokens for chunk in self.chunks)]
        return sum(blocks_for(length, block_size) for length in lengths)

    def plan(self, block_size: int, max_sequences: int) -> tuple[StepPlan, StepPlan]:
        """(the step that also fills the slot table with what came before, the step itself), on blocks 0, 1, …

        The second one edits the slot table as a scheduler's plan does: each row's own slot.
        """
        places = _Places(block_size)
        rows: list[DecodeRow] = []
        chunks: list[ChunkPlan] = []
        history: list[tuple[int, int, tuple[int, ...]]] = []
        writes: list[tuple[int, int, tuple[int, ...]]] = []
        sequences: list[Sequence] = []
        for table_row, context in enumerate(self.decode):
            sequence, slots = places.sequence(context)
            sequences.append(sequence)
            history.append((table_row, 0, slots))
            rows.append(DecodeRow(table_row, context - 1, slots[-1]))
            writes.append((table_row, context - 1, slots[-1:]))
        for table_row, chunk in enumerate(self.chunks, start=len(self.decode)):
            sequence, slots = places.sequence(chunk.start + chunk.tokens)
            sequences.append(sequence)
            history.append((table_row, 0, slots))
            new = slots[chunk.start :]
            chunks.append(ChunkPlan(table_row, chunk.start, (TOKEN,) * chunk.tokens, new, chunk.last))
            writes.append((table_row, chunk.start, new))
        split = len(self.decode)
        step = StepPlan(
            clears=(),
            swaps=(),
            slot_writes=tuple(writes),
            decode=tuple(rows),
            decode_sequences=tuple(sequences[:split]),
            chunks=tuple(chunks),
            chunk_sequences=tuple(sequences[split:]),
        )
        return replace(step, clears=tuple(range(max_sequences)), slot_writes=tuple(history)), step


class _Places:
    """Hands out blocks in order, so that no two sequences of a step share any."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._next = 0

    def sequence(self, tokens: int) -> tuple[Sequence, tuple[int, ...]]:
        blocks = blocks_for(tokens, self._block_size)
        sequence = Sequence(
            request_id="calibration",
            choice=0,
            prompt_ids=[TOKEN] * tokens,
            params=SamplingParams(temperature=0.0),
            seed=0,
            max_tokens=1,
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(),
            block_size=self._block_size,
        )
        sequence.table.blocks = list(range(self._next, self._next + blocks))
        self._next += blocks
        return sequence, tuple(sequence.table.slots(0, tokens))


def time_steps(
    engine: Engine, steps: SequenceOf[HandMadeStep], *, block_size: int, max_sequences: int, budget_seconds: float
) -> list[float]:
    """Median seconds of each: from its launch to its end, where an engine starts a step and plans ahead meanwhile, else
    from the plan to its tokens on the host.

    All of them are visited in turn, as often as `budget_seconds` allow: what else the machine does for a while then
    meets every step once rather than one step every time. The run that brings a step's context into the slot table, and
    records its graphs where they are missing, is not counted.
    """
    plans = [step.plan(block_size, max_sequences) for step in steps]
    taken: list[list[float]] = [[] for _ in steps]
    started, passes = perf_counter(), 0
    timer = _Timer(engine)
    while passes < FEWEST_PASSES or (passes + 1) / passes * (perf_counter() - started) < budget_seconds:
        for (before, plan), seconds in zip(plans, taken, strict=True):
            engine.runner.run(before)
            visit = [timer.seconds(plan)]
            while len(visit) < MOST_REPEATS and sum(visit) < ENOUGH_SECONDS:
                visit.append(timer.seconds(plan))
            seconds.append(median(visit))
        passes += 1
    return [median(seconds) for seconds in taken]


class _Timer:
    """Runs steps, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ends = StepEnds(engine.settle)

    def seconds(self, plan: StepPlan) -> float:
        engine = self._engine
        if not engine.starts:
            started = perf_counter()
            engine.launch(plan)
            return perf_counter() - started
        step = engine.start(plan, self._ends.write_fd)
        started = perf_counter()
        self._ends.wait()
        seconds = perf_counter() - started
        engine.finish_step(step)
        return seconds


def grid(
    *, row_ladder: SequenceOf[int], contexts: SequenceOf[int], max_step_rows: int, rectangle: bool
) -> list[HandMadeStep]:
    """What is measured: decode rows at several contexts, the same rows without a head, prompt chunks at several starts,
    and both together. A rectangle's decode steps always have a head."""
    most, longest = row_ladder[-1], contexts[-1]
    steps = [HandMadeStep(decode=(context,) * rows) for rows in row_ladder for context in contexts]
    if not rectangle:
        bare = Chunk(contexts[0] - 1, 1)
        steps += [HandMadeStep(chunks=(bare,) * rows) for rows in row_ladder]
    sizes = chunk_sizes(max_step_rows)
    starts = sorted({0, longest // 2})
    steps += [HandMadeStep(chunks=(Chunk(start, size),)) for size in sizes for start in starts]
    steps += [HandMadeStep(chunks=(Chunk(0, size, last=True),)) for size in sizes]
    middle = contexts[len(contexts) // 2]
    some = row_ladder[len(row_ladder) // 2]
    steps += [
        HandMadeStep((middle,) * (rows - 1), (Chunk(0, size, last=True),))
        for rows in sorted({some, most} - {1})
        for size in sorted({min(size, max_step_rows - (rows - 1)) for size in sizes})
    ]
    return steps


def chunk_sizes(max_step_rows: int) -> list[int]:
    """16, 64, 256, … and a step's most rows."""
    sizes = [size for size in (16, 64, 256, 1024) if size < max_step_rows]
    return [*sizes, max_step_rows]
