"""Percentiles, timelines and warm lists, against what they mean."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.buckets import GraphKey
from nanoserve.simulate.result import MOST_SPANS, SHARES, Gaps, Timeline, advise, percentiles


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 5)), min_size=1, max_size=40))
def test_percentile_of_counted_values_is_that_of_all_of_them(pairs: list[tuple[float, int]]) -> None:
    gaps = Gaps()
    for value, count in pairs:
        gaps.add(value, count)
    every = sorted(value for value, count in pairs for _ in range(count))
    assert len(gaps) == len(every)
    for name, share in SHARES.items():
        assert gaps.percentiles()[name] == every[math.ceil(share * len(every)) - 1]


def test_percentiles_of_nothing_are_unknown() -> None:
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None, "max": None}


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.floats(1e-4, 20), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99)),
        min_size=1,
        max_size=60,
    )
)
def test_timeline_loses_no_time_and_no_peak(steps: list[tuple[float, float, int, int, int]]) -> None:
    timeline, now, running, waiting = Timeline(), 0.0, 0.0, 0.0
    for idle, seconds, runs, waits, blocks in steps:
        now += idle
        timeline.add(now, now + seconds, runs, waits, blocks)
        now += seconds
        running += runs * seconds
        waiting += waits * seconds
    assert len(timeline.spans) <= MOST_SPANS
    assert len(timeline.spans) * timeline.span_seconds >= now * (1 - 1e-9)
    assert sum(span.running_seconds for span in timeline.spans) == pytest.approx(running)
    assert sum(span.waiting_seconds for span in timeline.spans) == pytest.approx(waiting)
    assert max(span.most_blocks for span in timeline.spans) == max(step[4] for step in steps)


# --- the warm list -------------------------------------------------------------------------------------------------


def body(rows: int) -> GraphKey:
    return GraphKey("body", rows, None)


def head(rows: int) -> GraphKey:
    return GraphKey("head", rows, None)


def test_warm_list_completes_the_commonest_shape_first() -> None:
    shapes = {(body(8), head(8)): 60, (body(16), head(8)): 25, (body(16), head(16)): 10, (body(32),): 5}
    advice = advise(shapes)
    assert [each.key for each in advice] == [head(8), body(8), body(16), head(16), body(32)]
    assert [each.steps for each in advice] == [85, 60, 35, 10, 5]
    assert [each.covered for each in advice] == pytest.approx([0.0, 0.6, 0.85, 0.95, 1.0])


def test_warm_list_of_nothing_is_empty() -> None:
    assert advise({}) == []


@given(
    st.dictionaries(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1, 2, 4])), st.integers(1, 99), min_size=1
    )
)
def test_warm_list_covers_each_step_once_all_its_graphs_are_on_it(counts: dict[tuple[int, int], int]) -> None:
    shapes = {((body(b), head(h)) if h else (body(b),)): steps for (b, h), steps in counts.items()}
    advice = advise(shapes)
    keys = [each.key for each in advice]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {key for shape in shapes for key in shape}
    total = sum(shapes.values())
    for place, each in enumerate(advice, start=1):
        covered = sum(steps for shape, steps in shapes.items() if set(shape) <= set(keys[:place]))
        assert each.covered == pytest.approx(covered / total)
        assert each.steps == sum(steps for shape, steps in shapes.items() if each.key in shape)
    assert advice[-1].covered == pytest.approx(1.0)
