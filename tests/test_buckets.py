"""The closed set of padded shapes, and decode steps planned into it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.buckets import (
    LAST_TOKEN,
    DecodeRow,
    DecodeShape,
    GraphKey,
    PagedShapes,
    ShapeSet,
    bucket_for,
    pad_plan,
    plan_decode,
    row_buckets,
    width_buckets,
)
from nanoserve.errors import ConfigError

SINK = 10_000


@pytest.mark.parametrize(
    ("most", "ladder"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12)), (33, (1, 2, 4, 8, 16, 32, 33))],
)
def test_row_ladder_is_powers_of_two_and_the_maximum(most: int, ladder: tuple[int, ...]) -> None:
    assert row_buckets(most) == ladder


@given(st.integers(1, 400))
def test_every_batch_has_a_bucket_when_the_maximum_is_off_the_ladder(most: int) -> None:
    ladder = row_buckets(most)
    assert list(ladder) == sorted(set(ladder))
    for rows in range(1, most + 1):
        assert rows <= bucket_for(rows, ladder) < 2 * rows or bucket_for(rows, ladder) == rows
    with pytest.raises(IndexError):
        bucket_for(most + 1, ladder)


@given(st.integers(1, 5_000), st.integers(1, 512))
def test_every_context_has_a_width_when_the_longest_is_no_multiple(longest: int, multiple: int) -> None:
    ladder = width_buckets(longest, multiple)
    assert ladder[0] == multiple
    assert all(b - a == multiple for a, b in itertools.pairwise(ladder))
    assert ladder[-1] - multiple < longest <= ladder[-1]


def test_serving_size_of_the_source_document_is_576_shapes() -> None:
    shapes = ShapeSet.build(max_rows=256, max_width=8192, width_multiple=128)
    assert (len(shapes.row_ladder), len(shapes.width_ladder), len(shapes.shapes())) == (9, 64, 576)


@pytest.mark.parametrize("build", [lambda: row_buckets(0), lambda: width_buckets(128, 0)], ids=["rows", "multiple"])
def test_ladder_is_refused_when_it_would_be_empty(build: object) -> None:
    with pytest.raises(ConfigError, match="at least 1; raise --"):
        build()  # type: ignore[operator]


@st.composite
def decode_rows(draw: st.DrawFn) -> list[DecodeRow]:
    positions = draw(st.lists(st.integers(0, 299), min_size=1, max_size=13))
    return [DecodeRow(index, position, 1000 + 300 * index + position) for index, position in enumerate(positions)]


@given(decode_rows(), st.integers(13, 20), st.integers(1, 64))
def test_padding_is_inert_and_real_rows_are_untouched_when_a_step_is_planned(
    rows: list[DecodeRow], most: int, multiple: int
) -> None:
    shapes = ShapeSet.build(max_rows=most, max_width=300, width_multiple=multiple)
    plan = plan_decode(rows, shapes, SINK)
    real = len(rows)
    assert plan.shape in shapes.shapes()
    assert plan.rows == tuple(range(real))
    assert plan.pad_rows == plan.shape.rows - real
    for row, wanted in enumerate(rows):
        assert plan.input_ids[row] == LAST_TOKEN
        assert (plan.positions[row], plan.write_slots[row]) == (wanted.position, wanted.write_slot)
        assert plan.context_lens[row] == wanted.position + 1 <= plan.shape.width
    assert plan.write_slots[real:] == (SINK,) * plan.pad_rows
    assert plan.context_lens[real:] == plan.positions[real:] == plan.input_ids[real:] == (0,) * plan.pad_rows
    for field in (plan.input_ids, plan.positions, plan.write_slots, plan.context_lens):
        assert len(field) == plan.shape.rows


def test_batch_keeps_its_own_size_when_there_is_no_closed_set() -> None:
    plan = plan_decode([DecodeRow(0, 6, 6), DecodeRow(1, 40, 99)], None, SINK)
    assert plan.shape == DecodeShape(2, 41)
    assert plan.pad_rows == 0


@pytest.mark.parametrize("position", [31, 32])
def test_width_grows_exactly_when_the_context_outgrows_it(position: int) -> None:
    shapes = ShapeSet.build(max_rows=2, max_width=64, width_multiple=32)
    plan = plan_decode([DecodeRow(0, position, position)], shapes, SINK)
    assert plan.shape.width == (32 if position == 31 else 64)


def test_planning_refuses_when_a_row_lies_beyond_the_widest_shape() -> None:
    shapes = ShapeSet.build(max_rows=2, max_width=64, width_multiple=32)
    with pytest.raises(IndexError):
        plan_decode([DecodeRow(0, 64, 64)], shapes, SINK)


def test_warm_plan_is_the_limit_of_a_plan_when_nothing_is_real() -> None:
    plan = pad_plan(DecodeShape(4, 128), SINK)
    assert (plan.rows, plan.pad_rows) == ((), 4)
    assert plan.write_slots == (SINK,) * 4
    assert plan.context_lens == (0,) * 4


def test_paged_shapes_are_a_body_list_and_a_head_list_for_either_kind() -> None:
    shapes = PagedShapes.build(max_step_rows=5, max_logit_rows=3).shapes()
    assert shapes == [
        *(GraphKey("body", rows, None) for rows in (1, 2, 4, 5)),
        *(GraphKey("head", rows, None) for rows in (1, 2, 3)),
        *(GraphKey("head_full", rows, None) for rows in (1, 2, 3)),
    ]
