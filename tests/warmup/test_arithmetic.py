"""The source document's figures, exactly, and what must hold of the arithmetic for any numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.buckets import DecodeShape, GraphKey, ShapeSet
from nanoserve.warmup import (
    CostModel,
    biggest_first,
    lazy_captures,
    pool_sharing_ratio,
    score_bytes,
    stall_seconds,
    warm_budget_bytes,
    warm_shapes,
    warmup_seconds,
    width_ceiling,
)

SERVING = ShapeSet.build(max_rows=256, max_width=8192, width_multiple=128)
HEADS = 32


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_scores_are_rows_times_heads_times_width_times_four_bytes() -> None:
    assert score_bytes(DecodeShape(256, 8192), num_heads=32) == 256 * 32 * 8192 * 4 == 268_435_456
    assert score_bytes(DecodeShape(1, 128), num_heads=9, itemsize=2) == 2_304


@pytest.mark.parametrize(
    ("budget_bytes", "widest", "shapes"), [(64_000_000, 1_953, 135), (268_000_000, 8_178, 567)], ids=["64MB", "268MB"]
)
def test_width_is_capped_when_the_budget_is_smaller_than_the_widest_shape(
    budget_bytes: int, widest: int, shapes: int
) -> None:
    ceiling = width_ceiling(rows=256, num_heads=HEADS, budget_bytes=budget_bytes)
    assert ceiling == widest
    assert len(warm_shapes(SERVING, max_width=ceiling)) == shapes


def test_whole_list_fits_when_the_budget_is_a_gigabyte() -> None:
    ceiling = width_ceiling(rows=256, num_heads=HEADS, budget_bytes=1_000_000_000)
    assert ceiling == 30_517
    assert len(warm_shapes(SERVING, max_width=ceiling)) == 576


@given(st.integers(1, 512), st.integers(1, 64), st.integers(0, 1 << 40), st.sampled_from([2, 4]))
def test_ceiling_is_the_widest_that_fits_for_any_budget(rows: int, heads: int, budget: int, itemsize: int) -> None:
    ceiling = width_ceiling(rows=rows, num_heads=heads, budget_bytes=budget, itemsize=itemsize)
    assert score_bytes(DecodeShape(rows, ceiling), num_heads=heads, itemsize=itemsize) <= budget
    assert score_bytes(DecodeShape(rows, ceiling + 1), num_heads=heads, itemsize=itemsize) > budget


@pytest.mark.parametrize(("free", "reserve", "budget"), [(1000, 0, 1000), (1000, 300, 700), (1000, 2000, 0), (0, 0, 0)])
def test_budget_is_what_is_left_and_never_negative(free: int, reserve: int, budget: int) -> None:
    assert warm_budget_bytes(free_bytes=free, reserve_bytes=reserve) == budget


def test_shared_arena_is_as_big_as_its_biggest_member() -> None:
    two = [DecodeShape(1, 128), DecodeShape(2, 128)]
    assert pool_sharing_ratio(two, num_heads=HEADS) == 1.5
    assert pool_sharing_ratio(two[:1], num_heads=HEADS) == 1.0
    assert pool_sharing_ratio([], num_heads=HEADS) == 0.0
    # (1 + 2 + ... + 256) rows x (128 + 256 + ... + 8192) tokens, over 256 x 8192
    assert pool_sharing_ratio(SERVING.shapes(), num_heads=HEADS) == 511 * 266_240 / (256 * 8192)


# --- seconds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_rows", "max_width", "graphs", "seconds"),
    [(None, None, 576, 28.80), (8, None, 256, 12.80), (8, 2048, 64, 3.20)],
    ids=["full", "rows<=8", "rows<=8,ctx<=2048"],
)
def test_start_up_costs_what_the_document_says_when_the_list_is_trimmed(
    max_rows: int | None, max_width: int | None, graphs: int, seconds: float
) -> None:
    listed = warm_shapes(SERVING, max_rows=max_rows, max_width=max_width)
    assert len(listed) == graphs
    assert warmup_seconds(graphs=graphs, seconds_per_graph=0.05) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(
    ("generated", "graphs", "seconds"), [(128, 1, 0.05), (512, 4, 0.20), (2048, 16, 0.80), (8192, 64, 3.20)]
)
def test_client_waits_as_long_as_the_document_says_when_recordings_are_lazy(
    generated: int, graphs: int, seconds: float
) -> None:
    captures = lazy_captures(steps=generated, start_width=0, width_multiple=128)
    assert captures == graphs
    assert stall_seconds(captures=captures, seconds_per_graph=0.05) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(("generated", "captures"), [(8, 1), (32, 2), (64, 3), (128, 5)])
def test_lazy_captures_are_predicted_when_the_prompt_is_16_tokens(generated: int, captures: int) -> None:
    assert lazy_captures(steps=generated, start_width=16, width_multiple=32) == captures


@pytest.mark.parametrize(
    ("generated", "graphs"),
    # The document prints 4 for the first; two row buckets x one width are 2.
    [(8, 2), (32, 4), (64, 6), (128, 10)],
)
def test_warm_list_is_row_buckets_times_widths_when_two_rows_generate(generated: int, graphs: int) -> None:
    shapes = ShapeSet.build(max_rows=2, max_width=16 + generated, width_multiple=32)
    assert len(warm_shapes(shapes)) == graphs


@given(st.integers(1, 5_000), st.integers(0, 10_000), st.integers(1, 512))
def test_lazy_captures_count_the_buckets_a_run_meets(steps: int, start: int, multiple: int) -> None:
    """Counted one step at a time: the step after `width` tokens of context attends to one more."""
    met = {-(-width // multiple) for width in range(start + 1, start + steps + 1)}
    assert lazy_captures(steps=steps, start_width=start, width_multiple=multiple) == len(met)


# --- order -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 900), st.integers(1, 200), st.none() | st.integers(0, 50))
def test_list_is_biggest_first_and_within_its_ceilings(
    max_rows: int, max_width: int, multiple: int, ceiling: int | None
) -> None:
    shapes = ShapeSet.build(max_rows=max_rows, max_width=max_width, width_multiple=multiple)
    listed = warm_shapes(shapes, max_rows=ceiling)
    sizes = [shape.rows * shape.width for shape in listed]
    assert sizes == sorted(sizes, reverse=True)
    assert set(listed) == {shape for shape in shapes.shapes() if ceiling is None or shape.rows <= ceiling}
    assert len(set(listed)) == len(listed)


def test_more_rows_come_first_when_sizes_are_equal() -> None:
    assert biggest_first([DecodeShape(1, 256), DecodeShape(2, 128)]) == (DecodeShape(2, 128), DecodeShape(1, 256))


# --- cost model ------------------------------------------------------------------------------------------------------


@given(
    st.floats(0, 10),
    st.floats(0, 1e-3),
    st.tuples(st.integers(1, 8), st.integers(1, 512)),
    st.tuples(st.integers(9, 64), st.integers(513, 4096)),
)
def test_fit_finds_the_line_when_costs_lie_on_one(
    base: float, slope: float, small: tuple[int, int], large: tuple[int, int]
) -> None:
    true = CostModel(base, slope)
    first, second = DecodeShape(*small), DecodeShape(*large)
    fitted = CostModel.fit((first, true.seconds(first)), (second, true.seconds(second)))
    for shape in (first, second, DecodeShape(32, 2048)):
        assert fitted.seconds(shape) == pytest.approx(true.seconds(shape), rel=1e-6, abs=1e-6)
    assert fitted.total_seconds([first, second]) == pytest.approx(true.total_seconds([first, second]), abs=1e-6)


def test_only_the_first_of_a_kind_is_recorded_when_the_others_are_narrowed() -> None:
    cost = CostModel(1.0, 0.5, narrowing_seconds=0.1)
    listed = [GraphKey("body", 4, None), GraphKey("body", 2, None), GraphKey("head", 2, None)]
    assert cost.total_seconds(listed) == pytest.approx(3.0 + 0.1 + 2.0)
    assert replace(cost, narrowing_seconds=None).total_seconds(listed) == pytest.approx(3.0 + 2.0 + 2.0)


def test_fit_never_predicts_that_bigger_is_cheaper_when_timings_are_noisy() -> None:
    fitted = CostModel.fit((DecodeShape(1, 128), 0.5), (DecodeShape(8, 128), 0.1))
    assert fitted == CostModel(0.5, 0.0)


def test_fit_never_predicts_negative_seconds_when_growth_is_steep() -> None:
    fitted = CostModel.fit((DecodeShape(1, 128), 0.001), (DecodeShape(2, 128), 1.0))
    assert fitted.base_seconds == 0.0
    assert fitted.seconds(DecodeShape(1, 1)) > 0


def test_fit_is_flat_when_both_shapes_have_the_same_size() -> None:
    assert CostModel.fit((DecodeShape(1, 256), 0.2), (DecodeShape(2, 128), 0.3)) == CostModel(0.2, 0.0)
