"""Counters, percentiles and the live tally."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.metrics import GRAPH_KEYS, Metrics, StepRecord, Window


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(**changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "kind": "decode",
        "rows": 4,
        "width": 128,
        "real_rows": 3,
        "pad_rows": 1,
        "hit": True,
        "promised": True,
        "seconds": 0.01,
        "decode_tokens": 3,
        "prefill_tokens": 0,
    }
    return StepRecord(**(fields | changes))


PREFILL = {
    "kind": "prefill",
    "rows": 40,
    "width": None,
    "hit": False,
    "promised": False,
    "decode_tokens": 0,
    "prefill_eager": True,
}


def test_percentiles_are_null_when_the_window_is_empty() -> None:
    assert Window().percentiles() == {"p50": None, "p90": None, "p99": None, "count": 0}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_nearest_ranks_when_there_are_samples(values: list[float]) -> None:
    """The definition: the least sample such that at least q % of the samples do not exceed it."""
    window = Window()
    for value in values:
        window.add(value)
    found = window.percentiles()
    for q in (50, 90, 99):
        enough = [v for v in values if sum(other <= v for other in values) * 100 >= q * len(values)]
        assert found[f"p{q}"] == min(enough)
    assert found["count"] == len(values)


def test_old_samples_go_and_the_count_stays_when_a_minute_passes() -> None:
    clock = Clock()
    window = Window(clock)
    window.add(5.0)
    clock.now += 59.0
    window.add(1.0)
    clock.now += 2.0
    assert window.percentiles() == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "count": 2}
    clock.now += 60.0
    assert window.percentiles() == {"p50": None, "p90": None, "p99": None, "count": 2}


def test_every_key_is_present_and_unknowns_are_null_when_nothing_happened() -> None:
    snapshot = Metrics("1.2.3").snapshot()
    assert set(snapshot) == {
        "uptime_seconds", "version", "requests", "tokens", "kv", "graphs", "shapes", "latency"
    }  # fmt: skip
    assert snapshot["version"] == "1.2.3"
    assert snapshot["kv"] == dict.fromkeys(("blocks_total", "blocks_used", "blocks_free", "block_size"))
    assert set(snapshot["graphs"]) == set(GRAPH_KEYS)
    assert snapshot["graphs"]["hit_rate"] is None
    assert all(value == 0 for value in snapshot["requests"].values())
    assert set(snapshot["latency"]) == {"ttft_seconds", "inter_token_seconds", "step_seconds", "queue_seconds"}


def test_hit_rate_counts_only_promised_steps_when_prompts_run_eagerly() -> None:
    metrics = Metrics("0")
    metrics.record_step(step(**PREFILL))
    assert metrics.hit_rate is None
    metrics.record_step(step())
    metrics.record_step(step())
    metrics.record_step(step(hit=False, kind="mixed", prefill_eager=True))
    assert metrics.hit_rate == pytest.approx(2 / 3)
    assert metrics.counters.prefill_eager_steps == 2


def test_free_blocks_follow_the_gauges_when_the_pool_is_known() -> None:
    metrics = Metrics("0")
    metrics.gauges.blocks_total, metrics.gauges.blocks_used = 10, 3
    assert metrics.snapshot()["kv"]["blocks_free"] == 7


def test_steps_event_tells_each_step_once_when_it_is_taken_again_and_again() -> None:
    clock = Clock()
    metrics = Metrics("0", clock)
    assert not metrics.has_untold_steps
    for seconds in (0.01, 0.03):
        metrics.record_step(step(seconds=seconds))
    metrics.record_step(step(hit=False, width=256))
    metrics.record_step(step(**PREFILL))
    clock.now += 2.0
    assert metrics.has_untold_steps
    event = metrics.take_steps_event()
    assert (event["first_step"], event["steps"], event["hits"], event["misses"]) == (0, 4, 2, 1)
    assert event["tokens_per_second"] == pytest.approx(9 / 2.0)
    same, missed, prompt = event["shapes"]
    assert (same["count"], same["real_rows"], same["pad_rows"], same["hit"]) == (2, 6, 2, True)
    assert same["seconds"] == pytest.approx(0.04)
    assert (missed["width"], missed["hit"]) == (256, False)
    assert (prompt["kind"], prompt["width"]) == ("prefill", None)
    assert not metrics.has_untold_steps
    metrics.record_step(step())
    clock.now += 1.0
    event = metrics.take_steps_event()
    assert (event["first_step"], event["steps"]) == (4, 1)
    assert (event["hits"], event["misses"]) == (3, 1), "hits and misses are totals since the start"


def test_steps_event_is_finite_when_no_time_has_passed() -> None:
    metrics = Metrics("0", Clock())
    event = metrics.take_steps_event()
    assert (event["steps"], event["tokens_per_second"], event["shapes"]) == (0, 0.0, [])
