"""WarmupPlan: what is warmed, in which order, what is left for later and what is never recorded unasked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.buckets import DecodeShape, PagedShapes, ShapeSet
from nanoserve.warmup import CostModel, WarmupPlan, biggest_first, plan_warmup, score_bytes
from nanoserve.warmup.plan import expected_hits

SHAPES = ShapeSet.build(max_rows=8, max_width=512, width_multiple=128)  # 1, 2, 4, 8 x 128, 256, 384, 512
EVEN = CostModel(base_seconds=1.0, cell_seconds=0.0)
HEADS = 4


def plan(
    shapes: ShapeSet = SHAPES,
    *,
    cost: CostModel = EVEN,
    budget_bytes: int = 1 << 40,
    rows: int | None = None,
    width: int | None = None,
    seconds: float | None = None,
    served: Mapping[DecodeShape, int] | None = None,
) -> WarmupPlan:
    return plan_warmup(
        shapes,
        num_heads=HEADS,
        cost=cost,
        budget_bytes=budget_bytes,
        max_rows=rows,
        max_width=width,
        budget_seconds=seconds,
        served=served,
    )


def test_everything_is_warmed_biggest_first_when_nothing_limits_it() -> None:
    full = plan()
    assert full.shapes == biggest_first(SHAPES.shapes())
    assert full.uncovered == full.background == full.trimmed == ()
    assert (full.row_ceiling, full.width_ceiling) == (8, 512)
    assert full.predicted_seconds == 16.0
    assert full.predicted_bytes == score_bytes(DecodeShape(8, 512), num_heads=HEADS)


@pytest.mark.parametrize(
    ("rows", "width", "left"),
    [
        (4, None, 12),
        (None, 256, 8),
        (2, 128, 2),
        (3, 200, 2),
        (0, None, 0),
        (None, 0, 0),
        (None, 127, 0),
        (99, 9999, 16),
    ],
)
def test_trim_is_on_either_axis_and_what_it_leaves_out_is_said(rows: int | None, width: int | None, left: int) -> None:
    trimmed = plan(rows=rows, width=width)
    assert len(trimmed.shapes) == left
    assert all(shape.rows <= trimmed.row_ceiling and shape.width <= trimmed.width_ceiling for shape in trimmed.shapes)
    assert set(trimmed.shapes) | set(trimmed.trimmed) == set(SHAPES.shapes())
    assert len(trimmed.shapes) + len(trimmed.trimmed) == 16
    assert trimmed.background == ()


def test_width_ceiling_is_the_smaller_of_what_is_sold_and_what_memory_allows() -> None:
    holds_300 = 8 * HEADS * 300 * 4
    assert plan(budget_bytes=holds_300).width_ceiling == 300
    assert plan(budget_bytes=holds_300, width=200).width_ceiling == 200
    assert plan(budget_bytes=holds_300, width=400).width_ceiling == 300
    assert {shape.width for shape in plan(budget_bytes=holds_300).shapes} == {128, 256}


def test_memory_allows_wider_shapes_when_fewer_rows_are_warmed() -> None:
    holds_300 = 8 * HEADS * 300 * 4
    assert plan(budget_bytes=holds_300, rows=4).width_ceiling == 512
    # 3 is no bucket: the largest that is warmed has 2 rows.
    assert plan(budget_bytes=holds_300 // 4, rows=3).width_ceiling == 300


def test_nothing_is_warmed_when_memory_holds_no_shape() -> None:
    none = plan(budget_bytes=0)
    assert none.shapes == ()
    assert len(none.trimmed) == 16
    assert none.predicted_bytes == 0


def test_narrow_shapes_are_kept_when_seconds_are_few_and_all_cost_the_same() -> None:
    """What most answers reach is met most often: every row bucket at the narrow widths before any wide one."""
    kept = plan(seconds=8.0)
    assert kept.shapes == biggest_first(shape for shape in SHAPES.shapes() if shape.width <= 256)
    assert set(kept.background) == {shape for shape in SHAPES.shapes() if shape.width > 256}
    assert kept.predicted_seconds == 8.0


def test_cheap_shapes_are_kept_when_seconds_are_few_and_cost_grows_with_size() -> None:
    cost = CostModel(base_seconds=0.0, cell_seconds=1.0)
    kept = plan(cost=cost, seconds=128.0 * 3)
    assert kept.shapes == (DecodeShape(2, 128), DecodeShape(1, 128))


def test_budget_goes_on_with_cheaper_shapes_when_one_does_not_fit() -> None:
    cost = CostModel(base_seconds=0.0, cell_seconds=1.0)
    huge = DecodeShape(8, 512)
    kept = plan(cost=cost, seconds=300.0, served={huge: 1_000_000_000})
    assert huge in kept.background
    assert DecodeShape(1, 128) in kept.shapes


def test_budget_holds_as_many_shapes_as_can_be_narrowed() -> None:
    shapes = PagedShapes.build(max_step_rows=8, max_logit_rows=2)
    cost = CostModel(1.0, 0.0, narrowing_seconds=0.25)
    made = plan_warmup(shapes, num_heads=HEADS, cost=cost, budget_bytes=0, budget_seconds=3.5)
    assert (len(made.shapes), made.predicted_seconds) == (5, 3.5)
    assert len(made.background) == len(shapes.shapes()) - 5


def test_what_is_left_for_idle_gaps_comes_in_order_of_hits_a_second() -> None:
    cost = CostModel(base_seconds=1.0, cell_seconds=0.01)
    later = plan(cost=cost, seconds=10.0).background
    worth = [expected_hits(shape, 512, 128) / cost.seconds(shape) for shape in later]
    assert worth == sorted(worth, reverse=True)
    assert len(later) > 3


def test_all_is_left_for_idle_gaps_when_the_budget_is_zero_seconds() -> None:
    none = plan(cost=CostModel(0.0, 0.0), seconds=0)
    assert none.shapes == ()
    assert set(none.background) == set(SHAPES.shapes())
    assert none.predicted_seconds == 0.0


def test_served_shapes_come_first_when_an_earlier_process_counted_them() -> None:
    served = {DecodeShape(1, 128): 1, DecodeShape(2, 256): 900, DecodeShape(64, 128): 7}
    ordered = plan(served=served).shapes
    assert ordered[:2] == (DecodeShape(2, 256), DecodeShape(1, 128))
    assert ordered[2:] == biggest_first(set(SHAPES.shapes()) - set(served))


def test_served_shapes_are_kept_when_seconds_are_few() -> None:
    served = {DecodeShape(8, 512): 10, DecodeShape(4, 384): 1}
    kept = plan(seconds=3.0, served=served)
    assert kept.shapes[:2] == (DecodeShape(8, 512), DecodeShape(4, 384))
    assert len(kept.shapes) == 3


@given(
    max_rows=st.integers(1, 20),
    max_width=st.integers(1, 700),
    multiple=st.integers(16, 200),
    cost=st.builds(CostModel, st.floats(0, 1), st.floats(0, 1e-3)),
    budget_bytes=st.integers(0, 1 << 24),
    rows=st.none() | st.integers(0, 24),
    width=st.none() | st.integers(0, 800),
    seconds=st.none() | st.floats(0, 20),
    served=st.dictionaries(
        st.builds(DecodeShape, st.sampled_from([1, 2, 4]), st.integers(16, 200)), st.integers(1, 99), max_size=4
    ),
)
def test_every_shape_is_in_exactly_one_list_and_every_limit_holds(
    max_rows: int,
    max_width: int,
    multiple: int,
    cost: CostModel,
    budget_bytes: int,
    rows: int | None,
    width: int | None,
    seconds: float | None,
    served: dict[DecodeShape, int],
) -> None:
    shapes = ShapeSet.build(max_rows=max_rows, max_width=max_width, width_multiple=multiple)
    made = plan(shapes, cost=cost, budget_bytes=budget_bytes, rows=rows, width=width, seconds=seconds, served=served)
    assert sorted((*made.shapes, *made.background, *made.trimmed)) == sorted(shapes.shapes())
    for shape in (*made.shapes, *made.background):
        assert shape.rows <= made.row_ceiling
        assert shape.width <= made.width_ceiling
        assert score_bytes(shape, num_heads=HEADS) <= budget_bytes
    if seconds is None:
        assert made.background == ()
    else:
        assert made.predicted_seconds <= seconds + 1e-9
    first = [shape in served for shape in made.shapes]
    assert first == sorted(first, reverse=True)


def test_description_says_what_is_warmed_left_and_trimmed() -> None:
    text = plan(rows=4, seconds=4.0).describe()
    assert text.startswith("warm-up: 4 of 16 shapes (rows <= 4, width <= 512), 8 later in idle gaps, 4 trimmed; ")
    assert "predicted 4.0 s" in text
