"""The runner on the eager backend: what is recorded when, what is replayed, and that neither shows in the tokens."""

from __future__ import annotations

import re

import pytest
import torch

from nanoserve.buckets import DecodeShape
from nanoserve.engine import Engine
from nanoserve.errors import GateError
from nanoserve.request import SamplingParams
from nanoserve.runner import StepOutcome
from nanoserve.sequence import Sequence, StepPlan
from nanoserve.warmup import (
    CostModel,
    check_no_cold_captures,
    check_warm_graphs_unbound,
    lazy_captures,
    warm_shapes,
)
from tests.tiny_engines import BLOCK, GREEDY, SlowBackend, Tiny, Traffic, prompts, tiny_engine, traffic

FREE = CostModel(0.0, 0.0)
MULTIPLE = 32


def document_engine(generated: int) -> Tiny:
    """Two rows off a 16-token prompt, as in the source document's benchmark."""
    return tiny_engine(max_sequences=2, max_model_len=16 + generated, block_size=16, width_multiple=MULTIPLE)


def document_run(tiny: Tiny, generated: int) -> list[Sequence]:
    sequences = prompts(2, 16, max_tokens=generated, block_size=16)
    tiny.run(sequences)
    assert [sequence.generated for sequence in sequences] == [generated, generated]
    return sequences


# --- what the source document measured -------------------------------------------------------------------------------


@pytest.mark.parametrize(("generated", "captures", "listed"), [(8, 1, 2), (32, 2, 4), (64, 3, 6), (128, 5, 10)])
def test_client_meets_the_predicted_recordings_when_cold_and_none_when_warmed(
    generated: int, captures: int, listed: int
) -> None:
    cold, warm = document_engine(generated), document_engine(generated)
    cold_sequences = document_run(cold, generated)
    assert warm.ready().report.graphs == listed
    warm_sequences = document_run(warm, generated)
    predicted = lazy_captures(steps=generated, start_width=16, width_multiple=MULTIPLE)
    assert cold.graphs()["cold_captures"] == predicted == captures
    assert warm.graphs()["cold_captures"] == 0
    assert warm.graphs()["hit_rate"] == 1.0
    assert [s.tokens for s in warm_sequences] == [s.tokens for s in cold_sequences]


def test_stall_recurs_at_every_width_when_nothing_was_warmed() -> None:
    """Each miss is the first step of a width: one every `width_multiple` tokens, for as long as a request generates."""
    tiny = document_engine(128)
    misses: list[DecodeShape] = []

    def watch(plan: StepPlan, outcome: StepOutcome) -> None:
        if outcome.shape is not None and not outcome.hit:
            assert max(row.position for row in plan.decode) % MULTIPLE in (0, 16)
            misses.append(outcome.shape)

    tiny.run(prompts(2, 16, max_tokens=128, block_size=16), after=watch)
    assert misses == [DecodeShape(2, width) for width in (32, 64, 96, 128, 160)]


# --- the same tokens, however they were computed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"capture_decode": False},
        {"capture_decode": False, "persist_inputs": False},
        {"capture_decode": False, "bucket_decode": False},
        {"capture_decode": False, "bucket_decode": False, "persist_inputs": False},
    ],
    ids=["lazy", "eager", "new inputs", "own shapes", "plain loop"],
)
def test_warmed_tokens_are_the_same_when_graphs_buckets_or_buffers_are_off(fields: dict[str, bool]) -> None:
    warm, other = tiny_engine(layers=3), tiny_engine(layers=3, **fields)
    warm.ready()
    answers = []
    for tiny in (warm, other):
        sequences = [*prompts(3, 7, max_tokens=20), *prompts(4, 18, max_tokens=11, seed=5, request_id="s")]
        tiny.run(sequences)
        answers.append([sequence.tokens for sequence in sequences])
    assert answers[0] == answers[1]
    assert warm.graphs()["hit_rate"] == 1.0
    if not fields.get("capture_decode", True):
        assert other.graphs()["hit_rate"] is None
        assert other.graphs()["eager_steps"] > 0


TRAFFIC = {"max_sequences": 6, "blocks": 26}
REQUESTS, SEED = 2000, 20260909


@pytest.fixture(scope="module")
def eager() -> Traffic:
    """The randomised run without any graph. Batches have the same shapes, so its numbers are the same to the bit."""
    return traffic(tiny_engine(**TRAFFIC, capture_decode=False), requests=REQUESTS, seed=SEED)


def test_randomised_run_meets_every_way_to_come_and_go(eager: Traffic) -> None:
    """What the two tests below would otherwise not show."""
    shapes = tiny_engine(**TRAFFIC).engine.runner.shapes
    assert shapes is not None
    assert eager.shapes == set(shapes.shapes())
    assert len(eager.shapes) == 16
    assert len(eager.answers) == REQUESTS
    assert eager.aborted > 30
    assert {reason for _, reason in eager.answers.values()} == {"stop", "length", "cancelled"}


def test_nothing_is_cold_over_2000_requests_when_all_was_warmed(eager: Traffic) -> None:
    tiny = tiny_engine(**TRAFFIC)
    tiny.ready()
    run = traffic(tiny, requests=REQUESTS, seed=SEED)
    graphs, counters = tiny.graphs(), tiny.metrics.counters
    assert run.answers == eager.answers
    assert (graphs["cold_captures"], graphs["background_captures"], graphs["hit_rate"]) == (0, 0, 1.0)
    assert (counters.hits, counters.misses) == (run.decode_steps, 0)
    assert graphs["replays"] == run.decode_steps
    assert graphs["captured"] == graphs["warmed"] == 16
    assert counters.preempted > 10


def test_every_recording_is_counted_over_2000_requests_when_nothing_was_warmed(eager: Traffic) -> None:
    tiny = tiny_engine(**TRAFFIC, warmup_seconds=0)
    readiness = tiny.ready()
    assert readiness.report.graphs == 0
    assert len(tiny.engine.background) == 16

    def idle(engine: Engine) -> None:
        if engine.background:
            engine.capture_in_background()

    run = traffic(tiny, requests=REQUESTS, seed=SEED, idle=idle)
    graphs, counters = tiny.graphs(), tiny.metrics.counters
    assert run.answers == eager.answers
    assert graphs["warmed"] == 0
    assert graphs["cold_captures"] > 0
    assert graphs["background_captures"] > 0
    assert graphs["cold_captures"] + graphs["background_captures"] == graphs["captured"] == 16
    assert counters.misses == graphs["cold_captures"]
    assert counters.hits + counters.misses == run.decode_steps == graphs["replays"]
    assert tiny.engine.runner.graphs is not None
    check_warm_graphs_unbound(tiny.engine.runner.graphs)


# --- batch sizes -----------------------------------------------------------------------------------------------------


def test_every_batch_size_up_to_40_has_a_covering_shape_when_all_was_warmed() -> None:
    for most in range(1, 41):
        shapes = tiny_engine(max_sequences=most).engine.runner.shapes
        assert shapes is not None
        warm = warm_shapes(shapes)
        for rows in range(1, most + 1):
            for width in (1, 16, 17, 64):
                assert shapes.shape_for(rows, width) in warm
        with pytest.raises(IndexError):
            shapes.shape_for(most + 1, 16)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 12])
def test_identical_prompts_get_identical_answers_when_any_number_runs_at_once(most: int) -> None:
    """Up to one more than fit, which waits: rows equal each other and the eager run, and every step hits a graph."""
    warm = tiny_engine(max_sequences=most)
    warm.ready()
    eager = tiny_engine(max_sequences=most, capture_decode=False, bucket_decode=False)
    alone = prompts(1, 9, max_tokens=10)
    eager.run(alone)
    decode_steps = 0

    def count(plan: StepPlan, outcome: StepOutcome) -> None:
        nonlocal decode_steps
        decode_steps += outcome.shape is not None
        assert len(plan.decode) <= most

    for together in (*range(1, most + 1), most + 1):
        same = [sequence for _ in range(together) for sequence in prompts(1, 9, max_tokens=10)]
        warm.run(same, after=count)
        assert {tuple(sequence.output_ids) for sequence in same} == {tuple(alone[0].output_ids)}
    assert warm.graphs()["cold_captures"] == 0
    assert warm.metrics.counters.hits + warm.metrics.counters.misses == decode_steps
    assert warm.metrics.counters.misses == 0


def test_step_is_a_miss_and_then_a_hit_when_its_shape_was_trimmed() -> None:
    tiny = tiny_engine(warm_rows=1, self_test_seconds=0)
    readiness = tiny.ready()
    outcomes: list[StepOutcome] = []
    tiny.run(prompts(2, 5, max_tokens=4), after=lambda plan, outcome: outcomes.append(outcome))
    decoded = [outcome for outcome in outcomes if outcome.shape is not None]
    assert [outcome.shape for outcome in decoded] == [DecodeShape(2, 16)] * 3
    assert [outcome.hit for outcome in decoded] == [False, True, True]
    assert all(outcome.replayed for outcome in decoded)
    assert tiny.graphs()["cold_captures"] == 1
    assert tiny.graphs()["hit_rate"] == pytest.approx(2 / 3)
    assert DecodeShape(2, 16) not in tiny.engine.uncovered()
    assert DecodeShape(2, 16) in readiness.plan.trimmed
    with pytest.raises(GateError, match="1 graphs were recorded after ready"):
        check_no_cold_captures(tiny.engine.runner.graphs)  # type: ignore[arg-type]


def test_miss_is_a_failure_when_shapes_are_strict() -> None:
    tiny = tiny_engine(strict_shapes=True)
    tiny.engine.warm_decode([DecodeShape(1, 16)], cost=FREE)
    tiny.run(prompts(1, 5, max_tokens=4))
    with pytest.raises(
        GateError, match=re.escape("no graph is recorded for GraphKey(kind='decode', rows=2, width=16)")
    ):
        tiny.run(prompts(2, 5, max_tokens=4))
    assert tiny.graphs()["captured"] == 1


# --- padding and memory nobody wrote ---------------------------------------------------------------------------------


def fill_pool(tiny: Tiny, live: int) -> list[Sequence]:
    """`live` decoding sequences that between them own every block, the first and the last included."""
    blocks = tiny.engine.runner.cache.num_slots // BLOCK
    lengths = [blocks // live] * (live - 1) + [blocks - blocks // live * (live - 1)]
    sequences = []
    for index, length in enumerate(lengths):
        sequences += prompts(1, length * BLOCK - 2, max_tokens=9, seed=index)
        tiny.engine.add(sequences[-1])
    while any(sequence.generated == 0 for sequence in sequences):
        tiny.engine.step()
    owned = {block for sequence in sequences for block in sequence.table.blocks}
    assert owned == set(range(blocks))
    return sequences


@pytest.mark.parametrize("live", [3, 5, 6, 7])
def test_padded_step_changes_only_the_slots_it_may_when_the_pool_is_full(live: int) -> None:
    """Padding that wrote to slot -1, to 0, or to the pool's last one would destroy what a live sequence owns."""
    tiny = tiny_engine(max_sequences=8, blocks=24, layers=2)
    tiny.ready()
    sequences = fill_pool(tiny, live)
    cache = tiny.engine.runner.cache
    before = [side.clone() for layer in range(2) for side in cache.snapshot(layer)]
    plan = tiny.engine.plan()
    assert plan is not None
    assert len(plan.decode) == live
    outcome = tiny.engine.launch(plan)
    assert outcome.shape is not None
    assert outcome.pad_rows == outcome.shape.rows - live == 8 - live if live > 4 else 4 - live
    own = {row.write_slot for row in plan.decode}
    for kept, now in zip(before, [side for layer in range(2) for side in cache.snapshot(layer)], strict=True):
        changed = set(torch.nonzero((kept != now).flatten(1).any(1)).flatten().tolist())
        assert changed - {cache.sink_slot} == own
    tiny.engine.commit(plan, outcome)
    assert [sequence.generated for sequence in sequences] == [2] * live


@torch.inference_mode()
def poison(tiny: Tiny) -> int:
    """Write NaN into every slot that holds no live token, the sink block included; how many those are."""
    cache, live = tiny.engine.runner.cache, tiny.engine.scheduler.live()
    used = {slot for sequence in live for slot in sequence.table.slots(0, sequence.computed)}
    free = [slot for slot in range(cache.num_slots + BLOCK) if slot not in used]
    for layer in range(cache.num_layers):
        nan = torch.full_like(cache.read(layer, free)[0], float("nan"))
        cache.write(layer, torch.tensor(free), nan, nan)
        assert cache.read(layer, free)[1].isnan().all()
    return len(free)


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_live_rows_are_unchanged_when_all_free_and_pad_memory_is_nan(together: int) -> None:
    """A pool of 16 blocks, last blocks partly filled; then the blocks are freed and used again."""
    clean = tiny_engine(blocks=16, layers=2, max_model_len=32)
    dirty = tiny_engine(blocks=16, layers=2, max_model_len=32)
    clean.ready()
    dirty.ready()
    for seed in (1, 2):
        answers = []
        for tiny in (clean, dirty):
            sequences = [
                s for i in range(together) for s in prompts(1, 3 + 2 * i, max_tokens=7 + i, seed=seed * 10 + i)
            ]
            for sequence in sequences:
                tiny.engine.add(sequence)
            while tiny.engine.scheduler.has_work:
                if tiny is dirty:
                    assert poison(tiny) >= BLOCK
                tiny.engine.step()
            answers.append([sequence.output_ids for sequence in sequences])
        assert answers[0] == answers[1]
    assert dirty.graphs()["cold_captures"] == 0


def test_logits_are_the_same_to_the_bit_when_all_free_and_pad_memory_is_nan() -> None:
    tiny = tiny_engine(layers=2)
    tiny.ready()
    runner, slots = tiny.engine.runner, list(range(8, 14))
    runner.probe_prefill([5, 6, 7, 8, 9], slots[:5])
    clean = [runner.probe_decode(DecodeShape(rows, width), slots) for rows in (1, 2, 4) for width in (16, 64)]
    cache = runner.cache
    kept = [cache.read(layer, slots) for layer in range(2)]
    with torch.inference_mode():
        cache.poison(float("nan"))
        for layer, (k, v) in enumerate(kept):
            cache.write(layer, torch.tensor(slots), k, v)
    dirty = [runner.probe_decode(DecodeShape(rows, width), slots) for rows in (1, 2, 4) for width in (16, 64)]
    for one, other in zip(clean, dirty, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_recording_is_refused_when_the_slot_table_has_moved() -> None:
    tiny = tiny_engine()
    recorded = tiny.engine.runner.slots.address
    tiny.engine.runner.slots.to("meta")
    with pytest.raises(GateError, match=rf"the slot table moved from {recorded:#x}"):
        tiny.engine.warm_decode([DecodeShape(1, 16)], cost=FREE)
    assert tiny.graphs()["captured"] == 0


def test_recording_is_refused_when_the_shape_does_not_lie_on_the_table() -> None:
    with pytest.raises(ValueError, match="does not lie within the slot table"):
        tiny_engine().engine.warm_decode([DecodeShape(1, 80)], cost=FREE)


def test_step_is_refused_when_the_slot_table_is_not_the_block_tables_mirror() -> None:
    tiny = tiny_engine()
    tiny.ready()
    tiny.engine.add(prompts(1, 6, max_tokens=9)[0])
    tiny.engine.step()
    tiny.engine.step()
    tiny.engine.runner.slots.write(0, 2, [41])
    with pytest.raises(GateError, match="row 0, position 2: the slot table says 41, the block table"):
        tiny.engine.step()


def test_every_recording_freezes_no_rows_whoever_waits_for_it() -> None:
    tiny = tiny_engine(warmup_seconds=0)
    tiny.ready()
    tiny.run(prompts(3, 5, max_tokens=20))
    while tiny.engine.background:
        tiny.engine.capture_in_background()
    graphs = tiny.engine.runner.graphs
    assert graphs is not None
    assert {entry.origin for entry in graphs.entries()} == {"cold", "background"}
    assert [entry.recorded_rows for entry in graphs.entries()] == [()] * len(graphs)
    check_warm_graphs_unbound(graphs)


def test_background_skips_a_shape_that_a_step_recorded_first() -> None:
    tiny = tiny_engine(warmup_seconds=0, max_sequences=1, max_model_len=32)
    tiny.ready()
    assert list(tiny.engine.background) == [DecodeShape(1, 16), DecodeShape(1, 32)]
    tiny.run(prompts(1, 5, max_tokens=3))
    while tiny.engine.background:
        tiny.engine.capture_in_background()
    assert tiny.graphs()["cold_captures"] == tiny.graphs()["background_captures"] == 1
    assert tiny.engine.uncovered() == []


@pytest.mark.parametrize("read", ["rectangle", "paged"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_pad_rows_leave_no_token_behind_when_a_bucket_is_not_full(read: str, temperature: float, count: int) -> None:
    """A padded head chooses for its pad rows too, and what it chooses must not become anybody's next input."""

    def crowd() -> list[Sequence]:
        params = SamplingParams(temperature=temperature)
        return [s for i in range(count) for s in prompts(1, 3 + i, max_tokens=12, seed=i, params=params)]

    tiny = tiny_engine(attention_read=read, max_sequences=8)
    tiny.ready()
    alone, together = crowd(), crowd()
    for sequence in alone:
        tiny.run([sequence])
    tiny.run(together)
    assert [s.output_ids for s in together] == [s.output_ids for s in alone]


def test_background_gives_up_a_shape_when_it_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    failures = [RuntimeError("out of memory\nwith a second line")]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    backend = SlowBackend(before=fail_once)
    tiny = tiny_engine(warmup_seconds=0, max_sequences=1, max_model_len=32, backend=backend)
    tiny.ready()
    with caplog.at_level("WARNING", "nanoserve"):
        while tiny.engine.background:
            tiny.engine.capture_in_background()
    assert [record.getMessage() for record in caplog.records] == [
        "DecodeShape(rows=1, width=16) could not be recorded in an idle gap and is left to the step that meets it: "
        "out of memory"
    ]
    assert tiny.engine.uncovered() == [DecodeShape(1, 16)]
    tiny.run(prompts(1, 5, max_tokens=3))
    assert (tiny.graphs()["background_captures"], tiny.graphs()["cold_captures"]) == (1, 1)


def test_sampled_rows_keep_their_answer_when_they_run_beside_others() -> None:
    """Graphs read this step's sampling parameters, not those of the step they were recorded on."""
    tiny = tiny_engine()
    tiny.ready()
    hot = SamplingParams(temperature=1.5)
    greedy, alone, beside = (prompts(1, 6, max_tokens=12, params=params)[0] for params in (GREEDY, hot, hot))
    tiny.run([greedy])
    tiny.run([alone])
    tiny.run([*prompts(1, 6, max_tokens=5, seed=3), beside, *prompts(1, 6, max_tokens=9, seed=4)])
    assert beside.output_ids == alone.output_ids != greedy.output_ids
    assert tiny.graphs()["hit_rate"] == 1.0
