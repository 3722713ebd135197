"""StepBudget: rows are bounded by the step, and by what the rows of earlier steps have cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.budget import AIM, FIXED_ROWS, LEARN_AFTER, StepBudget


class Machine:
    """Costs what `RowCosts` supposes: seconds of a decode row, of a prompt row."""

    def __init__(self, decode_row: float, prefill_row: float) -> None:
        self.decode_row, self.prefill_row = decode_row, prefill_row

    def seconds(self, decode_rows: int, prefill_rows: int) -> float:
        return self.decode_row * (decode_rows + FIXED_ROWS) + self.prefill_row * prefill_rows


def rows_beside(budget: StepBudget, machine: Machine, decoding: int) -> int:
    """The prompt rows of the next step that may have any."""
    if not budget.prefill_rows(decoding):
        budget.observe(decoding, 0, machine.seconds(decoding, 0))
    return budget.prefill_rows(decoding)


def learnt(machine: Machine, budget: StepBudget, *, steps: int = 60) -> StepBudget:
    """After one whole prompt, decode steps, and steps of both."""
    budget.observe(0, 200, machine.seconds(0, 200))
    for step in range(steps):
        rows = budget.prefill_rows(8) if step % 3 else 0
        budget.observe(8, rows, machine.seconds(8, rows))
    return budget


@given(st.integers(1, 64), st.integers(0, 64), st.floats(0, 10), st.floats(1e-5, 1), st.floats(1e-5, 1))
@settings(max_examples=60)
def test_rows_never_exceed_the_step_and_a_prompt_always_gets_one(
    decoding: int, more: int, gap: float, decode_row: float, prefill_row: float
) -> None:
    budget = learnt(Machine(decode_row, prefill_row), StepBudget(64 + more, gap_seconds=gap), steps=6)
    if decoding < budget.max_step_rows:
        assert 1 <= budget.prefill_rows(decoding) <= budget.max_step_rows - decoding
    assert budget.prefill_rows(0) == budget.max_step_rows


@given(st.floats(1e-4, 1e-2), st.floats(0.2, 5.0), st.sampled_from([0.0, 0.01, 0.05, 0.2]))
@settings(max_examples=60)
def test_prompts_add_what_the_bound_says_or_as_long_as_decoding_takes(
    decode_row: float, ratio: float, gap: float
) -> None:
    machine = Machine(decode_row, decode_row * ratio)
    budget = learnt(machine, StepBudget(4096, gap_seconds=gap))
    decode, rows = machine.seconds(8, 0), budget.prefill_rows(8)
    added = machine.seconds(8, rows) - decode
    bound = max(gap, decode)
    assert added <= bound + machine.prefill_row
    assert added >= 0.95 * AIM * bound - machine.prefill_row or rows == 4096 - 8


def test_rows_shrink_when_prompt_rows_become_dearer_with_the_context() -> None:
    budget = learnt(Machine(0.001, 0.0005), StepBudget(512, gap_seconds=0.05))
    before = budget.prefill_rows(8)
    dear = Machine(0.001, 0.002)
    for _ in range(60):
        rows = budget.prefill_rows(8)
        budget.observe(8, rows, dear.seconds(8, rows))
    assert before == pytest.approx(100, rel=0.25)
    assert rows_beside(budget, dear, 8) == pytest.approx(25, rel=0.3)


def test_bound_holds_while_every_step_of_a_prompt_costs_more_than_the_one_before() -> None:
    machine, bound = Machine(0.001, 0.0005), 0.05
    budget = learnt(machine, StepBudget(512, gap_seconds=bound))
    for _ in range(200):
        machine.prefill_row *= 1.01
        rows = budget.prefill_rows(8)
        added = machine.prefill_row * rows
        assert added <= bound + machine.prefill_row
        assert added >= 0.95 * AIM * bound or rows == 0
        budget.observe(8, rows, machine.seconds(8, rows))


def test_one_slow_step_hardly_counts_when_something_else_took_the_machine() -> None:
    machine = Machine(0.001, 0.0005)
    budget = learnt(machine, StepBudget(512, gap_seconds=0.05))
    before = budget.prefill_rows(8)
    budget.observe(8, before, 30.0)
    assert budget.prefill_rows(8) >= before / 3
    for _ in range(60):
        budget.observe(8, before, machine.seconds(8, before))
    assert rows_beside(budget, machine, 8) == pytest.approx(before, rel=0.25)


def test_nothing_is_bounded_before_a_step_was_measured_or_without_a_bound() -> None:
    assert StepBudget(512, gap_seconds=0.0).prefill_rows(8) == 504
    assert learnt(Machine(0.001, 0.1), StepBudget(512)).prefill_rows(8) == 504
    assert learnt(Machine(0.001, 0.1), StepBudget(512, gap_seconds=float("inf"))).prefill_rows(8) == 504


def test_under_prompts_without_end_a_budget_learns_what_more_decode_rows_cost() -> None:
    """One sequence decoded for long; then 32 do, which is dearer than their number says, and prompts never end."""
    alone, crowd = Machine(0.0008, 0.0014), Machine(0.0017, 0.0014)
    budget = StepBudget(512, gap_seconds=0.05)
    budget.observe(0, 100, alone.seconds(0, 100))
    for _ in range(50):
        budget.observe(1, 0, alone.seconds(1, 0))
    given_rows = []
    for _ in range(10 * (LEARN_AFTER + 1)):
        rows = budget.prefill_rows(32)
        given_rows.append(rows)
        budget.observe(32, rows, crowd.seconds(32, rows))
    bound = max(0.05, crowd.seconds(32, 0))
    assert given_rows[-2] == pytest.approx(bound / crowd.prefill_row, rel=0.25)
    assert given_rows.count(0) == 10, "and gives them rows in all steps but one of each run"
