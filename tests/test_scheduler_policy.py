"""The scheduler's policy: budget, order, shares, victims. Nobody starves, nothing idles that could run."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.blocks import BlockPool, blocks_for
from nanoserve.budget import StepBudget
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, State, StepPlan
from nanoserve.turns import ARRIVALS_PER_PRIORITY, FIRST_SHARE, turn
from tests.engines import choosing, hash_engine, prompt_of, run_to_end, sequence_of


@dataclass
class Stepper:
    """A scheduler whose steps choose token 1, and what was seen of it."""

    scheduler: Scheduler
    pool: BlockPool
    steps: int = 0
    started: list[Sequence] = field(default_factory=list)

    def add(self, tokens: int, *, priority: int = 0, max_tokens: int = 4) -> Sequence:
        sequence = sequence_of(prompt_of(tokens), priority=priority, max_tokens=max_tokens)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.steps += 1
        if plan is not None:
            self.started += [s for s, c in zip(plan.chunk_sequences, plan.chunks, strict=True) if c.start == 0]
            self.scheduler.commit(dict.fromkeys(choosing(plan), 1))
            self.scheduler.check()
        return plan

    def steps_until(self, sequence: Sequence, generated: int = 1, limit: int = 10_000) -> int:
        before = self.steps
        while sequence.generated < generated:
            assert self.steps - before < limit, "it starves"
            self.step()
        return self.steps - before


def stepper(*, blocks: int = 1000, max_sequences: int = 4, max_step_rows: int = 16) -> Stepper:
    pool = BlockPool(blocks, 4)
    return Stepper(Scheduler(pool, max_sequences=max_sequences, budget=StepBudget(max_step_rows)), pool)


# --- one step --------------------------------------------------------------------------------------------------------

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 12), st.integers(-1, 1)), min_size=1, max_size=16
)
"""(step it arrives before, prompt tokens, max_tokens, priority)"""


@given(ARRIVALS, st.integers(18, 60), st.integers(1, 6), st.integers(0, 20))
@settings(max_examples=80)
def test_every_step_keeps_the_budget_the_order_and_the_rows_busy(
    arrivals: list[tuple[int, int, int, int]], blocks: int, rows: int, budget: int
) -> None:
    run = stepper(blocks=blocks, max_sequences=rows, max_step_rows=rows + budget)
    coming = sorted(arrivals)
    sequences: list[Sequence] = []
    while coming or run.scheduler.has_work:
        while coming and coming[0][0] <= run.steps:
            _, tokens, limit, priority = coming.pop(0)
            sequences.append(run.add(tokens, max_tokens=limit, priority=priority))
        before = {s for s in sequences if s.state is State.WAITING}
        computed = {s: s.computed for s in sequences}
        plan = run.step()
        if plan is None:
            assert not run.scheduler.has_work
            continue
        used = len(plan.decode) + plan.prefill_tokens
        assert 0 < used <= rows + budget
        check_order(run, plan, before)
        check_busy(run, plan, computed, used < rows + budget)
        assert run.steps < 2_000, "something starves"
    assert all(s.generated == s.max_tokens for s in sequences)
    assert run.pool.used_blocks == 0


def wanted(sequence: Sequence) -> int:
    return blocks_for(sequence.target + 1, 4)


def check_order(run: Stepper, plan: StepPlan, waited: set[Sequence]) -> None:
    """Whoever was admitted before an earlier one left it a table row and its blocks, and was shorter or more urgent."""
    admitted = [s for s in plan.chunk_sequences if s in waited]
    for sequence in admitted:
        passed = [s for s in waited if s.state is State.WAITING and turn(s) < turn(sequence)]
        if passed:
            assert len(passed) <= run.scheduler.free_rows
            assert sum(map(wanted, passed)) <= run.pool.free_blocks
        for other in passed:
            assert (sequence.priority, sequence.target) < (other.priority, other.target)


def check_busy(run: Stepper, plan: StepPlan, computed: dict[Sequence, int], rows_left: bool) -> None:
    """Rows are left over only when every started prompt is computed to its end and the next in line does not fit."""
    if not rows_left:
        return
    lengths = {s: len(c.token_ids) for s, c in zip(plan.chunk_sequences, plan.chunks, strict=True)}
    for sequence, count in lengths.items():
        assert computed[sequence] + count == sequence.target or sequence.computed == 0
    waiting = sorted((s for s in computed if s.state is State.WAITING and s.finish_reason is None), key=turn)
    for sequence in waiting[:1]:
        # What ended with this step has just given its place back, after the plan was made.
        ended = [s for s in (*plan.decode_sequences, *plan.chunk_sequences) if s.finish_reason is not None]
        assert ended or run.scheduler.free_rows == 0 or wanted(sequence) > run.pool.free_blocks


# --- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longs", [1, 3])
def test_short_prompt_has_its_first_token_at_once_when_long_ones_are_before_it(longs: int) -> None:
    run = stepper(max_sequences=8, max_step_rows=40)
    before = [run.add(600) for _ in range(longs)]
    run.step()
    short = run.add(20)
    assert run.steps_until(short) == 1
    assert all(long.generated == 0 for long in before)


def test_long_prompt_keeps_its_share_when_short_ones_never_stop_coming() -> None:
    run = stepper(max_sequences=8, max_step_rows=40)
    long = run.add(1000)
    steps = 0
    while not long.generated:
        run.add(30, max_tokens=1)
        run.step()
        steps += 1
        # One row in four, of what the decoding leaves, which is nothing but rows of single tokens here.
        assert long.computed >= min(steps * (40 // FIRST_SHARE), 1000) or long.generated
    assert steps <= 100


def test_streams_have_a_token_in_every_step_when_a_prompt_of_thousands_is_computed() -> None:
    run = stepper(blocks=2000, max_sequences=9, max_step_rows=64)
    streams = [run.add(4, max_tokens=400) for _ in range(8)]
    while not all(stream.generated for stream in streams):
        run.step()
    long = run.add(6000)
    before = [stream.generated for stream in streams]
    steps = run.steps_until(long)
    assert steps == -(-6000 // (64 - 8))
    assert [stream.generated - old for stream, old in zip(streams, before, strict=True)] == [steps] * 8


# --- order and ageing -------------------------------------------------------------------------------------------------


def test_lower_priority_numbers_start_first_and_equal_ones_in_order_of_arrival() -> None:
    run = stepper(max_sequences=1)
    run.step()
    waiting = [run.add(4, priority=priority) for priority in (1, 0, -2, 0, 1, -2)]
    while run.scheduler.has_work:
        run.step()
    assert [waiting.index(sequence) for sequence in run.started] == [2, 5, 1, 3, 0, 4]


def test_least_urgent_request_starts_when_urgent_ones_never_stop_coming() -> None:
    run = stepper(max_sequences=1)
    run.add(4, priority=0, max_tokens=2)
    patient = run.add(4, priority=1, max_tokens=2)
    for _ in range(ARRIVALS_PER_PRIORITY * 3):
        run.add(4, priority=0, max_tokens=2)
        run.step()
        if patient.generated:
            break
    assert 0 < len(run.started) - 1 <= ARRIVALS_PER_PRIORITY
    assert run.steps_until(patient, limit=4 * ARRIVALS_PER_PRIORITY) >= 0


@pytest.mark.parametrize(("priorities", "victim"), [((0, 0, 0), 2), ((0, 1, 0), 1), ((2, 0, 1), 0)])
def test_last_in_line_is_preempted_and_nobody_else(priorities: tuple[int, ...], victim: int) -> None:
    """Three of two blocks fill the pool; the next block somebody needs is the victim's."""
    run = stepper(blocks=6, max_sequences=3)
    sequences = [run.add(7, priority=priority, max_tokens=8) for priority in priorities]
    while not run.scheduler.preemptions:
        run.step()
    assert [s.state is State.WAITING for s in sequences] == [index == victim for index in range(3)]
    while run.scheduler.has_work:
        run.step()
    assert all(s.generated == 8 for s in sequences)


@given(st.lists(st.integers(-1, 1), min_size=3, max_size=10), st.integers(8, 20))
@settings(max_examples=40)
def test_first_in_line_is_never_preempted(priorities: list[int], blocks: int) -> None:
    engine, runner, _ = hash_engine(blocks=blocks, max_sequences=4)
    sequences = [sequence_of(prompt_of(8, i % 3), priority=p, max_tokens=16) for i, p in enumerate(priorities)]
    for sequence in sequences:
        engine.add(sequence)
    while engine.scheduler.has_work:
        live = [s for s in sequences if s.state in (State.PREFILL, State.DECODE, State.WAITING)]
        first = min(live, key=turn)
        began = first.state is not State.WAITING
        engine.step()
        assert first.state is not State.WAITING or not began
    run_to_end(engine, runner)
