"""The preconditions of recording and replaying: vacuous on a warm plan, content with a real one, and each one broken in
exactly its way, with a message that names the actual value and the limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nanoserve.buckets import DecodePlan, DecodeRow, PagedPlan, PagedShapes, StepRows, pad_plan, plan_step
from nanoserve.errors import GateError
from nanoserve.gates import (
    BoundPlan,
    check_addresses_stable,
    check_mapping_is_window,
    check_pad_inert,
    check_paged_pad_inert,
    check_plan_addressing,
    check_pool_budget,
    check_replay_rows,
    check_table_stable,
    check_window_intact,
)
from nanoserve.inputs import StepInputs
from tests.bound_plans import SHAPE, SINK, Bench, at, bench, copied, with_plan

BOTH = pytest.mark.parametrize("make", [Bench.warm, Bench.real], ids=["warm", "real"])
Make = Callable[[Bench], BoundPlan]


def refuses(message: str) -> Any:
    """The whole beginning of the message, since a gate that fails for another reason proves nothing."""
    return pytest.raises(GateError, match="^" + re.escape(message))


@BOTH
def test_every_gate_passes_when_the_plan_is_whole(make: Make) -> None:
    on = bench()
    bound = make(on)
    check_pad_inert(bound.plan, SINK)
    check_mapping_is_window(bound, on.slots)
    check_window_intact(bound, on.tables(bound))
    check_plan_addressing(bound)
    check_addresses_stable(on.inputs.addresses, on.inputs.addresses)
    check_table_stable(on.slots.address, on.slots)
    check_pool_budget(1000, 1000)
    check_replay_rows((), bound.plan)


# --- check_pad_inert -------------------------------------------------------------------------------------------------


@BOTH
def test_pads_are_not_inert_when_one_attends_to_something(make: Make) -> None:
    bound = make(bench())
    broken = with_plan(bound, context_lens=at(bound.plan.context_lens, 3, 2))
    with refuses("pad row 3 attends to 2 tokens; the limit is 0"):
        check_pad_inert(broken.plan, SINK)


@BOTH
@pytest.mark.parametrize("slot", [-1, 0, SINK - 1, SINK + 1])
def test_pads_are_not_inert_when_one_writes_elsewhere(make: Make, slot: int) -> None:
    """Both ends of the pool, and the -1 that an index takes for its last entry."""
    bound = make(bench())
    broken = with_plan(bound, write_slots=at(bound.plan.write_slots, 3, slot))
    with refuses(f"pad row 3 writes to slot {slot}; only the sink {SINK} is legal"):
        check_pad_inert(broken.plan, SINK)


def test_pads_are_not_inert_when_a_real_row_writes_to_the_sink() -> None:
    bound = bench().real()
    broken = with_plan(bound, write_slots=at(bound.plan.write_slots, 1, SINK))
    with refuses(f"real row 1 writes to the sink slot {SINK}; its token would be lost"):
        check_pad_inert(broken.plan, SINK)


def test_pads_are_not_inert_when_a_warm_plan_names_a_row() -> None:
    """The clause about real rows, which a whole warm plan meets by having none."""
    with refuses(f"real row 0 writes to the sink slot {SINK}; its token would be lost"):
        check_pad_inert(replace(pad_plan(SHAPE, SINK), rows=(0,), pad_rows=3), SINK)


@pytest.mark.parametrize(("rows", "pads"), [((), 3), ((0, 1, 2), 4), ((0, 1), 1), ((), 5)])
def test_pads_are_not_inert_when_real_and_pad_rows_do_not_fill_the_shape(rows: tuple[int, ...], pads: int) -> None:
    with refuses(f"a plan of shape {SHAPE} with {pads} pad rows names {len(rows)} real rows"):
        check_pad_inert(replace(pad_plan(SHAPE, SINK), rows=rows, pad_rows=pads), SINK)


# --- check_mapping_is_window -----------------------------------------------------------------------------------------


@BOTH
def test_rectangle_is_no_window_when_it_is_a_copy(make: Make) -> None:
    on = bench()
    broken = copied(make(on))
    address = broken.slot_mapping.data_ptr()
    with refuses(f"the rectangle lies at {address:#x}, the slot table at {on.slots.address:#x}"):
        check_mapping_is_window(broken, on.slots)


@BOTH
def test_rectangle_is_no_window_when_it_starts_in_another_row(make: Make) -> None:
    on = bench()
    bound = make(on)
    with refuses("the rectangle lies at"):
        check_mapping_is_window(replace(bound, slot_mapping=on.slots.read((0, 1, 2, 3), width=16)[1:]), on.slots)


@BOTH
@pytest.mark.parametrize(("rows", "width"), [(3, 16), (4, 17), (4, 15)])
def test_rectangle_is_no_window_when_its_size_is_not_the_shapes(make: Make, rows: int, width: int) -> None:
    on = bench()
    broken = replace(make(on), slot_mapping=on.slots.read((), pad_rows=rows, width=width))
    with refuses(f"the rectangle is ({rows}, {width}) with strides (32, 1); not {SHAPE}"):
        check_mapping_is_window(broken, on.slots)


@BOTH
def test_rectangle_is_no_window_when_it_steps_over_columns(make: Make) -> None:
    on = bench()
    broken = replace(make(on), slot_mapping=on.slots.read((), pad_rows=4, width=32)[:, ::2])
    with refuses("the rectangle is (4, 16) with strides (32, 2); not"):
        check_mapping_is_window(broken, on.slots)


@pytest.mark.parametrize("rows", [(1, 2, 3), (0, 2, 3), (1, 0, 2)])
def test_rectangle_is_no_window_when_its_rows_are_no_prefix(rows: tuple[int, ...]) -> None:
    on = bench()
    with refuses(f"rows {rows} are not a prefix of the slot table"):
        check_mapping_is_window(with_plan(on.real(), rows=rows), on.slots)


def test_rectangle_is_no_window_when_a_warm_plan_names_a_row_that_is_no_prefix() -> None:
    on = bench()
    with refuses("rows (1,) are not a prefix of the slot table"):
        check_mapping_is_window(with_plan(on.warm(), rows=(1,), pad_rows=3), on.slots)


# --- check_window_intact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "position"), [(0, 0), (0, 6), (1, 0), (2, 12)])
def test_window_is_not_intact_when_an_attended_entry_was_overwritten(row: int, position: int) -> None:
    on = bench()
    bound = on.real()
    on.slots.write(row, position, [77])
    own = on.expected[row][position]
    with refuses(f"row {row}, position {position}: the slot table says 77, the block table {own}"):
        check_window_intact(bound, on.expected)


def test_window_is_intact_when_only_unattended_entries_differ() -> None:
    on = bench()
    bound = on.real()
    on.slots.write(0, 7, [77])
    on.slots.write(3, 0, [77])
    check_window_intact(bound, [[*slots, 1, 2, 3] for slots in on.expected])


def test_window_is_not_intact_when_rows_were_not_compacted_with_their_tables() -> None:
    on = bench()
    bound = on.real()
    on.slots.swap(0, 2)
    with refuses("row 0, position 0: the slot table says 3, the block table 40"):
        check_window_intact(bound, on.expected)


def test_window_is_not_intact_when_a_block_table_is_too_short() -> None:
    on = bench()
    with refuses("row 2 attends to 13 tokens; its block table has 12 slots"):
        check_window_intact(on.real(), [*on.expected[:2], on.expected[2][:-1]])


@BOTH
def test_window_is_not_intact_when_block_tables_and_rows_are_not_as_many(make: Make) -> None:
    """A gate that compared as many as there happen to be would pass a real plan without looking at it."""
    on = bench()
    bound = make(on)
    with refuses(f"1 block tables for the {len(bound.plan.rows)} rows of a plan"):
        check_window_intact(bound, [[1]])


# --- check_plan_addressing -------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("name", ["input_ids", "positions", "write_slots", "context_lens", "table_rows"])
@pytest.mark.parametrize("row", [0, 3])
def test_addressing_is_wrong_when_a_buffer_does_not_hold_the_plan(make: Make, name: str, row: int) -> None:
    bound = make(bench())
    buffer = getattr(bound.step, name)
    buffer[row] += 1
    with refuses(f"the buffer of {name} holds {buffer.tolist()}, the plan says"):
        check_plan_addressing(bound)


def test_addressing_is_wrong_when_a_pad_rows_token_would_be_remembered_for_a_sequence() -> None:
    bound = bench().real()
    bound.step.table_rows[3] = 1
    with refuses("the buffer of table_rows holds [0, 1, 2, 1], the plan says [0, 1, 2, 4]"):
        check_plan_addressing(bound)


def test_addressing_is_wrong_when_a_row_writes_where_the_table_has_another_slot() -> None:
    on = bench()
    bound = on.real()
    slots = at(bound.plan.write_slots, 0, 41)
    bound.step.write_slots[0] = 41
    with refuses("row 0 writes slot 41; the slot table gives position 6 slot 46"):
        check_plan_addressing(with_plan(bound, write_slots=slots))


@pytest.mark.parametrize("length", [6, 8])
def test_addressing_is_wrong_when_a_row_attends_to_less_or_more_than_its_position(length: int) -> None:
    on = bench()
    bound = on.real()
    bound.step.context_lens[0] = length
    lens = at(bound.plan.context_lens, 0, length)
    with refuses(f"row 0 attends to {length} tokens; position 6 allows 7"):
        check_plan_addressing(with_plan(bound, context_lens=lens))


def test_addressing_is_wrong_when_a_warm_plan_names_a_row() -> None:
    """The sink is where the table points, so only the length can tell that the row is none."""
    on = bench()
    bound = with_plan(on.warm(), rows=(0,), pad_rows=3)
    bound.step.table_rows[0] = 0
    on.slots.write(0, 0, [SINK])
    with refuses("row 0 attends to 0 tokens; position 0 allows 1"):
        check_plan_addressing(bound)


# --- addresses, budget, replayed rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_addresses_are_not_stable_when_a_buffer_moved(index: int) -> None:
    recorded = bench().inputs.addresses
    moved = at(recorded, index, recorded[index] + 64)
    with refuses(f"step buffers moved from {[hex(a) for a in recorded]} to {[hex(a) for a in moved]}"):
        check_addresses_stable(recorded, moved)


def test_addresses_are_not_stable_when_the_buffers_were_made_again() -> None:
    on = bench()
    with refuses("step buffers moved from"):
        check_addresses_stable(on.inputs.addresses, StepInputs(4, on.inputs.last_tokens).addresses)


def test_table_is_not_stable_when_it_was_moved_to_another_device() -> None:
    on = bench()
    recorded = on.slots.address
    on.slots.to("meta")
    with refuses(f"the slot table moved from {recorded:#x} to 0x0; recorded windows are stale"):
        check_table_stable(recorded, on.slots)


def test_budget_is_exceeded_when_a_capture_needs_one_byte_more() -> None:
    with refuses("the widest capture needs 2,001 bytes, 2,000 are free; lower --warm-width or --warm-rows"):
        check_pool_budget(2001, 2000)


def test_replay_is_refused_when_the_graph_froze_other_rows() -> None:
    """The fault that a recording on a warm plan cannot have: a graph bound to the sequences of its first step."""
    bound = bench().real()
    check_replay_rows((0, 1, 2), bound.plan)
    with refuses("the graph froze rows (0, 1); this step runs rows (0, 1, 2)"):
        check_replay_rows((0, 1), bound.plan)


@BOTH
def test_replay_is_right_for_any_rows_when_none_were_frozen(make: Make) -> None:
    check_replay_rows((), make(bench()).plan)


def test_warm_plan_is_refused_on_a_graph_that_froze_rows() -> None:
    plan: DecodePlan = bench().warm().plan
    with refuses("the graph froze rows (0,); this step runs rows ()"):
        check_replay_rows((0,), plan)


# --- the paged read ------------------------------------------------------------------------------------------------


def paged_plan() -> PagedPlan:
    """Two decode rows and the three last tokens of a prompt: a body of 8 and a head of 4."""
    rows = StepRows()
    rows.add_decode(DecodeRow(0, 4, 14))
    rows.add_decode(DecodeRow(1, 2, 22))
    rows.add((7, 8, 9), 5, (35, 36, 37), 2)
    rows.logit_rows.append(4)
    return plan_step(rows, PagedShapes.build(max_step_rows=12, max_logit_rows=4), sink_slot=SINK, pad_row=4)


def test_paged_plan_is_inert_in_its_pad_rows() -> None:
    plan = paged_plan()
    assert (plan.rows, plan.real_rows, plan.head_rows, plan.real_logit_rows) == (8, 5, 4, 3)
    check_paged_pad_inert(plan, SINK, 4)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"context_lens": (5, 3, 6, 7, 8, 1, 0, 0)}, "pad row 5 attends to 1 tokens; the limit is 0"),
        ({"write_slots": (14, 22, 35, 36, 37, SINK, 14, SINK)}, "pad row 6 writes to slot 14; only the sink"),
        ({"write_slots": (14, SINK, 35, 36, 37, SINK, SINK, SINK)}, "real row 1 writes to the sink slot"),
        ({"table_rows": (0, 1, 2, 2, 2, 4, 4, 3)}, "pad row 7 names table row 3; only 4 is legal"),
        ({"logit_rows": (0, 1, 5, 12)}, "a token is chosen after row 5; the step has 5 real rows"),
        ({"logit_rows": (0, 1, 4, 0)}, "a pad logit row names real row 0; what it chooses would be that row's next"),
    ],
)
def test_paged_plan_is_refused_when_a_pad_row_could_be_felt(broken: dict[str, Any], message: str) -> None:
    with refuses(message):
        check_paged_pad_inert(replace(paged_plan(), **broken), SINK, 4)
