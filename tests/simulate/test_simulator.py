"""The simulated serving loop: nothing lost, nothing twice, no time backwards, and the real engine's own plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.errors import ConfigError
from nanoserve.sequence import StepPlan
from nanoserve.simulate.costs import Costs, Curve, Scatter, costs_by_hand
from nanoserve.simulate.forms import Former, PagedFormer, RectangleFormer
from nanoserve.simulate.report import Run
from nanoserve.simulate.result import Result
from nanoserve.simulate.simulator import Sizes, experienced, simulate
from nanoserve.simulate.trace import Ask, ClosedLoop, Lengths, Load, Mix, OpenLoop
from nanoserve.step import StepOutcome
from tests.models.tiny import token_ids
from tests.tiny_engine import BLOCK, TinyEngine, params_of
from tests.tiny_engine import Ask as EngineAsk
from tests.tiny_folder import write_served_model

COSTS = costs_by_hand("3,0.5,0.001", "paged")
HOST = replace(
    COSTS,
    host_step=0.001,
    host_row=0.0001,
    host_request=0.0002,
    host_share=0.05,
    scatter=(Scatter(0.005, (0.8, 1.0, 1.1, 3.0)), Scatter(1.0, (0.9, 1.1))),
)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    asks = [
        Ask(arrival, prompt, output, "p" if prefix else None, min(prefix, prompt), priority)
        for arrival, prompt, output, prefix, priority in draw(
            st.lists(
                st.tuples(
                    st.floats(0, 2),
                    st.integers(1, 60),
                    st.integers(1, 20),
                    st.sampled_from([0, 0, 9, 17]),
                    st.sampled_from([0, 0, 0, -1, 1]),
                ),
                min_size=1,
                max_size=25,
            )
        )
    ]
    if draw(st.booleans()):
        return ClosedLoop(asks, draw(st.integers(1, 6)))
    return OpenLoop(sorted(asks, key=lambda ask: ask.arrival_seconds), "hypothesis")


@st.composite
def deployments(draw: st.DrawFn) -> Sizes:
    """The pool holds one request of the longest kind, and from there to several."""
    sequences = draw(st.integers(1, 6))
    return Sizes(
        max_sequences=sequences,
        kv_blocks=draw(st.one_of(st.none(), st.integers(20, 60))),
        max_step_rows=sequences + draw(st.sampled_from([0, 1, 7, 32, 64])),
        prefill_gap_seconds=draw(st.sampled_from([0.0, 0.05])),
        prefix_cache=draw(st.booleans()),
        block_size=4,
    )


@settings(max_examples=60, deadline=None)
@given(load=loads(), sizes=deployments(), read=st.sampled_from(["paged", "rectangle"]))
def test_every_request_ends_once_and_every_token_is_told_once(load: Load, sizes: Sizes, read: Any) -> None:
    result = simulate(sizes, replace(HOST, read=read), load)
    assert sorted(result.finished) == list(range(len(load.asks)))
    assert result.output_tokens == sum(ask.output_tokens for ask in load.asks)
    assert len(result.ttfts) == len(load.asks)
    assert len(result.gaps) == sum(ask.output_tokens - 1 for ask in load.asks)
    assert result.prompt_tokens == sum(ask.prompt_tokens for ask in load.asks)
    first = result.prefilled_tokens - result.recomputed_tokens
    if not result.preemptions:
        assert result.recomputed_tokens == 0
        assert first == result.prompt_tokens - result.cached_tokens
    # A sequence that comes back computes its newest token for the first time, and finds what others did meanwhile.
    assert first <= result.prompt_tokens - result.cached_tokens + result.preemptions
    if not sizes.prefix_cache:
        assert first >= result.prompt_tokens
        assert result.cached_tokens == 0
    assert result.most_blocks <= result.blocks
    assert result.refused == result.never_fit == 0


@settings(max_examples=40, deadline=None)
@given(load=loads(), sizes=deployments())
def test_time_never_runs_backwards(load: Load, sizes: Sizes) -> None:
    times: list[float] = []
    result = simulate(sizes, HOST, load, observe=lambda now, plan: times.append(now))
    assert all(before < after for before, after in pairwise(times))
    assert len(times) == result.steps
    assert min(result.ttfts) > 0
    assert result.busy_seconds <= result.ended - result.started + 1e-9
    least = result.gaps.percentiles()
    assert least["p50"] is None or least["p50"] > 0
    assert result.seconds >= result.busy_seconds * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(load=loads(), sizes=deployments())
def test_same_load_gives_the_same_run(load: Load, sizes: Sizes) -> None:
    def run() -> tuple[list[Any], dict[str, Any]]:
        plans: list[Any] = []
        result = simulate(sizes, HOST, load, observe=lambda now, plan: plans.append((now, edits(plan))))
        return plans, Run(sizes, "x", result).record()

    assert run() == run()


@settings(max_examples=40, deadline=None)
@given(streams=st.integers(1, 7), requests=st.integers(1, 30), sizes=deployments())
def test_closed_loop_never_has_more_requests_than_streams(streams: int, requests: int, sizes: Sizes) -> None:
    load = Mix(requests, Lengths.parse("uniform:1:40"), Lengths.parse("uniform:1:20")).closed(streams)
    most = 0

    def count(now: float, plan: StepPlan) -> None:
        nonlocal most
        most = max(most, len({*plan.decode_sequences, *plan.chunk_sequences}))

    result = simulate(sizes, HOST, load, observe=count)
    assert most <= min(streams, sizes.max_sequences)
    for span in result.timeline.spans:
        together = (span.running_seconds + span.waiting_seconds) / result.timeline.span_seconds
        assert together <= streams * (1 + 1e-9)


# --- times, by hand ------------------------------------------------------------------------------------------------


def test_times_of_one_request_are_those_of_its_steps() -> None:
    """A prefill of 10 rows, then two decode steps at contexts 11 and 12; a token is told when the next step is under
    way, the last one at once."""
    result = simulate(Sizes(), replace(HOST, scatter=()), OpenLoop([Ask(5.0, 10, 3)], "one"))
    host, request = 0.0011, 0.0002
    prefill = 1.05 * (3 + 10 * 0.5 + 0.001 * 55) / 1e3 + request
    first, second = (1.05 * (3 + 0.5 + 0.001 * context) / 1e3 for context in (11, 12))
    assert list(result.ttfts) == pytest.approx([host + prefill + host])
    gaps = result.gaps.percentiles()
    assert gaps["max"] == pytest.approx(first + host)
    assert gaps["p50"] == pytest.approx(second)
    assert result.started == 5.0
    assert result.seconds == pytest.approx(3 * host + prefill + first + second)
    assert result.busy_seconds == pytest.approx(result.seconds)


def test_a_step_takes_as_long_as_the_scatter_has_it() -> None:
    load = OpenLoop([Ask(0.0, 10, 3)], "one")
    plain, slow = (simulate(Sizes(), replace(HOST, scatter=scatter), load) for scatter in ((), (Scatter(1.0, (1.5,)),)))
    assert slow.busy_seconds == pytest.approx(1.5 * plain.busy_seconds)


def test_next_request_of_a_stream_misses_the_step_planned_before_its_last_token_was_told() -> None:
    """Two streams, the second in the middle of an answer when the first one's ends: one step runs in between."""
    plans: list[tuple[int, int]] = []
    load = ClosedLoop([Ask(0, 4, 2), Ask(0, 4, 9), Ask(0, 4, 2)], 2)
    simulate(Sizes(), COSTS, load, observe=lambda now, plan: plans.append((len(plan.decode), len(plan.chunks))))
    assert plans[:5] == [(0, 2), (2, 0), (1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize(("arrival", "served"), [(0.0134, 0.015), (0.0136, 0.020)])
def test_request_that_comes_once_the_next_step_is_planned_waits_one_step_more(arrival: float, served: float) -> None:
    """Steps of 5 ms. The second one that decodes (10 to 15 ms) is planned as soon as the first begins, the third at
    13.5 ms."""
    costs = Costs("paged", False, Curve(((1, 0.005),)), Curve(), 0.0, 0.0)
    load = OpenLoop([Ask(0.0, 4, 9), Ask(arrival, 4, 1)], "two")
    plans: list[tuple[float, int]] = []

    def note(now: float, plan: StepPlan) -> None:
        plans.append((now, len(plan.chunks)))

    result = simulate(Sizes(), costs, load, observe=note)
    assert [now for now, _ in plans][:3] == pytest.approx([0.0, 0.005, 0.005])
    assert [now for now, chunks in plans if chunks] == pytest.approx([0.0, served])
    assert result.ttfts[1] == pytest.approx(served + 0.005 - arrival)
    assert result.busy_seconds == pytest.approx(result.seconds), "no step waits for another's end to be noticed"
    plans.clear()
    simulate(Sizes(), replace(costs, pads_compute=True), load, observe=note)
    assert [now for now, chunks in plans if chunks] == pytest.approx([0.0, 0.015]), "others are not planned ahead"


def test_idle_engine_starts_when_the_next_request_arrives() -> None:
    result = simulate(Sizes(), COSTS, OpenLoop([Ask(1.0, 4, 1), Ask(9.0, 4, 1)], "two"))
    assert result.ttfts[0] == pytest.approx(result.ttfts[1])
    assert result.seconds == pytest.approx(8.0 + result.ttfts[0])
    assert result.busy_seconds == pytest.approx(2 * result.ttfts[0])


# --- what is turned away -------------------------------------------------------------------------------------------


def test_requests_are_refused_when_the_queue_is_full_and_the_rest_are_served() -> None:
    load = OpenLoop([Ask(0.0, 4, 4)] * 10, "burst")
    result = simulate(Sizes(max_sequences=1, max_queued=3), COSTS, load)
    assert (len(result.finished), result.refused) == (4, 6), "one that a row is free for, and three that wait"
    result = simulate(Sizes(max_sequences=1, max_queued_tokens=9), COSTS, load)
    assert (len(result.finished), result.refused) == (2, 8)


def test_request_that_comes_during_a_step_finds_the_rows_of_those_that_end_with_it_taken() -> None:
    """Steps of 5 and 3.5 ms: the second request waits when the third comes, 1 ms before the first one ends."""
    asks = [Ask(0.0, 4, 2), Ask(0.0075, 4, 2), Ask(0.0076, 4, 2)]
    result = simulate(Sizes(max_sequences=1, max_queued=1), COSTS, OpenLoop(asks, "three"))
    assert (result.finished, result.refused) == ([0, 1], 1)
    result = simulate(Sizes(max_sequences=1, max_queued=1), COSTS, OpenLoop([*asks[:2], Ask(0.01, 4, 2)], "three"))
    assert (result.finished, result.refused) == ([0, 1, 2], 0)


# --- policy --------------------------------------------------------------------------------------------------------


def test_urgent_request_passes_those_that_wait() -> None:
    load = OpenLoop([Ask(0.0, 4, 4), Ask(0.001, 4, 4), Ask(0.002, 4, 4, priority=-1)], "three")
    assert simulate(Sizes(max_sequences=1), COSTS, load).finished == [0, 2, 1]


def test_prompt_takes_no_more_rows_than_the_gap_has_time_for() -> None:
    """Rows of 1 ms and nothing else, one stream decoding, 5 ms to spend and four fifths of them aimed at: once it is
    known what a row costs beside others, four of a prompt in a step."""
    costs = costs_by_hand("0,1,0", "paged")
    load = OpenLoop([Ask(0.0, 8, 40), Ask(0.02, 100, 1)], "two")
    chunks: list[int] = []

    def note(now: float, plan: StepPlan) -> None:
        if plan.decode and plan.chunks:
            chunks.append(plan.prefill_tokens)

    gap = simulate(Sizes(prefill_gap_seconds=0.005), costs, load, observe=note).gaps.percentiles()["max"]
    bounded, chunks = chunks, []
    simulate(Sizes(prefill_gap_seconds=1.0), costs, load, observe=note)
    assert chunks == [100]
    assert set(bounded[9:-1]) == {4}
    assert sum(bounded) == 100
    assert gap == pytest.approx(0.001 * (1 + max(bounded)))
    assert max(bounded) == 7


def test_requests_that_never_fit_are_counted_and_a_stream_goes_on_without_them() -> None:
    load = ClosedLoop([Ask(0.0, 10, 4), Ask(0.0, 100, 4), Ask(0.0, 10, 4)], 1)
    result = simulate(Sizes(kv_blocks=2, max_sequences=1), COSTS, load)
    assert (result.never_fit, result.finished) == (1, [0, 2])
    with pytest.raises(ConfigError, match="the shortest request has 104 tokens; 32 fit"):
        simulate(Sizes(kv_blocks=2), COSTS, OpenLoop([Ask(0.0, 100, 4)], "one"))


# --- the real engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("tiny"))


def edits(plan: StepPlan) -> tuple[Any, ...]:
    """Everything of a plan but which tokens its chunks hold."""
    chunks = [(c.table_row, c.start, len(c.token_ids), c.write_slots, c.last) for c in plan.chunks]
    return (plan.clears, plan.swaps, plan.slot_writes, plan.decode, tuple(chunks))


@pytest.mark.parametrize(("read", "kernels"), [("paged", "reference"), ("rectangle", "reference"), ("paged", "native")])
def test_plans_and_shapes_are_the_real_engines_when_requests_arrive_at_the_same_steps(
    folder: Path, read: Any, kernels: str
) -> None:
    """Fourteen requests of three priorities, some of which begin alike, over four rows, in a pool that makes them give
    way and with a gap that bounds their prompts: step by step the same plans, ahead or not, where steps take as long;
    and the bucket and pad rows that the simulation counts are those the device had."""
    mix = Mix(14, Lengths.parse("uniform:1:40"), Lengths.parse("uniform:1:30"), 20, 0.6, seed=1)
    asks = [replace(ask, priority=index % 3 - 1) for index, ask in enumerate(mix.poisson(60.0).asks)]
    fields: dict[str, Any] = {"max_sequences": 4, "max_step_rows": 28, "width_multiple": 32, "max_model_len": 96}
    fields["prefill_gap_seconds"] = 0.001
    sizes = Sizes(kv_blocks=9, block_size=BLOCK, **fields)
    planned: list[tuple[float, Any]] = []
    costs = Costs(read, kernels != "native", Curve(((1, 0.003), (2, 0.0035))), Curve(), 1e-7, 1e-7)
    load = OpenLoop(asks, "poisson")
    result = simulate(sizes, costs, load, observe=lambda now, plan: planned.append((now, edits(plan))))
    assert result.preemptions > 0
    assert result.cached_tokens > 0
    assert result.steps > simulate(replace(sizes, prefill_gap_seconds=1.0), costs, load).steps, "the gap bound nothing"
    # Natively K/V is bf16, so the same memory is twice the blocks, the sink's included.
    blocks = 4 if kernels == "native" else 9
    engine = TinyEngine(folder, blocks=blocks, attention_read=read, kernels=kernels, **fields)
    experienced(engine.engine.scheduler.budget, costs)
    former = _former(read, pads_compute=costs.pads_compute)
    waiting, tallied, ran_ahead = list(asks), Result(9, BLOCK), 0
    running: tuple[StepPlan, StepOutcome] | None = None

    def launch(plan: StepPlan | None) -> tuple[StepPlan, StepOutcome]:
        assert plan is not None
        form = former.form(plan)
        outcome = engine.engine.launch(plan)
        if outcome.shape is not None:
            assert (form.rows, form.rows - form.real_rows) == (outcome.shape.rows, outcome.pad_rows)
            assert form.keys[0][1:] == (outcome.shape.rows, outcome.shape.width)
        tallied.add_step("decode", form.keys, form.rows, form.real_rows, 0.0)
        return plan, replace(outcome, seconds=sum(costs.compute_seconds(work) for work in form.works))

    for now, expected in planned:
        while waiting and waiting[0].arrival_seconds <= now:
            ask = waiting.pop(0)
            shared = token_ids(ask.prefix_tokens, vocab_size=256, seed=99)
            ids = (*shared, *token_ids(ask.prompt_tokens - ask.prefix_tokens, vocab_size=256, seed=len(waiting)))
            params = params_of(max_tokens=ask.output_tokens, logprobs=None)
            engine.add(EngineAsk(ids, params, priority=ask.priority))
        ahead = engine.engine.plan_ahead() if running is not None else None
        following = launch(ahead) if ahead is not None else None
        ran_ahead += ahead is not None
        if running is not None:
            engine.engine.commit(*running)
        running = following or launch(engine.engine.plan())
        assert edits(running[0]) == expected
    assert running is not None
    engine.engine.commit(*running)
    assert engine.engine.plan() is None
    assert (ran_ahead > 0) == (kernels == "native")
    assert tallied.shapes == result.shapes
    assert engine.engine.scheduler.preemptions == result.preemptions
    assert engine.metrics.counters.prefix_cached_tokens == result.cached_tokens


def _former(read: str, *, pads_compute: bool) -> Former:
    if read == "paged":
        return PagedFormer(max_sequences=4, max_step_rows=28, pads_compute=pads_compute)
    return RectangleFormer(max_sequences=4, max_model_len=96, width_multiple=32)
