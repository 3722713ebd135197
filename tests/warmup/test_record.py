"""The warm-up's batches, its pricing and its report."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.buckets import DecodeShape, ShapeSet
from nanoserve.cache import BatchedPagedKVCache
from nanoserve.errors import GateError
from nanoserve.graphs import Origin, RecordingTime
from nanoserve.inputs import RowSampling
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.warmup import CostModel, WarmupReport, biggest_first, price, warm_decode, warmup_batch, warmup_plan
from nanoserve.warmup.record import PROBE_SECONDS, PROBE_STEP
from tests.bound_plans import SHAPE, SINK, bench
from tests.tiny_engines import BLOCK, prompts, tiny_engine

# --- a warm batch ----------------------------------------------------------------------------------------------------


def test_warm_plan_is_written_into_the_real_buffers_over_a_window_on_the_real_table() -> None:
    on = bench()
    on.real()  # what a step left behind
    on.inputs.write_sampling([RowSampling(0.7, 5, 0.5, 0.1, 9, 1)] * 4)
    bound = warmup_plan(SHAPE, on.slots, on.inputs)
    assert bound.plan.rows == ()
    assert bound.plan.pad_rows == SHAPE.rows
    assert bound.step.write_slots.tolist() == [SINK] * 4
    assert bound.step.context_lens.tolist() == [0] * 4
    assert bound.step.table_rows.tolist() == [4] * 4
    assert bound.sampling.temperature.tolist() == [0.0] * 4
    assert bound.slot_mapping.data_ptr() == on.slots.address
    assert tuple(bound.slot_mapping.shape) == SHAPE
    for buffer in (bound.step.input_ids, bound.step.positions, bound.step.write_slots, bound.step.context_lens):
        assert on.inputs.addresses[0] <= buffer.data_ptr() < on.inputs.addresses[0] + 5 * 4 * 8


def cache() -> BatchedPagedKVCache:
    return BatchedPagedKVCache(
        ReferenceOps(),
        num_layers=2,
        num_blocks=SINK // BLOCK,
        block_size=BLOCK,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_scheduled_view_over_no_rows_is_refused_and_a_warm_batch_is_not() -> None:
    """An empty selection is legal exactly where a warm batch reaches: it says that it means it."""
    on, kv = bench(), cache()
    bound = on.warm()
    with pytest.raises(ValueError, match="a cache view over no rows; a scheduled forward has at least one"):
        kv.view((), bound.step, bound.slot_mapping)
    with pytest.raises(ValueError, match="a cache view over no chunks"):
        kv.view_chunks((), bound.step)
    rows = warmup_batch(bound, kv)
    nan = torch.full((SHAPE.rows, 2, 8), float("nan"))
    kv.write(0, bound.step.write_slots, nan, nan)
    out = rows.paged_attention(0, torch.ones(SHAPE.rows, 4, 8), scale=1.0, window=None)
    assert torch.equal(out, torch.zeros(SHAPE.rows, 32))
    keys, _ = kv.snapshot(0)
    assert keys[SINK].isnan().all()
    keys[SINK] = 0
    assert not keys.any()


def test_slot_window_over_no_rows_is_legal_only_when_something_is_padded() -> None:
    on = bench()
    assert tuple(on.slots.read((), pad_rows=2, width=16).shape) == (2, 16)
    for pads in (0, -1):
        with pytest.raises(ValueError, match="over no rows and no pad rows"):
            on.slots.read((), pad_rows=pads, width=16)


def test_warm_plan_is_refused_when_its_shape_has_no_rows() -> None:
    on = bench()
    with pytest.raises(ValueError, match="over no rows and no pad rows"):
        warmup_plan(DecodeShape(0, 16), on.slots, on.inputs)


def test_warm_batch_is_refused_when_the_plan_names_a_row() -> None:
    on = bench()
    with pytest.raises(GateError, match=re.escape("names rows (0, 1, 2); it must name none")):
        warmup_batch(on.real(), cache())


def test_pool_becomes_resident_when_the_first_batch_is_warmed() -> None:
    tiny = tiny_engine(layers=3)
    assert tiny.engine.runner.cache.resident_layers == 0
    tiny.engine.warm_decode([DecodeShape(1, 16)], cost=CostModel(0.0, 0.0))
    assert tiny.engine.runner.cache.resident_layers == 3


def test_warm_up_touches_nothing_when_sequences_are_running() -> None:
    """A recording made between two steps: K/V of the pool, the slot table and the newest tokens stay as they are."""
    tiny = tiny_engine(max_sequences=3)
    runner = tiny.engine.runner
    for sequence in prompts(3, 5, max_tokens=30):
        tiny.engine.add(sequence)
    for _ in range(4):
        tiny.engine.step()
    before = [side.clone() for side in runner.cache.snapshot(0)]
    table = runner.slots.read((0, 1, 2), width=64).clone()
    tiny.engine.warm_decode([DecodeShape(2, 48), DecodeShape(3, 64)], cost=CostModel(0.0, 0.0))
    for kept, now in zip(before, runner.cache.snapshot(0), strict=True):
        assert torch.equal(kept[: runner.cache.sink_slot], now[: runner.cache.sink_slot])
    assert torch.equal(table, runner.slots.read((0, 1, 2), width=64))


# --- pricing and recording, on a device whose cost is known ----------------------------------------------------------


class Device:
    """A recorder on a clock of its own. `seconds` says what a recording takes; the first one takes `extra` more."""

    def __init__(self, seconds: Callable[[DecodeShape], float], extra: float = 0.0) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.extra = extra
        self.probed: list[DecodeShape] = []
        self.captured: list[tuple[DecodeShape, Origin]] = []

    def clock(self) -> float:
        return self.now

    def _take(self, shape: DecodeShape) -> float:
        taken = self.seconds(shape) + self.extra
        self.extra = 0.0
        self.now += taken
        return taken

    def time_recording(self, shape: DecodeShape) -> RecordingTime:
        self.probed.append(shape)
        return RecordingTime(self._take(shape))

    def capture(self, shape: DecodeShape, origin: Origin) -> None:
        self._take(shape)
        self.captured.append((shape, origin))


SHAPES = ShapeSet.build(max_rows=8, max_width=2048, width_multiple=128).shapes()


def warm(device: Device, shapes: Sequence[DecodeShape], cost: CostModel) -> WarmupReport:
    return warm_decode(device, shapes, cost=cost, clock=device.clock)


@given(st.floats(1e-4, 2.0), st.floats(0, 1e-3), st.floats(0, 5))
def test_prediction_is_exact_when_cost_is_a_line(base: float, cell: float, extra: float) -> None:
    true = CostModel(base, cell)
    device = Device(true.seconds, extra)
    cost = price(device, SHAPES)
    report = warm(device, biggest_first(SHAPES), cost)
    assert report.predicted_seconds == pytest.approx(true.total_seconds(SHAPES), rel=1e-6)
    assert report.prediction_error is not None
    assert abs(report.prediction_error) < 1e-6


@pytest.mark.parametrize(
    "seconds",
    [
        lambda shape: 0.08 + 0.004 * shape.rows + 4e-5 * shape.rows * shape.width,
        lambda shape: 0.05 + 1e-4 * (shape.rows * shape.width) ** 0.95,
        lambda shape: 0.02 + 2e-5 * shape.rows * (shape.width + 64),
    ],
    ids=["rows too", "sublinear", "offset"],
)
def test_prediction_is_within_a_quarter_when_cost_is_nearly_a_line(seconds: Callable[[DecodeShape], float]) -> None:
    device = Device(seconds, extra=3.0)
    report = warm(device, biggest_first(SHAPES), price(device, SHAPES))
    assert report.prediction_error is not None
    assert abs(report.prediction_error) < 0.25


@given(st.floats(1e-3, 0.4), st.floats(0, 1e-3))
def test_no_probe_is_long_when_the_smallest_shape_is_not(base: float, cell: float) -> None:
    true = CostModel(base, cell)
    device = Device(true.seconds)
    price(device, SHAPES)
    longest = max(true.seconds(shape) for shape in device.probed)
    assert longest <= PROBE_SECONDS * (PROBE_STEP + 1) + true.seconds(DecodeShape(1, 128))
    assert len(device.probed) <= 7


def test_prediction_holds_when_a_probe_was_disturbed() -> None:
    """Whatever else runs on the machine makes a recording slower, never faster."""
    for disturbed in range(7):
        probes = itertools.count()
        true = CostModel(0.05, 1e-5)

        def seconds(shape: DecodeShape, true: CostModel = true, probes: Any = probes, bad: int = disturbed) -> float:
            return true.seconds(shape) + (1.0 if next(probes) == bad else 0.0)

        predicted = price(Device(seconds), SHAPES).total_seconds(SHAPES)
        assert predicted == pytest.approx(true.total_seconds(SHAPES), rel=0.25)


def test_only_the_two_smallest_are_probed_when_even_they_are_slow() -> None:
    device = Device(CostModel(10.0, 0.1).seconds)
    price(device, SHAPES)
    assert device.probed[:2] == [DecodeShape(1, 128)] * 2
    assert device.probed[2:] in ([DecodeShape(1, 256)], [DecodeShape(2, 128)])


def test_few_probes_are_made_when_recordings_are_quick() -> None:
    device = Device(CostModel(0.005, 1e-7).seconds)
    price(device, SHAPES)
    assert len(device.probed) == 4, "the smallest and a big one, twice each"


def test_narrowing_is_priced_when_a_backend_narrows() -> None:
    class Narrower(Device):
        def time_recording(self, shape: DecodeShape) -> RecordingTime:
            return super().time_recording(shape)._replace(narrowing_seconds=0.001)

    assert price(Narrower(lambda shape: 0.25), SHAPES) == CostModel(0.25, 0.0, narrowing_seconds=0.001)


def test_price_is_flat_when_there_is_a_single_shape() -> None:
    assert price(Device(lambda shape: 0.3), [DecodeShape(1, 128)]) == CostModel(0.3, 0.0)


def test_price_is_nothing_when_there_is_nothing_to_record() -> None:
    device = Device(lambda shape: 0.3)
    assert price(device, []) == CostModel(0.0, 0.0)
    assert device.probed == []


def test_shapes_are_recorded_in_the_order_given_and_each_is_timed() -> None:
    device = Device(lambda shape: shape.rows / 4)
    listed = [DecodeShape(8, 128), DecodeShape(1, 128), DecodeShape(2, 256)]
    report = warm(device, listed, CostModel(1.0, 0.0))
    assert device.captured == [(shape, "warm") for shape in listed]
    assert report.seconds_by_shape == ((listed[0], 2.0), (listed[1], 0.25), (listed[2], 0.5))
    assert (report.graphs, report.seconds, report.predicted_seconds) == (3, 2.75, 3.0)
    assert report.prediction_error == pytest.approx(-0.25 / 3)


def test_report_is_empty_when_nothing_is_warmed() -> None:
    seen: list[tuple[int, int, float | None]] = []
    report = warm_decode(
        Device(lambda shape: 1.0), [], cost=CostModel(0.0, 0.0), progress=lambda *now: seen.append(now)
    )
    assert report.graphs == 0
    assert report.prediction_error is None
    assert seen == [(0, 0, 0.0)]


def test_progress_counts_up_and_seconds_left_fall_to_zero() -> None:
    device = Device(CostModel(0.1, 1e-4).seconds)
    seen: list[tuple[int, int, float | None]] = []
    cost = price(device, SHAPES)
    warm_decode(device, biggest_first(SHAPES), cost=cost, progress=lambda *now: seen.append(now), clock=device.clock)
    assert [done for done, _, _ in seen] == list(range(len(SHAPES) + 1))
    assert {total for _, total, _ in seen} == {len(SHAPES)}
    left = [eta for _, _, eta in seen if eta is not None]
    assert len(left) == len(seen)
    assert all(later < earlier for earlier, later in itertools.pairwise(left))
    assert left[0] == pytest.approx(cost.total_seconds(SHAPES))
    assert left[-1] == 0.0


def test_seconds_left_follow_the_clock_when_the_prediction_was_half_of_it() -> None:
    device = Device(lambda shape: 2.0)
    seen: list[float | None] = []
    shapes = SHAPES[:10]
    warm_decode(
        device,
        shapes,
        cost=CostModel(1.0, 0.0),
        progress=lambda done, total, eta: seen.append(eta),
        clock=device.clock,
    )
    assert seen[0] == 10.0
    assert seen[1:] == [2.0 * left for left in range(9, -1, -1)]


def test_arena_is_asked_for_when_all_is_recorded() -> None:
    device = Device(lambda shape: 1.0)
    report = warm_decode(
        device,
        SHAPES[:3],
        cost=CostModel(1.0, 0.0),
        predicted_bytes=7,
        arena_bytes=lambda: 100 * len(device.captured),
    )
    assert (report.predicted_bytes, report.arena_bytes) == (7, 300)
