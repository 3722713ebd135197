"""Bound plans, real and warm, on a real slot table and real step buffers; and plans broken in one way each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nanoserve.buckets import DecodeRow, DecodeShape, ShapeSet, plan_decode
from nanoserve.cache import BatchedPagedKVCache
from nanoserve.gates import BoundPlan
from nanoserve.inputs import GREEDY, StepInputs, new_last_tokens
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.slots import SlotTable
from nanoserve.warmup import warmup_plan

SINK = 128
SHAPE = DecodeShape(4, 16)
SHAPES = ShapeSet((1, 2, 4), (16, 32))


@dataclass
class Bench:
    """The storage plans are bound to. `expected` are the block tables of the real plan's rows."""

    slots: SlotTable
    inputs: StepInputs
    expected: list[list[int]]

    def real(self) -> BoundPlan:
        """Three rows with 7, 1 and 13 tokens of context, padded to four of width 16."""
        rows = [DecodeRow(row, len(slots) - 1, slots[-1]) for row, slots in enumerate(self.expected)]
        plan = plan_decode(rows, SHAPES, self.slots.sink_slot)
        assert plan.shape == SHAPE
        pads = (self.inputs.last_tokens.shape[0] - 1,) * plan.pad_rows
        self.inputs.write_rows(plan.input_ids, plan.positions, plan.write_slots, plan.context_lens, (*plan.rows, *pads))
        self.inputs.write_sampling([GREEDY] * plan.shape.rows)
        return BoundPlan(
            plan,
            self.inputs.window(plan.shape.rows),
            self.inputs.sampling(plan.shape.rows),
            self.slots.read(plan.rows, pad_rows=plan.pad_rows, width=plan.shape.width),
        )

    def warm(self) -> BoundPlan:
        return warmup_plan(SHAPE, self.slots, self.inputs)

    def tables(self, bound: BoundPlan) -> list[list[int]]:
        """What `check_window_intact` is to expect of a plan."""
        return self.expected if bound.plan.rows else []


def bench() -> Bench:
    slots = SlotTable(4, 32, SINK)
    expected = [list(range(40, 47)), [99], list(range(3, 16))]
    for row, row_slots in enumerate(expected):
        slots.write(row, 0, row_slots)
    return Bench(slots, StepInputs(4, new_last_tokens(4, "cpu")), expected)


def small_cache() -> BatchedPagedKVCache:
    """K/V of one layer, one head and one number, for SINK slots and the sink block."""
    return BatchedPagedKVCache(
        ReferenceOps(),
        num_layers=1,
        num_blocks=SINK // 16,
        block_size=16,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def with_plan(bound: BoundPlan, **fields: Any) -> BoundPlan:
    """The same windows under a plan that says something else."""
    return replace(bound, plan=replace(bound.plan, **fields))


def at(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """`values` with one of them changed."""
    return (*values[:index], value, *values[index + 1 :])


def copied(bound: BoundPlan) -> BoundPlan:
    """The same rectangle, somewhere else."""
    return replace(bound, slot_mapping=torch.clone(bound.slot_mapping))
