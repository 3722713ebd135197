"""The warm-up itself: one synthetic batch per shape, driven through the same recording a real step would make.

A warm batch is a step whose rows are all padding: it is not a special case of a plan but the limit of one, so it passes
every gate that a real plan passes, and what is recorded on it froze no sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

from nanoserve.buckets import DecodeShape, Shape, cells, pad_plan
from nanoserve.cache import BatchedCacheRows, BatchedPagedKVCache
from nanoserve.gates import BoundPlan
from nanoserve.graphs import Origin, RecordingTime
from nanoserve.inputs import GREEDY, StepInputs
from nanoserve.slots import SlotTable
from nanoserve.warmup.arithmetic import CostModel
from nanoserve.warmup.gates import check_warm_rows_empty

PROBE_SECONDS = 0.5
PROBE_STEP = 4
"""How many times PROBE_SECONDS a probe may take, and how many times as big as the last one what is not tried may be."""

Progress = Callable[[int, int, float | None], None]
"""Told (shapes recorded, shapes in all, seconds left or None)."""


class Recorder(Protocol):
    """What the warm-up drives: the runner."""

    def capture(self, shape: Any, origin: Origin) -> Any:
        """Record the graph of a shape on its warm plan."""

    def time_recording(self, shape: Any) -> RecordingTime:
        """What a recording of a shape takes; it is thrown away."""


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up did. `seconds_by_shape` is in the order of recording."""

    graphs: int
    seconds: float
    predicted_seconds: float
    predicted_bytes: int
    arena_bytes: int | None
    seconds_by_shape: tuple[tuple[Shape, float], ...] = field(default=(), repr=False)

    @property
    def prediction_error(self) -> float | None:
        """(actual - predicted) / predicted; None if nothing was predicted."""
        return (self.seconds - self.predicted_seconds) / self.predicted_seconds if self.predicted_seconds else None


def warmup_plan(shape: DecodeShape, slots: SlotTable, inputs: StepInputs) -> BoundPlan:
    """The addressing of `shape` over no sequences, written into the real buffers, its rectangle a window on the real
    slot table: `rows` (), every row a pad row, every write slot the sink, every context length 0."""
    plan = pad_plan(shape, slots.sink_slot)
    pad_row = inputs.last_tokens.shape[0] - 1
    inputs.write_rows(plan.input_ids, plan.positions, plan.write_slots, plan.context_lens, (pad_row,) * plan.shape.rows)
    inputs.write_sampling([GREEDY] * shape.rows)
    return BoundPlan(
        plan=plan,
        step=inputs.window(shape.rows),
        sampling=inputs.sampling(shape.rows),
        slot_mapping=slots.read((), pad_rows=shape.rows, width=shape.width),
    )


def warmup_batch(bound: BoundPlan, cache: BatchedPagedKVCache) -> BatchedCacheRows:
    """The cache as a warm forward sees it: rows that name no sequence. `cache.view(())` refuses; this says it is meant.

    Raises GateError if the plan names a row.
    """
    check_warm_rows_empty(bound.plan)
    return BatchedCacheRows(cache, bound.step, bound.slot_mapping)


def price(recorder: Recorder, shapes: Sequence[Shape], *, probe_seconds: float = PROBE_SECONDS) -> CostModel:
    """Fit the cost model to the recording times of two shapes: the smallest, and a big one that is quick to try.

    That one is found by trying ever bigger ones, since the smallest alone does not tell whether size or overhead made
    its time, until one takes `probe_seconds` or none is more than PROBE_STEP times as big. A shape takes at most as
    many times longer as it is bigger, so no probe is longer than PROBE_STEP * `probe_seconds`, unless the two smallest
    shapes are. Both are timed twice and the shorter time counts: what disturbs a recording, such as the K/V pool's
    allocation in the very first one, only makes it slower.
    """
    by_size = sorted(shapes, key=cells)
    if not by_size:
        return CostModel(0.0, 0.0)
    small = large = by_size[0]
    small_seconds = large_seconds = min(recorder.time_recording(small).seconds for _ in range(2))
    narrowing: float | None = None
    enough = cells(by_size[-1]) / PROBE_STEP
    while large != by_size[-1] and (large == small or (large_seconds <= probe_seconds and cells(large) < enough)):
        reach = cells(large) * PROBE_STEP * probe_seconds / max(large_seconds, 1e-9)
        bigger = by_size[by_size.index(large) + 1 :]
        large = max((shape for shape in bigger if cells(shape) <= reach), key=cells, default=bigger[0])
        large_seconds, narrowing = recorder.time_recording(large)
    if large == small:
        return CostModel(small_seconds, 0.0)
    if large_seconds <= PROBE_STEP * probe_seconds:
        large_seconds = min(large_seconds, recorder.time_recording(large).seconds)
    return replace(CostModel.fit((small, small_seconds), (large, large_seconds)), narrowing_seconds=narrowing)


def warm_decode(
    recorder: Recorder,
    shapes: Sequence[Shape],
    *,
    cost: CostModel,
    predicted_bytes: int = 0,
    arena_bytes: Callable[[], int | None] = lambda: None,
    progress: Progress | None = None,
    clock: Callable[[], float] = perf_counter,
) -> WarmupReport:
    """Record each shape in the order given."""
    started = clock()
    taken: list[tuple[Shape, float]] = []
    for done, shape in enumerate(shapes):
        if progress is not None:
            progress(done, len(shapes), _eta(cost, shapes, done, clock() - started))
        begun = clock()
        recorder.capture(shape, "warm")
        taken.append((shape, clock() - begun))
    if progress is not None:
        progress(len(shapes), len(shapes), 0.0)
    return WarmupReport(
        graphs=len(taken),
        seconds=clock() - started,
        predicted_seconds=cost.total_seconds(shapes),
        predicted_bytes=predicted_bytes,
        arena_bytes=arena_bytes(),
        seconds_by_shape=tuple(taken),
    )


def _eta(cost: CostModel, shapes: Sequence[Shape], done: int, elapsed: float) -> float:
    """Predicted seconds of what is left, scaled by how the prediction has held so far."""
    spent = cost.total_seconds(shapes[:done])
    left = cost.total_seconds(shapes) - spent
    return left * (elapsed / spent) if spent > 0 else left
