"""StepInputs: addresses never move, windows show what was written last, types are what the ops expect."""

from __future__ import annotations

import pytest
import torch

from nanoserve.buckets import DecodeRow, PagedPlan, StepRows, pad_step
from nanoserve.inputs import GREEDY, RowSampling, StepInputs, new_last_tokens


def test_last_tokens_has_one_entry_more_than_table_rows_for_pad_rows() -> None:
    last = new_last_tokens(4, "cpu")
    assert (last.shape, last.dtype, last.tolist()) == ((5,), torch.int64, [0] * 5)


def test_windows_show_the_newest_values_when_steps_are_written_again() -> None:
    inputs = StepInputs(4, new_last_tokens(4, "cpu"))
    addresses = inputs.addresses
    step, sampling = inputs.window(4), inputs.sampling(4)
    inputs.write_rows((-1, -1, 0, 0), (7, 9, 0, 0), (3, 5, 64, 64), (8, 10, 0, 0), (0, 1, 4, 4))
    inputs.write_sampling([RowSampling(0.5, 3, 0.9, 0.1, 2**62 + 1, 2), GREEDY])
    inputs.write_rows((5,), (1,), (2,), (3,), (4,))
    assert step.input_ids.tolist() == [5, -1, 0, 0]
    assert step.positions.tolist() == [1, 9, 0, 0]
    assert step.write_slots.tolist() == [2, 5, 64, 64]
    assert step.context_lens.tolist() == [3, 10, 0, 0]
    assert step.table_rows.tolist() == [4, 1, 4, 4]
    assert torch.equal(sampling.temperature, torch.tensor([0.5, 0, 0, 0]))
    assert torch.equal(sampling.top_p, torch.tensor([0.9, 1, 0, 0]))
    assert torch.equal(sampling.min_p, torch.tensor([0.1, 0, 0, 0]))
    assert sampling.top_k.tolist() == [3, 0, 0, 0]
    assert sampling.seed.tolist() == [2**62 + 1, 0, 0, 0]
    assert sampling.choice.tolist() == [2, 0, 0, 0]
    assert inputs.addresses == addresses
    assert step.rows == 4


def test_sampling_is_written_again_when_a_step_written_ahead_has_replaced_it() -> None:
    inputs = StepInputs(4, new_last_tokens(4, "cpu"))
    both, one = [RowSampling(0.5), RowSampling(0.7)], [RowSampling(0.7)]

    def plan(rows: int) -> PagedPlan:
        step = StepRows()
        for row in range(rows):
            step.add_decode(DecodeRow(row, 5, row))
        return pad_step(step, rows, rows, sink_slot=64, pad_row=4)

    for sampling in (both, both, one, one):
        inputs.write_step(plan(len(sampling)), sampling)
        assert inputs.sampling(len(sampling)).temperature.tolist() == pytest.approx(
            [row.temperature for row in sampling]
        )
        ahead = one if sampling is both else both
        inputs.write_step(plan(len(ahead)), ahead, ahead=True)
        assert inputs.sampling(len(sampling)).temperature.tolist() == pytest.approx(
            [row.temperature for row in sampling]
        )
        inputs.live.whole.copy_(inputs.waiting[inputs.place].whole)  # as the program does between two steps
        assert inputs.sampling(len(ahead)).temperature.tolist() == pytest.approx([row.temperature for row in ahead])


def test_step_written_ahead_stays_whole_while_the_one_after_it_is_written() -> None:
    """A program copies the first one at its start, and the loop may be told of the step before sooner than that."""
    inputs = StepInputs(4, new_last_tokens(4, "cpu"))

    def plan(position: int) -> PagedPlan:
        step = StepRows()
        step.add_decode(DecodeRow(0, position, position))
        return pad_step(step, 1, 1, sink_slot=64, pad_row=4)

    for position in range(5):
        inputs.write_step(plan(position), [RowSampling(seed=position)], ahead=True)
        first, place = inputs.window(1, ahead=True), inputs.place
        kept = inputs.waiting[place].whole.clone()
        inputs.write_step(plan(50), [RowSampling(seed=50)], ahead=True)
        assert first.positions.tolist() == [position]
        assert torch.equal(inputs.waiting[place].whole, kept)
        assert inputs.window(1, ahead=True).positions.tolist() == [50]


def test_windows_are_prefixes_of_one_storage_when_rows_differ() -> None:
    inputs = StepInputs(8, new_last_tokens(2, "cpu"))
    small, large = inputs.window(2), inputs.window(8)
    assert small.positions.data_ptr() == large.positions.data_ptr()
    assert small.last_tokens.data_ptr() == large.last_tokens.data_ptr() == inputs.addresses[-1]
    for tensor in (small.input_ids, small.positions, small.write_slots, small.context_lens, small.table_rows):
        assert (tensor.dtype, tensor.shape) == (torch.int64, (2,))
    sampling = inputs.sampling(3)
    assert {t.dtype for t in (sampling.temperature, sampling.top_p, sampling.min_p)} == {torch.float32}
    assert {t.dtype for t in (sampling.top_k, sampling.seed, sampling.choice)} == {torch.int64}


def test_rows_stay_inert_when_nothing_was_written() -> None:
    inputs = StepInputs(4, new_last_tokens(4, "cpu"))
    assert inputs.window(4).context_lens.tolist() == [0] * 4
