"""The gates of the warm-up: that a warm plan is nothing but padding, that recording it left no trace, that all is warm.

Each raises GateError with the actual value and the limit; none changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoserve.buckets import DecodePlan, Shape, key_of
from nanoserve.errors import GateError
from nanoserve.gates import check_table_stable
from nanoserve.graphs import GraphSet

__all__ = [
    "check_all_warm",
    "check_no_cold_captures",
    "check_table_stable",
    "check_warm_budget",
    "check_warm_graphs_unbound",
    "check_warm_rows_empty",
    "check_warm_touches_nothing",
    "check_warm_writes_sink",
]


def check_warm_rows_empty(plan: DecodePlan) -> None:
    """A warm plan names no sequence: all its rows are pad rows."""
    if plan.rows or plan.pad_rows != plan.shape.rows:
        raise GateError(f"a warm plan of shape {plan.shape} names rows {plan.rows}; it must name none")


def check_warm_writes_sink(plan: DecodePlan, sink_slot: int) -> None:
    """Every row of a warm plan writes to the sink."""
    for row, slot in enumerate(plan.write_slots):
        if slot != sink_slot:
            raise GateError(f"row {row} of a warm plan writes to slot {slot}; only the sink {sink_slot} is legal")


def check_warm_touches_nothing(
    before: Tensor, after: Tensor, sink_slot: int, *, slots: Sequence[int] | None = None
) -> None:
    """K/V `[slots, …]` outside the sink block is what it was; NaN equals NaN.

    The tensors hold slots 0, 1, … and the sink's, which may change; or the listed ones, none of which is the sink's.
    """
    kept, now = (before[:sink_slot], after[:sink_slot]) if slots is None else (before, after)
    if torch.equal(kept, now):
        return
    same = (kept == now) | (kept.isnan() & now.isnan())
    if not bool(same.all()):
        index = int(torch.nonzero(~same.flatten(1).all(1))[0])
        slot = index if slots is None else slots[index]
        raise GateError(f"a warm plan changed K/V slot {slot}; only slots from the sink {sink_slot} on may change")


def check_warm_graphs_unbound(graphs: GraphSet[Any]) -> None:
    """No graph froze a row set: each was recorded on a warm plan, so none can be replayed on the wrong sequences."""
    for entry in graphs.entries():
        if entry.recorded_rows:
            raise GateError(f"the graph of {entry.key} froze rows {entry.recorded_rows}; it must freeze none")


def check_no_cold_captures(graphs: GraphSet[Any]) -> None:
    """Nothing was recorded in front of a client."""
    cold = [entry.key for entry in graphs.entries() if entry.origin == "cold"]
    if cold:
        raise GateError(f"{len(cold)} graphs were recorded after ready, the first for {cold[0]}; the limit is 0")


def check_all_warm(graphs: GraphSet[Any], shapes: Iterable[Shape]) -> None:
    """Every shape of a list has its graph."""
    missing = [shape for shape in shapes if key_of(shape) not in graphs]
    if missing:
        raise GateError(f"{len(missing)} shapes have no graph, the first being {missing[0]}; the limit is 0")


def check_warm_budget(needed_bytes: int, budget_bytes: int) -> None:
    """The widest shape of the warm list fits what weights and K/V pool left free."""
    if needed_bytes > budget_bytes:
        raise GateError(
            f"the warm list's biggest shape needs {needed_bytes:,} bytes, {budget_bytes:,} are free; "
            "lower --warm-width, --warm-rows or --kv-memory"
        )
