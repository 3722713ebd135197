"""The engine with the real runner on a tiny random model: an answer depends on its request alone.

Not on who else is served, on chunking, preemption, padding, recording, or what the pool held before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.request import SamplingParams
from nanoserve.sequence import Sequence
from tests.models.tiny import token_ids
from tests.tiny_engine import (
    BARE,
    BLOCK,
    BYTES_PER_TOKEN,
    EAGER,
    NATIVE,
    UNPADDED,
    Ask,
    TinyEngine,
    close,
    params_of,
    tokens_of,
)
from tests.tiny_folder import write_served_model

PLAIN = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def eager(folder: Path) -> TinyEngine:
    """Nothing recorded, nothing padded, buffers of its own for every step: the engine at its simplest."""
    return TinyEngine(folder, **BARE)


def ids(count: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(2 + token for token in token_ids(count, vocab_size=256, seed=seed))


def crowd() -> list[Ask]:
    """Eleven requests over eight rows: greedy and seeded, short and long, several choices, penalties; they arrive while
    others run, and leave at different steps."""
    asks = [
        Ask(ids(length, length), params_of(max_tokens=4 + 3 * (length % 5)), at_step=length % 4)
        for length in (1, 15, 16, 17, 33, 48)
    ]
    asks.append(Ask(ids(9), params_of(temperature=0.9, seed=5, top_p=0.9, max_tokens=14, n=2), at_step=2))
    asks.append(Ask(ids(31), params_of(temperature=1.3, seed=6, top_k=20, max_tokens=9), at_step=5))
    asks.append(Ask(ids(20, 7), params_of(frequency_penalty=1.05, presence_penalty=0.3, max_tokens=15), at_step=1))
    asks.append(Ask(ids(12, 8), params_of(repetition_penalty=1.4, logit_bias=((40, 2.0),), max_tokens=10), at_step=3))
    return asks


# --- alone, batched, chunked, preempted ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        EAGER,
        UNPADDED,
        {"max_step_rows": 1, "max_sequences": 1},
        {"max_step_rows": 8},
        {"max_sequences": 3},
        {"blocks": 9},
        {"blocks": 7, "max_step_rows": 8, "max_sequences": 5},
        {"attention_read": "paged"},
        {"attention_read": "paged", "max_step_rows": 11},
        {"attention_read": "paged", "blocks": 7, "max_step_rows": 8, "max_sequences": 5},
    ],
    ids=[
        "recorded",
        "eager",
        "unpadded",
        "chunks of 1",
        "chunks of 7",
        "3 rows",
        "tiny pool",
        "tiny everything",
        "paged",
        "paged in chunks of 7",
        "paged and tiny",
    ],
)
def test_answers_equal_solo_runs_when_many_are_served(folder: Path, eager: TinyEngine, fields: dict[str, Any]) -> None:
    engine = TinyEngine(folder, **fields)
    asks = crowd()
    ours, theirs = engine.answers(asks), eager.alone(asks)
    assert tokens_of(ours) == tokens_of(theirs)
    assert close(ours, theirs)
    assert (engine.engine.scheduler.preemptions > 0) is ("blocks" in fields)


def family() -> list[Ask]:
    """Ten requests that begin alike, greedy and seeded, two of them with several choices; one goes on where the others
    part, one is the common part and no more, one is isolated by a salt."""
    prefix = ids(48, 3)
    tails = [prefix + ids(1 + 5 * k, 50 + k) for k in range(5)]
    asks = [Ask(tail, params_of(max_tokens=6 + k), at_step=2 * k) for k, tail in enumerate(tails)]
    asks += [Ask(tails[0], params_of(temperature=0.9, seed=4, n=3, max_tokens=18), at_step=1)]
    asks += [Ask(tails[0] + ids(17, 60), params_of(max_tokens=9), at_step=6)]
    asks += [Ask(prefix, params_of(max_tokens=8), at_step=at) for at in (0, 9)]
    return [*asks, Ask(prefix, params_of(temperature=0.8, seed=2, max_tokens=20, n=2), cache_salt="tenant")]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        EAGER,
        {"max_step_rows": 8},
        {"blocks": 9, "max_step_rows": 11, "max_sequences": 5},
        {"attention_read": "paged"},
        {"attention_read": "paged", "blocks": 9, "max_step_rows": 11, "max_sequences": 5},
    ],
    ids=["recorded", "eager", "chunks of 7", "tiny", "paged", "paged and tiny"],
)
def test_answers_equal_solo_runs_when_requests_share_their_prefix(
    folder: Path, eager: TinyEngine, fields: dict[str, Any]
) -> None:
    engine = TinyEngine(folder, **fields)
    theirs = eager.alone(family())
    for _ in range(2):
        ours = engine.answers(family())
        assert tokens_of(ours) == tokens_of(theirs)
        assert close(ours, theirs)
    assert engine.metrics.counters.prefix_cached_tokens > 9 * 48
    assert (engine.engine.scheduler.preemptions > 0) is ("blocks" in fields)


def test_sliding_window_model_answers_alike_when_batched_and_alone(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path, "mistral-window")
    asks = [Ask(ids(length, length), params_of(max_tokens=30)) for length in (3, 16, 40)]
    bytes_per_token = 2 * 3 * 2 * 24 * 4
    pool = {"kv_memory_bytes": 33 * 16 * bytes_per_token}
    asks += [replace(asks[-1], prompt=asks[-1].prompt + ids(8), at_step=4)]
    solo = TinyEngine(folder, **BARE, **pool).alone(asks)
    assert tokens_of(TinyEngine(folder, **pool).answers(asks)) == tokens_of(solo)
    assert tokens_of(TinyEngine(folder, **pool, attention_read="paged").answers(asks)) == tokens_of(solo)


def test_recorded_steps_equal_eager_ones_to_the_bit_when_padding_is_the_same(folder: Path) -> None:
    asks = crowd()
    assert TinyEngine(folder).answers(asks) == TinyEngine(folder, **EAGER).answers(asks)


def test_second_run_equals_the_first_to_the_bit_when_blocks_are_reused(folder: Path) -> None:
    """Without the prefix cache, since these kernels' sums depend on how many tokens are computed at once."""
    engine = TinyEngine(folder, prefix_cache=False)
    assert engine.answers(crowd()) == engine.answers(crowd())


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_same_prompt_answers_alike_when_it_ends_around_a_block_border(
    folder: Path, eager: TinyEngine, length: int
) -> None:
    """Sent twice in one step with chunks smaller than the prompt, and once more after both."""
    engine = TinyEngine(folder, max_step_rows=10, blocks=16)
    ask = Ask(ids(length), params_of(max_tokens=5))
    both = tokens_of(engine.answers([ask, ask]))
    again = tokens_of(engine.answers([ask]))
    assert both == [again[0], again[0]] == [tokens_of(eager.alone([ask]))[0]] * 2


def test_prompts_that_part_inside_a_block_do_not_mix_when_served_together(folder: Path, eager: TinyEngine) -> None:
    shared = ids(40)
    asks = [Ask((*shared[:36], 50 + n, *shared[37:]), params_of()) for n in range(4)]
    ours = TinyEngine(folder, max_step_rows=16).answers(asks)
    assert tokens_of(ours) == tokens_of(eager.alone(asks))
    assert len({tuple(choice.tokens) for (choice,) in ours}) > 1


def test_prompt_starts_clean_when_the_same_one_was_aborted_in_mid_prefill(folder: Path, eager: TinyEngine) -> None:
    engine = TinyEngine(folder, max_step_rows=20)
    ask = Ask(ids(50), params_of())
    (sequence,) = engine.add(ask)
    engine.step()
    assert 0 < sequence.computed < 50
    engine.engine.finish(sequence, "cancelled")
    assert tokens_of(engine.answers([ask])) == tokens_of(eager.alone([ask]))


def test_64_requests_are_exact_when_the_pool_holds_one_and_a_half(folder: Path, eager: TinyEngine) -> None:
    """They share a prefix of three blocks; each runs to exactly its limit."""
    engine = TinyEngine(folder, blocks=9, max_step_rows=48)
    asks = [Ask((*ids(48), 2 + n), SamplingParams(0.0, ignore_eos=True, max_tokens=20)) for n in range(64)]
    ours = engine.answers(asks)
    assert engine.engine.scheduler.preemptions > 0
    assert all(len(choice.tokens) == 20 for (choice,) in ours)
    sample = range(0, 64, 9)
    assert [tokens_of(ours)[n] for n in sample] == tokens_of(eager.alone([asks[n] for n in sample]))


# --- what the pool holds does not matter ----------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, BARE], ids=["recorded", "bare"])
def test_logits_are_the_same_to_the_bit_when_the_pool_was_full_of_nan(folder: Path, fields: dict[str, Any]) -> None:
    """Sixteen blocks, the sink among the poison; before the first request, between requests, and after blocks were
    freed and are used again."""
    clean, poisoned = TinyEngine(folder, blocks=16, **fields), TinyEngine(folder, blocks=16, **fields)
    for rows in (1, 3, 8):
        asks = [Ask(ids(5 + 4 * n, n + 1), params_of(max_tokens=6 + n)) for n in range(rows)]
        poisoned.runner.cache.poison(math.nan)
        ours, theirs = poisoned.answers(asks), clean.answers(asks)
        assert ours == theirs
        assert all(math.isfinite(p) for choices in ours for answer in choices for p in answer.logprobs)


@pytest.mark.parametrize("live", [1, 3, 5, 6, 7])
@pytest.mark.parametrize("fields", [{}, EAGER, NATIVE], ids=["recorded", "eager", "native"])
def test_padding_changes_no_slot_when_live_rows_own_the_first_and_the_last_block(
    folder: Path, live: int, fields: dict[str, Any]
) -> None:
    token_bytes = BYTES_PER_TOKEN // 2 if fields is NATIVE else BYTES_PER_TOKEN  # K/V is bf16 natively
    engine = TinyEngine(folder, kv_memory_bytes=(live + 2 + 1) * BLOCK * token_bytes, **fields)
    cache, sink = engine.runner.cache, engine.runner.slots.sink_slot
    sequences: list[Sequence] = []
    for row in range(live):  # the first takes three blocks, so together they own the pool
        sequences += engine.add(Ask(ids(40 if row == 0 else 9, row + 1), params_of(max_tokens=6)))
    while any(sequence.generated < 2 for sequence in sequences):
        engine.step()
    held = {block for sequence in sequences for block in sequence.table.blocks}
    assert {0, live + 1} <= held
    before = [cache.read(layer, range(sink)) for layer in range(3)]
    written = {sequence.table.slot(len(sequence.tokens) - 1) for sequence in sequences}
    engine.step()
    for layer in range(3):
        for was, now in zip(before[layer], cache.read(layer, range(sink)), strict=True):
            changed = {slot for slot in range(sink) if not torch.equal(was[slot], now[slot])}
            assert changed == written


def test_steps_of_one_row_stay_hits_when_the_shape_was_met_before(folder: Path) -> None:
    engine = TinyEngine(folder)
    engine.answers([Ask(ids(4), params_of(max_tokens=8))])
    graphs = engine.metrics.snapshot()["graphs"]
    assert (graphs["captured"], graphs["cold_captures"], graphs["replays"]) == (1, 1, 7)
    assert graphs["hit_rate"] == pytest.approx(6 / 7)
    engine.answers([Ask(ids(4), params_of(max_tokens=8))])
    assert engine.metrics.snapshot()["graphs"]["captured"] == 1


# --- sampling in the step ---------------------------------------------------------------------------------------


def test_four_choices_differ_and_repeat_when_the_seed_is_given(folder: Path) -> None:
    ask = Ask(ids(6), SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=16, ignore_eos=True))
    first = tokens_of(TinyEngine(folder).answers([ask]))
    crowded = tokens_of(TinyEngine(folder, blocks=12, max_step_rows=8).answers([*crowd(), ask]))
    assert crowded[-1] == first[0]
    assert len({tuple(tokens) for tokens in first[0]}) == 4
    assert all(len(tokens) == 16 for tokens in first[0])


def test_four_choices_are_equal_when_they_are_greedy(folder: Path) -> None:
    (choices,) = tokens_of(TinyEngine(folder).answers([Ask(ids(6), params_of(n=4, logprobs=None))]))
    assert choices == [choices[0]] * 4


def test_unseeded_requests_differ_when_they_are_sent_twice(folder: Path) -> None:
    ask = Ask(ids(6), SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True))
    first, second = tokens_of(TinyEngine(folder).answers([ask, ask]))
    assert first != second


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-7}, {"temperature": 1e-5}, {"temperature": 1e-4}, {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.0, "min_p": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_answer_is_greedy_and_neighbours_are_untouched_when_a_parameter_is_extreme(
    folder: Path, params: dict[str, Any]
) -> None:
    engine = TinyEngine(folder)
    neighbour, extreme = Ask(ids(8), PLAIN), Ask(ids(11, 3), params_of(**params))
    greedy = tokens_of(engine.alone([Ask(ids(11, 3), PLAIN), neighbour]))
    assert tokens_of(engine.answers([extreme, neighbour])) == greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 3.0},
        {"logit_bias": tuple((token, -100.0) for token in range(2, 130))},
    ],
    ids=["frequency", "presence", "repetition", "bias"],
)
def test_penalties_change_their_own_answer_and_no_neighbours(folder: Path, fields: dict[str, Any]) -> None:
    engine = TinyEngine(folder)
    plain, penalised = (
        Ask(ids(8), params_of(max_tokens=24)),
        Ask((*ids(8), *ids(8)), params_of(max_tokens=24, **fields)),
    )
    solo = engine.alone([plain, penalised, Ask(penalised.prompt, plain.params)])
    together = engine.answers([plain, penalised])
    assert tokens_of(together) == tokens_of(solo[:2])
    assert tokens_of(solo[1:2]) != tokens_of(solo[2:]), "a penalty that changes nothing is not applied"
    if "logit_bias" in fields:
        assert min(solo[1][0].tokens) >= 130


def test_prompt_counts_for_repetition_and_not_for_frequency_when_nothing_was_generated(folder: Path) -> None:
    engine = TinyEngine(folder)
    first = {"max_tokens": 1, "logprobs": None}
    often = Ask((79,) * 40, params_of(frequency_penalty=2.0, presence_penalty=2.0, logit_bias=((79, 60.0),), **first))
    assert tokens_of(engine.alone([often])) == [[[79]]]
    for seed in range(40):
        prompt = ids(40, seed)
        ((greedy,),) = tokens_of(engine.alone([Ask(prompt, params_of(**first))]))[0]
        if greedy in prompt:
            ((penalised,),) = tokens_of(engine.alone([Ask(prompt, params_of(repetition_penalty=100.0, **first))]))[0]
            assert penalised != greedy
            return
    raise AssertionError("no prompt holds its own greedy continuation")


def test_tokens_are_the_same_when_logprobs_are_asked_for(folder: Path) -> None:
    engine = TinyEngine(folder)
    fields: dict[str, Any] = {"temperature": 1.2, "seed": 11, "max_tokens": 20, "n": 2}
    with_, without = (Ask(ids(7), params_of(logprobs=logprobs, **fields)) for logprobs in (0, None))
    assert tokens_of(engine.alone([with_])) == tokens_of(engine.alone([without]))


def test_logprobs_are_the_models_own_when_temperature_and_bias_move_the_choice(folder: Path) -> None:
    engine = TinyEngine(folder)
    (plain,), (biased,) = engine.alone(
        [
            Ask(ids(8), params_of(max_tokens=1)),
            Ask(ids(8), params_of(max_tokens=1, temperature=1.9, logit_bias=((77, 100.0),))),
        ]
    )
    assert biased.tokens == [77]
    assert biased.top == plain.top
    assert plain.top[0][0] == (plain.tokens[0], plain.logprobs[0])
    assert biased.logprobs[0] < plain.logprobs[0] < 0
    assert [value for _, value in plain.top[0]] == sorted((value for _, value in plain.top[0]), reverse=True)


def test_every_step_replays_a_warm_graph_when_the_read_is_paged(folder: Path) -> None:
    engine = TinyEngine(folder, attention_read="paged", max_step_rows=12, warmup_seconds=None)
    engine.answers(crowd())
    graphs = engine.metrics.snapshot()["graphs"]
    assert graphs["hit_rate"] == 1.0
    assert graphs["cold_captures"] == graphs["eager_steps"] == graphs["prefill_eager_steps"] == 0
    assert graphs["captured"] == graphs["warmed"] == len(engine.engine.runner.shapes.shapes())
    assert engine.metrics.counters.misses == 0
    assert engine.booted.warmup()["self_test"]["verdict"] == "passed"
