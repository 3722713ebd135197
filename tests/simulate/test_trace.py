"""Traces: synthetic ones follow from their seed, recorded ones from their lines."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.errors import ConfigError
from nanoserve.simulate.trace import Ask, Lengths, Mix, load_trace, save_trace


def mix(requests: int = 1000, prompt: str = "100", output: str = "20", **fields: float) -> Mix:
    return Mix(requests, Lengths.parse(prompt), Lengths.parse(output), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "0",
        "-3",
        "1.5",
        "nan",
        "inf",
        "fixed:3:4",
        "normal:3:4",
        "uniform:5",
        "uniform:9:3",
        "uniform:0:3",
        "uniform:1:9999999999",
        "lognormal:10",
        "lognormal:10:-1",
        "lognormal:10:1:5",
        "lognormal:9:inf",
    ],
)
def test_distribution_is_refused_when_it_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Lengths.parse(text)


def test_lengths_have_their_distribution() -> None:
    rng = random.Random(1)
    assert {Lengths.parse("7").draw(rng) for _ in range(9)} == {7}
    uniform = [Lengths.parse("uniform:3:5").draw(rng) for _ in range(400)]
    assert set(uniform) == {3, 4, 5}
    drawn = [Lengths.parse("lognormal:100:0.8:1000").draw(rng) for _ in range(4000)]
    assert 90 < median(drawn) < 110
    assert 120 < mean(drawn) < 155, "exp(mu + sigma^2 / 2) = 138, a little less where the tail is cut off"
    assert max(drawn) == 1000
    assert min(drawn) >= 1


def test_poisson_arrivals_have_their_rate_and_exponential_gaps() -> None:
    asks = mix(4000).poisson(5.0).asks
    times = [ask.arrival_seconds for ask in asks]
    assert times == sorted(times)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_same_seed_makes_the_same_requests_and_another_does_not() -> None:
    shape = {"prompt": "uniform:1:500", "output": "lognormal:50:1"}
    assert mix(**shape, seed=3).poisson(2.0).asks == mix(**shape, seed=3).poisson(2.0).asks  # type: ignore[arg-type]
    assert mix(**shape, seed=3).asks() != mix(**shape, seed=4).asks()  # type: ignore[arg-type]


def test_rate_and_streams_do_not_change_what_is_asked_for() -> None:
    def sizes(asks: list[Ask]) -> list[tuple[int, int]]:
        return [(ask.prompt_tokens, ask.output_tokens) for ask in asks]

    one = mix(50, prompt="uniform:1:500")
    assert sizes(list(one.poisson(2.0).asks)) == sizes(list(one.poisson(9.0).asks)) == sizes(list(one.closed(4).asks))


def test_prefix_is_shared_by_its_share_of_the_requests() -> None:
    asks = mix(2000, prefix_tokens=64, prefix_share=0.25).asks()
    sharing = [ask for ask in asks if ask.prefix_id is not None]
    assert len(sharing) == pytest.approx(500, abs=80)
    assert {(ask.prompt_tokens, ask.prefix_tokens) for ask in sharing} == {(164, 64)}
    assert {ask.prompt_tokens for ask in asks if ask.prefix_id is None} == {100}


@given(streams=st.integers(1, 9), requests=st.integers(1, 40))
def test_closed_loop_brings_every_request_once_in_its_streams_order(streams: int, requests: int) -> None:
    load = mix(requests).closed(streams)
    seen: list[int] = []
    for _, index in load.opening():
        following: tuple[float, int] | None = (0.0, index)
        while following is not None:
            seen.append(following[1])
            following = load.after(following[1], 1.0)
    assert sorted(seen) == list(range(requests))
    assert len(load.opening()) == min(streams, requests)


def test_trace_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    load = mix(30, prompt="uniform:1:500", prefix_tokens=5, prefix_share=0.5).poisson(3.0)
    asks = [replace(ask, priority=index % 3 - 1) for index, ask in enumerate(load.asks)]
    save_trace(tmp_path / "trace.jsonl", asks)
    assert load_trace(tmp_path / "trace.jsonl").asks == asks


def test_recorded_requests_are_put_in_order_and_other_keys_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    late = {"arrival_seconds": 2, "prompt_tokens": 3, "output_tokens": 4, "client": "x", "priority": -2}
    early = {"arrival_seconds": 0.5, "prompt_tokens": 5, "output_tokens": 6, "prefix_id": 7, "prefix_tokens": 5}
    path.write_text(f"{json.dumps(late)}\n\n{json.dumps(early)}\n")
    assert load_trace(path).asks == [Ask(0.5, 5, 6, "7", 5), Ask(2.0, 3, 4, priority=-2)]


GOOD = {"arrival_seconds": 0, "prompt_tokens": 3, "output_tokens": 4}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is no request"),
        ("[]", "is no request"),
        (json.dumps({"arrival_seconds": 0, "prompt_tokens": 3}), "output_tokens is missing"),
        (json.dumps(GOOD | {"arrival_seconds": -1}), "arrival_seconds is -1"),
        (json.dumps(GOOD | {"arrival_seconds": True}), "arrival_seconds is True"),
        (json.dumps(GOOD | {"arrival_seconds": "now"}), "arrival_seconds is 'now'"),
        ('{"arrival_seconds": NaN, "prompt_tokens": 3, "output_tokens": 4}', "arrival_seconds is nan"),
        (json.dumps(GOOD | {"prompt_tokens": 0}), "prompt_tokens is 0"),
        (json.dumps(GOOD | {"output_tokens": 2.0}), "output_tokens is 2.0"),
        (json.dumps(GOOD | {"priority": 0.5}), "priority is 0.5"),
        (json.dumps(GOOD | {"priority": True}), "priority is True"),
        (json.dumps(GOOD | {"prefix_id": "a"}), "prefix_tokens is missing"),
        (json.dumps(GOOD | {"prefix_id": "a", "prefix_tokens": 4}), "more than the 3 prompt_tokens"),
    ],
)
def test_trace_is_refused_with_the_line_when_it_is_wrong(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(ConfigError, match=r"line 2 is no request") as caught:
        load_trace(path)
    assert said in str(caught.value)


def test_trace_is_refused_when_it_is_empty_or_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no requests"):
        load_trace(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path / "none")
