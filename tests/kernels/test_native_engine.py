"""The engine on the native kernels: an answer depends on its request alone, to the bit."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import ConfigError
from nanoserve.request import SamplingParams
from tests.test_engine import crowd, family, ids
from tests.tiny_engine import NATIVE, Ask, TinyEngine, params_of, tokens_of
from tests.tiny_folder import write_served_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    """Each request of the crowd by itself, on one thread, and all of it computed."""
    return TinyEngine(folder, **NATIVE, prefix_cache=False).alone(crowd())


def test_answers_follow_the_reference_kernels_until_rounding_turns_a_tie(folder: Path, alone: list[Any]) -> None:
    """K, V and the attention's operands are bf16 natively; on a random model that moves a log-probability by
    hundredths, and now and then another token is the likeliest. test_native_model compares logits of the real one."""
    reference = TinyEngine(folder, attention_read="paged").alone(crowd())
    agreeing = 0
    for ours, theirs in zip(alone, reference, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            same = next((i for i, pair in enumerate(zip(a.tokens, b.tokens, strict=True)) if pair[0] != pair[1]), None)
            assert same != 0
            assert all(abs(x - y) < 0.2 for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=True))
            agreeing += same is None
    assert agreeing >= 6, "of eleven"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"threads": 2},
        {"max_step_rows": 1, "max_sequences": 1},
        {"max_step_rows": 8},
        {"max_sequences": 3},
        {"blocks": 5, "max_step_rows": 8, "max_sequences": 5},
        {"warmup_seconds": None},
        {"ahead": True},
        {"ahead": True, "threads": 2, "blocks": 5, "max_step_rows": 8, "max_sequences": 5},
    ],
    ids=["together", "two threads", "chunks of 1", "chunks of 7", "3 rows", "preempted", "warmed", "ahead", "all"],
)
def test_answers_equal_solo_runs_to_the_bit_when_many_are_served(
    folder: Path, alone: list[Any], fields: dict[str, Any]
) -> None:
    engine = TinyEngine(folder, **{**NATIVE, **fields})
    assert engine.answers(crowd()) == alone
    assert (engine.engine.scheduler.preemptions > 0) is ("blocks" in fields)
    assert (engine.ran_ahead > 5) is ("ahead" in fields)


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_step_rows": 8}, {"blocks": 9, "max_step_rows": 11, "max_sequences": 5}],
    ids=["together", "chunks of 7", "tiny"],
)
def test_answers_equal_computed_ones_to_the_bit_when_prefixes_are_reused(folder: Path, fields: dict[str, Any]) -> None:
    engine = TinyEngine(folder, **{**NATIVE, **fields})
    alone = TinyEngine(folder, **NATIVE, prefix_cache=False).alone(family())
    for _ in range(2):
        assert engine.answers(family()) == alone
    assert engine.metrics.counters.prefix_cached_tokens > 9 * 48


def test_64_answers_are_exact_when_they_share_a_prefix_in_a_pool_of_one_and_a_half(folder: Path) -> None:
    """Each takes five blocks at its end, three of them the prefix; greedy and seeded."""
    asks = [
        Ask(ids(48) + ids(2, 100 + k), params_of(temperature=0.8 * (k % 2), seed=k, max_tokens=16, logprobs=None))
        for k in range(64)
    ]
    engine = TinyEngine(folder, **NATIVE, blocks=7)
    together = engine.answers(asks)
    assert engine.engine.scheduler.preemptions > 0
    assert together == TinyEngine(folder, **NATIVE, prefix_cache=False).alone(asks)
    assert engine.metrics.counters.prefix_cached_tokens > 48 * 48


def test_every_step_replays_a_warm_graph_and_the_self_test_finds_no_difference(folder: Path) -> None:
    engine = TinyEngine(folder, **NATIVE, warmup_seconds=None, self_test_seconds=30.0)
    engine.answers(crowd())
    graphs = engine.metrics.snapshot()["graphs"]
    assert (graphs["backend"], graphs["hit_rate"], graphs["cold_captures"]) == ("native", 1.0, 0)
    verdict = engine.booted.warmup()["self_test"]
    assert (verdict["verdict"], verdict["max_difference"]) == ("passed", 0.0)


def test_answers_do_not_change_when_the_pool_was_poisoned(folder: Path, alone: list[Any]) -> None:
    engine = TinyEngine(folder, **NATIVE)
    engine.runner.cache.poison(float("nan"))
    assert engine.answers(crowd()) == alone


def test_sliding_window_model_answers_alike_when_batched_and_alone(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path, "mistral-window", head_dim=32)
    asks = [Ask(ids(length, length), params_of(max_tokens=30)) for length in (3, 16, 40)]
    solo = TinyEngine(folder, **NATIVE, blocks=80).alone(asks)
    assert TinyEngine(folder, **NATIVE, blocks=80).answers(asks) == solo


def test_reference_kernels_serve_when_the_models_heads_do_not_fit(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path, "mistral-window")
    assert TinyEngine(folder, kernels="auto").booted.kernels == "reference"
    with pytest.raises(ConfigError, match="a multiple of 16 and at most 256 numbers, the model's have 24"):
        TinyEngine(folder, **NATIVE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 8}, "blocks of 16; drop --block-size 8"),
        ({"attention_read": "rectangle"}, "drop --attention-read rectangle or --kernels native"),
        ({"dtype": "bfloat16"}, "drop --dtype"),
        ({"capture_decode": False}, "drop --no-capture-decode"),
    ],
)
def test_native_kernels_are_refused_with_the_remedy_when_a_flag_rules_them_out(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TinyEngine(folder, **{**NATIVE, **fields})


def test_tokens_follow_the_request_alone_when_sampled_beside_others(folder: Path) -> None:
    ask = Ask(ids(9), params_of(temperature=0.9, seed=5, top_p=0.9, max_tokens=14, n=4))
    engine = TinyEngine(folder, **NATIVE)
    (first,) = tokens_of(engine.answers([ask]))
    beside = tokens_of(engine.answers([*crowd(), ask]))[-1]
    assert first == beside
    assert len({tuple(tokens) for tokens in first}) == 4


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_step_rows": 8}, {"blocks": 4, "max_step_rows": 10, "max_sequences": 5}],
    ids=["together", "chunks of 7", "preempted"],
)
def test_plain_and_penalised_answers_equal_solo_runs_when_they_share_steps(
    folder: Path, fields: dict[str, Any]
) -> None:
    """Alone, a plain answer never meets the full head; seeded ones with a history depend on every token before."""
    asks = [
        Ask(ask.prompt, replace(ask.params, logprobs=None), ask.at_step)
        for ask in (*crowd(), *(Ask(ids(30, n), penalised(n), at_step=n) for n in range(3)))
    ]
    solo = TinyEngine(folder, **NATIVE)
    apart = solo.alone(asks)
    plain = [entry for entry in graphs_of(solo, "head") if entry.replays]
    assert plain, "the plain answers took the plain head"
    engine = TinyEngine(folder, **{**NATIVE, **fields})
    assert engine.answers(asks) == apart
    assert any(entry.replays for entry in graphs_of(engine, "head_full"))
    assert (engine.engine.scheduler.preemptions > 0) is ("blocks" in fields)


def penalised(seed: int) -> SamplingParams:
    return params_of(
        temperature=1.1, seed=seed, frequency_penalty=0.8, presence_penalty=-0.3, repetition_penalty=1.2,
        logit_bias=((7, 1.5), (40, -100.0)), max_tokens=25,
    )  # fmt: skip


def graphs_of(engine: TinyEngine, kind: str) -> list[Any]:
    assert engine.runner.graphs is not None
    return [entry for entry in engine.runner.graphs.entries() if entry.key.kind == kind]


def test_threads_end_when_an_engine_is_dropped(folder: Path) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    gc.collect()
    before = threads()
    engine = TinyEngine(folder, **{**NATIVE, "threads": 3})
    engine.answers([Ask(ids(5), params_of(max_tokens=3))])
    during = threads()  # a progress bar's or torch's may have joined them
    assert during >= before + 3
    gc.unfreeze()  # what the boot froze would never be collected
    del engine
    gc.collect()
    assert threads() <= during - 3
