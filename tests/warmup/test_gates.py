"""The warm-up's own gates, each broken in exactly its way."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoserve.backends import EagerBackend
from nanoserve.buckets import DecodeShape, pad_plan
from nanoserve.errors import GateError
from nanoserve.graphs import GraphKey, GraphSet, Origin
from nanoserve.warmup import (
    check_all_warm,
    check_no_cold_captures,
    check_table_stable,
    check_warm_budget,
    check_warm_graphs_unbound,
    check_warm_rows_empty,
    check_warm_touches_nothing,
    check_warm_writes_sink,
)
from tests.bound_plans import SINK, at, bench

SHAPE = DecodeShape(4, 16)


def refuses(message: str) -> Any:
    return pytest.raises(GateError, match="^" + re.escape(message))


def graphs(*entries: tuple[DecodeShape, Origin, tuple[int, ...]]) -> GraphSet[None]:
    made: GraphSet[None] = GraphSet(EagerBackend(), read="rectangle")
    for shape, origin, rows in entries:
        made.capture(GraphKey("decode", *shape), lambda: None, origin=origin, rows=rows, clock=lambda: 0.0)
    return made


def test_every_warm_gate_passes_on_a_warm_plan_and_a_warm_set() -> None:
    on = bench()
    plan = on.warm().plan
    check_warm_rows_empty(plan)
    check_warm_writes_sink(plan, SINK)
    check_table_stable(on.slots.address, on.slots)
    warm = graphs((SHAPE, "warm", ()), (DecodeShape(2, 16), "background", ()))
    check_warm_graphs_unbound(warm)
    check_no_cold_captures(warm)
    check_all_warm(warm, [SHAPE])
    check_warm_budget(5, 5)


def test_rows_are_not_empty_when_the_plan_is_a_real_one() -> None:
    with refuses(f"a warm plan of shape {SHAPE} names rows (0, 1, 2); it must name none"):
        check_warm_rows_empty(bench().real().plan)


@pytest.mark.parametrize(("rows", "pads"), [((0,), 3), ((0,), 4), ((), 3)])
def test_rows_are_not_empty_when_one_is_named_or_not_padded(rows: tuple[int, ...], pads: int) -> None:
    with refuses(f"a warm plan of shape {SHAPE} names rows {rows}; it must name none"):
        check_warm_rows_empty(replace(pad_plan(SHAPE, SINK), rows=rows, pad_rows=pads))


@pytest.mark.parametrize("row", [0, 3])
def test_writes_leave_the_sink_when_a_row_has_a_slot(row: int) -> None:
    plan = pad_plan(SHAPE, SINK)
    with refuses(f"row {row} of a warm plan writes to slot 5; only the sink {SINK} is legal"):
        check_warm_writes_sink(replace(plan, write_slots=at(plan.write_slots, row, 5)), SINK)


def test_writes_leave_the_sink_when_the_plan_is_a_real_one() -> None:
    with refuses(f"row 0 of a warm plan writes to slot 46; only the sink {SINK} is legal"):
        check_warm_writes_sink(bench().real().plan, SINK)


def kv() -> torch.Tensor:
    """K or V of six slots and a sink block of two."""
    values = torch.arange(8 * 2 * 3, dtype=torch.float32).view(8, 2, 3)
    values[2] = float("nan")
    return values


def test_nothing_was_touched_when_only_the_sink_block_changed() -> None:
    after = kv()
    after[6:] = 99.0
    check_warm_touches_nothing(kv(), after, 6)


@pytest.mark.parametrize(("slot", "value"), [(0, -1.0), (5, -1.0), (1, float("nan")), (2, 0.0)])
def test_something_was_touched_when_a_slot_of_the_pool_changed(slot: int, value: float) -> None:
    after = kv()
    after[slot, 1, 2] = value
    with refuses(f"a warm plan changed K/V slot {slot}; only slots from the sink 6 on may change"):
        check_warm_touches_nothing(kv(), after, 6)


def test_graphs_are_bound_when_one_was_recorded_in_the_middle_of_a_run() -> None:
    mixed = graphs((SHAPE, "warm", ()), (DecodeShape(2, 16), "cold", (0, 1)))
    with refuses("the graph of GraphKey(kind='decode', rows=2, width=16) froze rows (0, 1); it must freeze none"):
        check_warm_graphs_unbound(mixed)


def test_cold_captures_are_named_when_a_client_waited_for_some() -> None:
    mixed = graphs((SHAPE, "warm", ()), (DecodeShape(2, 16), "cold", ()), (DecodeShape(1, 16), "cold", ()))
    with refuses("2 graphs were recorded after ready, the first for GraphKey(kind='decode', rows=2, width=16); the"):
        check_no_cold_captures(mixed)


def test_not_all_is_warm_when_a_shape_has_no_graph() -> None:
    with refuses(f"2 shapes have no graph, the first being {DecodeShape(2, 16)}; the limit is 0"):
        check_all_warm(graphs((SHAPE, "warm", ())), [SHAPE, DecodeShape(2, 16), DecodeShape(4, 32)])


def test_budget_is_exceeded_when_the_biggest_shape_needs_more_than_is_free() -> None:
    with refuses("the warm list's biggest shape needs 1,001 bytes, 1,000 are free; lower --warm-width, --warm-rows"):
        check_warm_budget(1001, 1000)


def test_table_gate_is_the_one_that_steps_run() -> None:
    on = bench()
    recorded = on.slots.address
    on.slots.to("meta")
    with refuses("the slot table moved"):
        check_table_stable(recorded, on.slots)
