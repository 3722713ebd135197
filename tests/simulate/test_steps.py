"""Steps put together by hand are what a scheduler would plan for sequences of those lengths."""

from __future__ import annotations

from collections import Counter

import pytest

from nanoserve.blocks import BlockPool
from nanoserve.budget import StepBudget
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import StepPlan
from nanoserve.simulate.steps import Chunk, HandMadeStep, chunk_sizes, grid
from tests.engines import prompt_of, sequence_of

BLOCK = 4


def test_hand_made_step_is_the_plan_of_a_scheduler_in_that_state() -> None:
    """The first step in which two decode while a later part of a prompt is computed."""
    scheduler = Scheduler(BlockPool(32, BLOCK), max_sequences=3, budget=StepBudget(5))
    for length in (6, 4, 8):
        scheduler.add(sequence_of(prompt_of(length), max_tokens=99))
    plan = scheduler.plan()
    while plan is not None and not (len(plan.decode) == 2 and plan.chunks and plan.chunks[0].start):
        ends = [s for s, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True) if chunk.last]
        scheduler.commit(dict.fromkeys((*plan.decode_sequences, *ends), 7))
        plan = scheduler.plan()
    assert plan is not None
    contexts = tuple(row.position + 1 for row in plan.decode)
    chunks = tuple(Chunk(chunk.start, len(chunk.token_ids), chunk.last) for chunk in plan.chunks)
    before, ours = HandMadeStep(contexts, chunks).plan(BLOCK, 3)
    assert before.clears == (0, 1, 2)
    assert [(r.table_row, r.position) for r in ours.decode] == [(r.table_row, r.position) for r in plan.decode]
    assert [(c.table_row, c.start, len(c.token_ids), c.last) for c in ours.chunks] == [
        (c.table_row, c.start, len(c.token_ids), c.last) for c in plan.chunks
    ]
    assert [(row, start, len(slots)) for row, start, slots in ours.slot_writes] == [
        (row, start, len(slots)) for row, start, slots in plan.slot_writes
    ]
    _check_slots(before, ours)


@pytest.mark.parametrize("rectangle", [False, True])
def test_every_step_of_the_grid_keeps_its_sequences_apart(rectangle: bool) -> None:
    steps = grid(row_ladder=(1, 2, 4), contexts=(8, 40), max_step_rows=20, rectangle=rectangle)
    assert len(set(steps)) == len(steps)
    for step in steps:
        before, plan = step.plan(BLOCK, 4)
        _check_slots(before, plan)
        rows = len(plan.decode) + len(plan.chunks)
        assert rows <= 4
        assert len(plan.decode) + plan.prefill_tokens <= 20
        top = max(slot for _, _, slots in before.slot_writes for slot in slots)
        assert top < step.blocks(BLOCK) * BLOCK


def test_grid_measures_heads_apart_from_bodies_where_it_can() -> None:
    paged = grid(row_ladder=(1, 2, 4), contexts=(8, 40), max_step_rows=20, rectangle=False)
    without_head = {sum(chunk.tokens for chunk in step.chunks) for step in paged if not step.decode}
    assert {1, 2, 4} <= without_head
    assert not any(
        len(step.chunks) > 1 for step in grid(row_ladder=(1, 2, 4), contexts=(8,), max_step_rows=20, rectangle=True)
    )


@pytest.mark.parametrize(("rows", "sizes"), [(8, [8]), (16, [16]), (20, [16, 20]), (512, [16, 64, 256, 512])])
def test_chunks_are_measured_up_to_the_rows_of_a_step(rows: int, sizes: list[int]) -> None:
    assert chunk_sizes(rows) == sizes


def test_grid_fills_the_largest_step_and_asks_for_no_larger_one() -> None:
    """Also where the decode rows leave one row for a prompt, whatever its chunk was to be."""
    steps = grid(row_ladder=(1, 2, 4, 8, 16), contexts=(8,), max_step_rows=16, rectangle=False)
    assert max(len(step.decode) + sum(chunk.tokens for chunk in step.chunks) for step in steps) == 16
    assert [step.chunks[0].tokens for step in steps if len(step.decode) == 15] == [1]


def _check_slots(before: StepPlan, plan: StepPlan) -> None:
    """No slot belongs to two rows of the table, and what the step writes lies where the table says."""
    table = {row: slots for row, _, slots in before.slot_writes}
    counted = Counter(slot for slots in table.values() for slot in slots)
    assert set(counted.values()) == {1}
    for row, start, slots in plan.slot_writes:
        assert table[row][start : start + len(slots)] == slots
    for row in plan.decode:
        assert table[row.table_row][row.position] == row.write_slot
        assert len(table[row.table_row]) == row.position + 1
    for chunk in plan.chunks:
        assert table[chunk.table_row][chunk.start :] == chunk.write_slots
