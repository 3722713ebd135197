"""Costs: curves through measured sizes, the file they are kept in, and the fit that makes them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.errors import ConfigError
from nanoserve.simulate.calibrate import scatter_of
from nanoserve.simulate.costs import Costs, Curve, Scatter, Work, costs_by_hand, load_costs, save_costs
from nanoserve.simulate.fit import Sample, Served, fit_costs, fit_host, non_negative_least_squares

CURVE = Curve(((1, 2.0), (4, 5.0), (8, 6.0)))
COSTS = Costs(
    "paged",
    False,
    CURVE,
    Curve(((1, 0.5),)),
    1e-6,
    2e-6,
    host_step=1e-3,
    host_row=1e-5,
    host_request=1e-4,
    host_share=0.1,
    scatter=(Scatter(0.01, (0.5, 1.0, 2.0)), Scatter(0.05, (0.9, 1.1))),
    measured={"model": "m", "threads": 2},
)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 0.0), (1, 2.0), (2, 3.0), (4, 5.0), (6, 5.5), (8, 6.0), (12, 7.0), (16, 8.0)]
)
def test_curve_is_straight_between_its_knots_and_goes_on_beyond_the_last(rows: int, seconds: float) -> None:
    assert CURVE.at(rows) == pytest.approx(seconds)


def test_curve_without_knots_costs_nothing_and_with_one_is_flat() -> None:
    assert Curve().at(7) == 0.0
    assert Curve(((4, 0.5),)).at(1) == Curve(((4, 0.5),)).at(99) == 0.5
    assert Curve(((4, 0.5), (8, 1.0))).at(1) == 0.5


def test_step_is_the_sum_of_its_parts() -> None:
    assert COSTS.compute_seconds(Work(2, 1, 1000, 500)) == pytest.approx(3.0 + 0.5 + 1e-3 + 1e-3)
    assert COSTS.compute_seconds(Work(2, 0, 0, 0)) == pytest.approx(3.0)
    assert COSTS.host_seconds(10, 2) == pytest.approx(1e-3 + 1e-4 + 2e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_costs_by_hand_are_base_and_row_and_context(rows: int) -> None:
    costs = costs_by_hand("3,0.5,0.001", "paged")
    assert costs.compute_seconds(Work(rows, rows, 200, 100)) == pytest.approx((3 + 0.5 * rows + 0.3) / 1e3)
    assert costs.host_seconds(rows, rows) == 0.0


@pytest.mark.parametrize("text", ["", "1", "1,2", "1,2,3,4", "a,b,c", "-1,2,3", "0,0,1", "nan,1,1", "inf,1,1"])
def test_costs_by_hand_are_refused_when_they_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--step-ms .* is not three numbers"):
        costs_by_hand(text, "paged")


# --- the file ------------------------------------------------------------------------------------------------------


def test_costs_come_back_as_they_were_saved(tmp_path: Path) -> None:
    save_costs(tmp_path / "costs.json", COSTS)
    assert load_costs(tmp_path / "costs.json") == COSTS


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"read": "sideways"},
        {"pads_compute": "no"},
        {"body": []},
        {"body": [[1, -1.0]]},
        {"body": [[2, 1.0], [1, 1.0]]},
        {"body": [[1.5, 1.0]]},
        {"body": [[1, "x"]]},
        {"decode_context": -1e-9},
        {"host_step": float("nan")},
        {"host_share": -0.1},
        {"scatter": [1.0, 2.0]},
        {"scatter": [[0.1, [1.0, 0.0]]]},
        {"scatter": [[0.1, []]]},
        {"scatter": [[0.1, [1.0]], [0.1, [1.0]]]},
        {"speed": 3},
    ],
)
def test_cost_file_is_refused_when_it_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "costs.json"
    save_costs(path, COSTS)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match="is no cost file"):
        load_costs(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_cost_file_is_refused_when_it_is_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.json"):
        load_costs(path)


def test_missing_cost_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--calibrate --costs"):
        load_costs(tmp_path / "none.json")


# --- the fit -------------------------------------------------------------------------------------------------------

ROWS = [1, 2, 4, 8, 32, 128]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_fit_finds_the_costs_that_made_the_samples(seed: int) -> None:
    rng = random.Random(seed)
    rising = [rng.uniform(0.001, 0.01) for _ in ROWS]
    body = Curve(tuple((rows, sum(rising[: i + 1])) for i, rows in enumerate(ROWS)))
    head = Curve(tuple((rows, 0.002 + 0.0003 * rows) for rows in ROWS))
    truth = Costs("paged", False, body, head, rng.uniform(0, 1e-5), rng.uniform(0, 1e-5))
    works = [Work(rows, heads, context * rows, 0) for rows in ROWS for heads in (0, rows) for context in (10, 900)]
    works += [Work(rows, 0, 0, rows * start) for rows in ROWS for start in (1, 500)]
    samples = [Sample((work,), truth.compute_seconds(work)) for work in works]
    fit = fit_costs(samples, body_rows=ROWS, head_rows=ROWS)
    assert max(abs(error) for error in fit.errors) < 1e-6
    assert fit.decode_context == pytest.approx(truth.decode_context, abs=1e-10)
    assert fit.chunk_context == pytest.approx(truth.chunk_context, abs=1e-10)
    found = Costs("paged", False, fit.body, fit.head, fit.decode_context, fit.chunk_context)
    unseen = Work(20, 20, 4000, 100)
    assert found.compute_seconds(unseen) == pytest.approx(truth.compute_seconds(unseen), rel=1e-4)


def test_fit_adds_up_a_step_of_two_forwards() -> None:
    samples = [Sample((Work(rows, 0, 0, 0), Work(1, 0, 0, 0)), 0.01 * rows + 0.01) for rows in (1, 2, 4)]
    fit = fit_costs(samples, body_rows=[1, 2, 4], head_rows=[1])
    assert [fit.body.at(rows) for rows in (1, 2, 4)] == pytest.approx([0.01, 0.02, 0.04])


def test_fit_never_makes_more_rows_cost_less() -> None:
    seconds = {1: 0.010, 2: 0.008, 4: 0.012, 8: 0.011}
    samples = [Sample((Work(rows, 0, 0, 0),), value) for rows, value in seconds.items()]
    fit = fit_costs(samples, body_rows=list(seconds), head_rows=[1])
    curve = [fit.body.at(rows) for rows in range(1, 12)]
    assert curve == sorted(curve)
    assert fit.head.at(1) == 0.0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(3, 12), columns=st.integers(1, 5))
def test_least_squares_meets_the_conditions_of_an_optimum(seed: int, rows: int, columns: int) -> None:
    """Karush, Kuhn and Tucker: x >= 0, no descent along any column, and none at all along those that are used."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    solution = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ solution)
    assert (solution >= 0).all()
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient * solution).max() <= 1e-6


def test_what_the_event_loop_adds_is_found_where_it_was_put_in() -> None:
    steps = [(1, 0, 2e-3), (8, 0, 4e-3), (32, 1, 1e-2), (31, 4, 3e-2), (5, 2, 4e-2)]
    served = [Served(n, first, c, 1e-4 + 2e-5 * n + 3e-4 * first + 1.05 * c) for n, first, c in steps]
    costs = fit_host(COSTS, served)
    found = [costs.host_step, costs.host_row, costs.host_request, costs.host_share]
    assert found == pytest.approx([1e-4, 2e-5, 3e-4, 0.05])
    assert costs.host_seconds(31, 4) == pytest.approx(1e-4 + 31 * 2e-5 + 4 * 3e-4)


def test_steps_that_are_faster_beside_the_event_loop_than_alone_add_nothing() -> None:
    costs = fit_host(COSTS, [Served(n, 0, 1e-2, 9e-3) for n in (1, 8, 32)])
    assert costs.host_seconds(32, 4) == costs.host_share == 0.0


def test_forwards_of_a_step_take_longer_by_a_share_while_the_event_loop_serves() -> None:
    works = [Work(4, 1, 100, 0), Work(8, 0, 0, 50)]
    alone = (5.0 + 0.5 + 100 * 1e-6) + (6.0 + 50 * 2e-6)
    assert COSTS.alone_seconds(works) == pytest.approx(alone)
    assert COSTS.served_seconds(10, 2, alone) == pytest.approx(COSTS.host_seconds(10, 2) + 1.1 * alone)


@pytest.mark.parametrize(("chance", "ratio"), [(0.0, 0.5), (0.25, 0.75), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)])
def test_scatter_is_straight_between_its_quantiles(chance: float, ratio: float) -> None:
    assert COSTS.scattered(0.01, chance) == pytest.approx(0.01 * ratio)


def test_steps_scatter_as_those_of_their_length_and_the_longest_as_the_last() -> None:
    assert [COSTS.scattered(seconds, 1.0) for seconds in (0.001, 0.02, 3.0)] == pytest.approx([0.002, 0.022, 3.3])


def test_scatter_of_one_quantile_or_none_is_the_same_for_every_step() -> None:
    one = replace(COSTS, scatter=(Scatter(1.0, (1.25,)),))
    assert {one.scattered(2.0, chance) for chance in (0.0, 0.5, 1.0)} == {2.5}
    assert {replace(COSTS, scatter=()).scattered(2.0, chance) for chance in (0.0, 0.5, 1.0)} == {2.0}


def test_scatter_is_measured_apart_for_steps_of_different_lengths() -> None:
    short = [Served(1, 0, 1e-3, seconds) for seconds in (1e-3, 1e-3, 1e-3, 3e-3)]
    middle = [Served(8, 0, compute, 2 * compute) for compute in (4e-3, 5e-3, 6e-3, 7e-3)]
    long = [Served(32, 0, 1e-2, seconds) for seconds in (9e-3, 1e-2, 1e-2, 1.1e-2)]
    found = scatter_of([long, short, middle])
    assert [each.seconds for each in found] == pytest.approx([1e-3, 1e-2, 1.1e-2])
    ends = [[each.ratios[0], each.ratios[50], each.ratios[-1]] for each in found]
    for found_ratios, wanted in zip(ends, [[1.0, 1.0, 3.0], [0.9, 1.0, 1.1], [1.0, 1.0, 1.0]], strict=True):
        assert found_ratios == pytest.approx(wanted)
