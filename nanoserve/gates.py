"""BoundPlan, and the gates a plan has to pass before a graph is recorded or replayed on it.

A gate never changes anything and never asks who is calling: the same gates inspect real plans and warm plans, where
those that loop over real rows find none. Each raises GateError, which names what broke, the actual value and the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nanoserve.buckets import DecodePlan, PagedPlan
from nanoserve.errors import GateError
from nanoserve.ops import SamplingWindow, StepWindow
from nanoserve.slots import SlotTable


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan with its windows on real storage: what a graph is recorded on.

    slot_mapping  `[shape.rows, shape.width]` int64, a window on the SlotTable
    """

    plan: DecodePlan
    step: StepWindow
    sampling: SamplingWindow
    slot_mapping: Tensor


def check_pad_inert(plan: DecodePlan, sink_slot: int) -> None:
    """Pad rows attend to nothing, pad rows write to the sink, and no real row writes to the sink."""
    real = plan.shape.rows - plan.pad_rows
    if real < 0 or len(plan.rows) != real:
        raise GateError(f"a plan of shape {plan.shape} with {plan.pad_rows} pad rows names {len(plan.rows)} real rows")
    for row in range(real, plan.shape.rows):
        if plan.context_lens[row] != 0:
            raise GateError(f"pad row {row} attends to {plan.context_lens[row]} tokens; the limit is 0")
        if plan.write_slots[row] != sink_slot:
            raise GateError(f"pad row {row} writes to slot {plan.write_slots[row]}; only the sink {sink_slot} is legal")
    for row in range(real):
        if plan.write_slots[row] == sink_slot:
            raise GateError(f"real row {row} writes to the sink slot {sink_slot}; its token would be lost")


def check_mapping_is_window(bound: BoundPlan, table: SlotTable) -> None:
    """The rectangle is a view on the live slot table, over a prefix of its rows."""
    plan, mapping = bound.plan, bound.slot_mapping
    if mapping.data_ptr() != table.address:
        raise GateError(f"the rectangle lies at {mapping.data_ptr():#x}, the slot table at {table.address:#x}")
    if tuple(mapping.shape) != tuple(plan.shape) or mapping.stride() != (table.shape[1], 1):
        raise GateError(f"the rectangle is {tuple(mapping.shape)} with strides {mapping.stride()}; not {plan.shape}")
    if plan.rows != tuple(range(len(plan.rows))):
        raise GateError(f"rows {plan.rows} are not a prefix of the slot table")


def check_window_intact(bound: BoundPlan, expected: Sequence[Sequence[int]]) -> None:
    """Each real row's window holds its block table's slots, `expected[row]`, for every position it attends to."""
    if len(expected) != len(bound.plan.rows):
        raise GateError(f"{len(expected)} block tables for the {len(bound.plan.rows)} rows of a plan")
    for row, slots in enumerate(expected):
        length = bound.plan.context_lens[row]
        actual = bound.slot_mapping[row, :length].tolist()
        if len(slots) < length:
            raise GateError(f"row {row} attends to {length} tokens; its block table has {len(slots)} slots")
        if actual != list(slots[:length]):
            position = next(i for i, pair in enumerate(zip(actual, slots, strict=False)) if pair[0] != pair[1])
            raise GateError(
                f"row {row}, position {position}: the slot table says {actual[position]}, "
                f"the block table {slots[position]}"
            )


def check_plan_addressing(bound: BoundPlan) -> None:
    """Each real row writes the slot the table gives its position, attends up to it, and the buffers hold the plan.

    A pad row's table row is the last entry of `last_tokens`: its token may be remembered nowhere else.
    """
    plan, step = bound.plan, bound.step
    pad_row = step.last_tokens.shape[0] - 1
    _check_buffers(
        ("table_rows", step.table_rows, (*plan.rows, *(pad_row,) * plan.pad_rows)),
        ("input_ids", step.input_ids, plan.input_ids),
        ("positions", step.positions, plan.positions),
        ("write_slots", step.write_slots, plan.write_slots),
        ("context_lens", step.context_lens, plan.context_lens),
    )
    for row in range(len(plan.rows)):
        position, slot = plan.positions[row], plan.write_slots[row]
        mapped = int(bound.slot_mapping[row, position])
        if mapped != slot:
            raise GateError(f"row {row} writes slot {slot}; the slot table gives position {position} slot {mapped}")
        if plan.context_lens[row] != position + 1:
            raise GateError(
                f"row {row} attends to {plan.context_lens[row]} tokens; position {position} allows {position + 1}"
            )


def check_paged_pad_inert(plan: PagedPlan, sink_slot: int, pad_row: int) -> None:
    """Pad rows attend to nothing, write to the sink and own no table row; no real row writes to the sink; real logit
    rows are real rows, and pad logit rows are none."""
    for row in range(plan.real_rows, plan.rows):
        if plan.context_lens[row] != 0:
            raise GateError(f"pad row {row} attends to {plan.context_lens[row]} tokens; the limit is 0")
        if plan.write_slots[row] != sink_slot:
            raise GateError(f"pad row {row} writes to slot {plan.write_slots[row]}; only the sink {sink_slot} is legal")
        if plan.table_rows[row] != pad_row:
            raise GateError(f"pad row {row} names table row {plan.table_rows[row]}; only {pad_row} is legal")
    for row in range(plan.real_rows):
        if plan.write_slots[row] == sink_slot:
            raise GateError(f"real row {row} writes to the sink slot {sink_slot}; its token would be lost")
    for index in plan.logit_rows[: plan.real_logit_rows]:
        if not 0 <= index < plan.real_rows:
            raise GateError(f"a token is chosen after row {index}; the step has {plan.real_rows} real rows")
    for index in plan.logit_rows[plan.real_logit_rows :]:
        if index < plan.real_rows:
            raise GateError(f"a pad logit row names real row {index}; what it chooses would be that row's next token")


def check_paged_addressing(plan: PagedPlan, step: StepWindow, table: SlotTable) -> None:
    """The buffers hold the plan; each real row writes the slot the table gives its position and attends up to it."""
    _check_buffers(
        ("input_ids", step.input_ids, plan.input_ids),
        ("positions", step.positions, plan.positions),
        ("write_slots", step.write_slots, plan.write_slots),
        ("context_lens", step.context_lens, plan.context_lens),
        ("table_rows", step.table_rows, plan.table_rows),
    )
    for row in range(plan.real_rows):
        position, slot = plan.positions[row], plan.write_slots[row]
        mapped = int(table.row(plan.table_rows[row], position + 1)[position])
        if mapped != slot:
            raise GateError(f"row {row} writes slot {slot}; the slot table gives position {position} slot {mapped}")
        if plan.context_lens[row] != position + 1:
            raise GateError(
                f"row {row} attends to {plan.context_lens[row]} tokens; position {position} allows {position + 1}"
            )


def _check_buffers(*fields: tuple[str, Tensor, tuple[int, ...]]) -> None:
    for name, buffer, wanted in fields:
        if tuple(buffer.tolist()) != wanted:
            raise GateError(f"the buffer of {name} holds {buffer.tolist()}, the plan says {list(wanted)}")


def check_addresses_stable(recorded: tuple[int, ...], current: tuple[int, ...]) -> None:
    """The step buffers lie where they lay when the graphs were recorded."""
    if recorded != current:
        raise GateError(f"step buffers moved from {[hex(a) for a in recorded]} to {[hex(a) for a in current]}")


def check_table_stable(recorded: int, table: SlotTable) -> None:
    """The slot table lies where it lay when the first window was handed out (`SlotTable.to` reallocates)."""
    if table.address != recorded:
        raise GateError(f"the slot table moved from {recorded:#x} to {table.address:#x}; recorded windows are stale")


def check_pool_budget(needed_bytes: int, budget_bytes: int) -> None:
    """What the recordings need beside weights and K/V pool is there."""
    if needed_bytes > budget_bytes:
        raise GateError(
            f"the widest capture needs {needed_bytes:,} bytes, {budget_bytes:,} are free; "
            "lower --warm-width or --warm-rows"
        )


def check_replay_rows(recorded_rows: tuple[int, ...], plan: DecodePlan) -> None:
    """A graph that froze a row set may replay that row set only; one recorded on a warm plan froze none."""
    if recorded_rows and recorded_rows != plan.rows:
        raise GateError(f"the graph froze rows {recorded_rows}; this step runs rows {plan.rows}")
