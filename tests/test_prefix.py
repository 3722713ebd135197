"""PrefixCache: digests name what blocks hold, answers stay exact, and nothing is computed twice that need not be.

Run on the hash model, whose answers change if a reused block holds anything but what it should.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.blocks import BlockPool
from nanoserve.engine import Engine
from nanoserve.metrics import Metrics
from nanoserve.prefix import PrefixCache
from nanoserve.sequence import Sequence, State
from tests.engines import (
    VOCABULARY,
    HashRunner,
    ScriptedRunner,
    assert_exact,
    check_mirror,
    engine_of,
    hash_engine,
    prompt_of,
    run_to_end,
    sequence_of,
)

BLOCK = 4


def run_all(engine: Engine, runner: HashRunner, sequences: Iterable[Sequence], *, limit: int = 5_000) -> int:
    """Add the sequences and run them to their ends; the prompt tokens that were computed."""
    prompts = [(sequence, list(sequence.tokens)) for sequence in sequences]
    for sequence, _ in prompts:
        engine.add(sequence)
    computed = 0
    for _ in range(limit):
        if not engine.scheduler.has_work:
            break
        plan = engine.plan()
        assert plan is not None
        computed += plan.prefill_tokens
        engine.commit(plan, engine.launch(plan))
        check_mirror(engine, runner.slots)
    for sequence, prompt in prompts:
        assert_exact(sequence, prompt)
    return computed


# --- digests ---------------------------------------------------------------------------------------------------


def chain(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[bytes]:
    sequence = sequence_of(tokens, block_size=BLOCK, cache_salt=salt)
    return cache.digests(sequence, len(tokens) // BLOCK)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@given(TOKENS, TOKENS, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]))
def test_digests_are_equal_exactly_where_salt_and_all_tokens_up_to_there_are(
    a: list[int], b: list[int], salt_a: str, salt_b: str
) -> None:
    cache = PrefixCache(BlockPool(1, BLOCK))
    for index, (ours, theirs) in enumerate(zip(chain(cache, a, salt_a), chain(cache, b, salt_b), strict=False)):
        stop = (index + 1) * BLOCK
        assert (ours == theirs) is (salt_a == salt_b and a[:stop] == b[:stop])


def test_digests_of_two_engines_differ_and_follow_from_the_key() -> None:
    pool, tokens = BlockPool(1, BLOCK), prompt_of(8)
    assert chain(PrefixCache(pool), tokens) != chain(PrefixCache(pool), tokens)
    assert chain(PrefixCache(pool, b"k"), tokens) == chain(PrefixCache(pool, b"k"), tokens)


def test_chain_grows_with_the_tokens_and_refuses_a_block_that_is_not_full() -> None:
    cache = PrefixCache(BlockPool(1, BLOCK))
    sequence = sequence_of(prompt_of(6))
    first = cache.digests(sequence, 1)
    with pytest.raises(AssertionError, match="not full"):
        cache.digests(sequence, 2)
    sequence.tokens += [3, 4]
    assert cache.digests(sequence, 2) == chain(cache, [*prompt_of(6), 3, 4])
    assert cache.digests(sequence, 2)[:1] == first


# --- what is reused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [3, 4, 64])
@pytest.mark.parametrize(("length", "reused"), [(3, 0), (4, 0), (5, 4), (11, 8), (12, 8), (13, 12)])
def test_whole_blocks_before_the_last_token_are_reused_when_a_prompt_is_sent_twice(
    length: int, reused: int, budget: int
) -> None:
    engine, runner, _ = hash_engine(blocks=8, max_sequences=1, max_step_rows=budget)
    first, second = (sequence_of(prompt_of(length), seed=seed) for seed in (0, 1))
    assert run_all(engine, runner, [first]) == length
    assert run_all(engine, runner, [second]) == length - reused
    assert (first.cached_tokens, second.cached_tokens) == (0, reused)


@pytest.mark.parametrize("budget", [3, 5, 8, 64])
def test_prompt_is_computed_once_when_it_arrives_twice_at_the_same_time(budget: int) -> None:
    """The second waits for blocks the first is computing: what is not written yet is not shared."""
    engine, runner, _ = hash_engine(blocks=16, max_sequences=min(4, budget), max_step_rows=budget)
    sequences = [sequence_of(prompt_of(14), seed=seed) for seed in (0, 1)]
    assert run_all(engine, runner, sequences) == 14 + 2
    assert [sequence.cached_tokens for sequence in sequences] == [0, 12]


def test_full_prompt_blocks_are_shared_and_tails_are_not_when_n_is_four() -> None:
    engine, runner, pool = hash_engine(blocks=16, max_step_rows=5)
    choices = [sequence_of(prompt_of(10), choice=choice, max_tokens=6) for choice in range(4)]
    for sequence in choices:
        engine.add(sequence)
    while not all(sequence.state is State.DECODE for sequence in choices):
        engine.step()
    assert len({tuple(sequence.table.blocks[:2]) for sequence in choices}) == 1
    assert len({block for sequence in choices for block in sequence.table.blocks}) == pool.used_blocks == 2 + 4
    run_to_end(engine, runner)
    for sequence in choices:
        assert_exact(sequence, prompt_of(10))


@pytest.mark.parametrize("common", [3, 4, 5, 7, 8, 9])
def test_prompts_share_the_blocks_before_the_first_difference(common: int) -> None:
    engine, runner, _ = hash_engine(blocks=16)
    one, other = [*prompt_of(common), *[11] * 5], [*prompt_of(common), *[12] * 5]
    run_all(engine, runner, [sequence_of(one)])
    second = sequence_of(other)
    run_all(engine, runner, [second])
    assert second.cached_tokens == common // BLOCK * BLOCK


def test_second_turn_finds_its_own_history_the_generated_part_included() -> None:
    engine, runner, _ = hash_engine(blocks=16)
    first = sequence_of(prompt_of(10), max_tokens=9)
    run_all(engine, runner, [first])
    second = sequence_of([*first.tokens, 5, 6, 7])
    assert run_all(engine, runner, [second]) == 22 - 16, "the answer's last token was never computed"
    assert second.cached_tokens == 16


def test_prompts_with_different_salts_share_nothing() -> None:
    engine, runner, _ = hash_engine(blocks=16)
    sequences = [sequence_of(prompt_of(9), cache_salt=salt) for salt in ("", "a", "b")]
    assert run_all(engine, runner, sequences) == 27
    again = sequence_of(prompt_of(9), cache_salt="a")
    assert run_all(engine, runner, [again]) == 1


def test_everything_is_computed_when_the_cache_is_off() -> None:
    engine, runner, pool = hash_engine(blocks=16, prefix_cache=False)
    assert run_all(engine, runner, [sequence_of(prompt_of(9)) for _ in range(3)]) == 27
    assert not pool.holders


# --- what must not be reused -------------------------------------------------------------------------------------


def test_half_filled_block_is_not_reused_when_its_sequence_was_aborted_in_prefill() -> None:
    engine, runner, _ = hash_engine(blocks=8, max_step_rows=6)
    first, again = sequence_of(prompt_of(14)), sequence_of(prompt_of(14))
    engine.add(first)
    engine.step()
    engine.finish(first, "cancelled")
    assert run_all(engine, runner, [again]) == 14 - 4
    assert again.cached_tokens == 4


def test_blocks_of_the_step_are_not_shared_when_their_sequence_ended_while_it_ran() -> None:
    engine, runner, pool = hash_engine(blocks=8, max_step_rows=4)
    first = sequence_of(prompt_of(9))
    engine.add(first)
    engine.step()
    plan = engine.plan()
    assert plan is not None
    outcome = engine.launch(plan)
    engine.finish(first, "stop")
    engine.commit(plan, outcome)
    assert len(pool.holders) == 1
    assert run_all(engine, runner, [sequence_of(prompt_of(9))]) == 9 - 4


def test_nothing_is_reused_when_a_step_raised() -> None:
    engine, runner, pool = hash_engine(blocks=8)
    first, second = sequence_of(prompt_of(9)), sequence_of(prompt_of(9, 1))
    run_all(engine, runner, [first])
    engine.add(second)
    assert engine.plan() is not None
    engine.abandon()
    assert not pool.holders
    run_to_end(engine, runner)
    assert_exact(second, prompt_of(9, 1))


def test_least_recently_used_prompt_is_forgotten_first_when_space_is_needed() -> None:
    engine, runner, pool = hash_engine(blocks=6)
    for kind in (0, 1):
        run_all(engine, runner, [sequence_of([kind] * 8, max_tokens=1)])
    run_all(engine, runner, [sequence_of([0] * 8, max_tokens=1)])
    assert pool.free_blocks == 6, "cached blocks are free blocks"
    run_all(engine, runner, [sequence_of([9] * 12, max_tokens=4)])
    cached = [sequence_of([kind] * 9, max_tokens=1) for kind in (0, 1)]
    for sequence in cached:
        run_all(engine, runner, [sequence])
    assert [sequence.cached_tokens for sequence in cached] == [8, 0]


def test_front_of_a_prompt_outlives_its_end_when_space_is_needed() -> None:
    engine, runner, _ = hash_engine(blocks=4)
    run_all(engine, runner, [sequence_of([1] * 13, max_tokens=3)])
    run_all(engine, runner, [sequence_of([2] * 5, max_tokens=3)])
    again = sequence_of([1] * 13, max_tokens=3)
    run_all(engine, runner, [again])
    assert again.cached_tokens == 8


# --- waiting for another's prefix ----------------------------------------------------------------------------------


def chunk_owners(engine: Engine) -> list[Sequence]:
    plan = engine.plan()
    assert plan is not None
    engine.commit(plan, engine.launch(plan))
    return list(plan.chunk_sequences)


def test_unrelated_request_passes_one_that_awaits_a_prefix_and_leaves_it_its_row() -> None:
    engine, runner, _ = hash_engine(blocks=32, max_sequences=3, max_step_rows=10)
    first, follower = sequence_of(prompt_of(18)), sequence_of(prompt_of(18), seed=1)
    others = [sequence_of([kind] * 2) for kind in (20, 21)]
    for sequence in (first, follower, *others):
        engine.add(sequence)
    assert chunk_owners(engine) == [first, others[0]], "the last row is the follower's"
    assert chunk_owners(engine) == [first]
    assert chunk_owners(engine) == [first, follower]
    run_to_end(engine, runner)
    for sequence in (first, follower):
        assert_exact(sequence, prompt_of(18))


def test_blocks_are_left_for_one_that_awaits_a_prefix_when_the_pool_is_small() -> None:
    """Nine blocks: five for the first, one more for the follower's tail, and three are not enough for the other."""
    engine, runner, _ = hash_engine(blocks=9, max_step_rows=10)
    first, follower = sequence_of(prompt_of(18), max_tokens=2), sequence_of(prompt_of(18), seed=1, max_tokens=2)
    other = sequence_of([20] * 12, max_tokens=2)
    for sequence in (first, follower, other):
        engine.add(sequence)
    assert chunk_owners(engine) == [first]
    assert chunk_owners(engine) == [first]
    assert chunk_owners(engine)[0] is follower
    run_to_end(engine, runner)
    assert_exact(other, [20] * 12)


def test_follower_computes_the_rest_itself_when_the_first_is_aborted() -> None:
    engine, runner, _ = hash_engine(blocks=16, max_step_rows=6)
    first, follower = sequence_of(prompt_of(18)), sequence_of(prompt_of(18), seed=1)
    engine.add(first)
    engine.add(follower)
    assert chunk_owners(engine) == [first]
    engine.finish(first, "cancelled")
    run_to_end(engine, runner)
    assert_exact(follower, prompt_of(18))
    assert follower.cached_tokens == 4


def test_64_requests_compute_their_prefix_about_once_when_there_is_room() -> None:
    engine, runner, _ = hash_engine(blocks=256, max_sequences=32, max_step_rows=32)
    prefix = prompt_of(40)
    sequences = [sequence_of([*prefix, kind % VOCABULARY, kind // VOCABULARY], seed=kind % 2) for kind in range(64)]
    assert run_all(engine, runner, sequences) == 42 + 63 * 2
    assert sum(sequence.cached_tokens or 0 for sequence in sequences) == 63 * 40


# --- preemption, and what is counted ---------------------------------------------------------------------------------


def test_preempted_sequence_finds_its_own_blocks_again() -> None:
    computed = []
    for prefix_cache in (True, False):
        engine, runner, _ = hash_engine(blocks=8, prefix_cache=prefix_cache)
        sequences = [sequence_of([kind] * 9, max_tokens=14) for kind in range(3)]
        computed.append(run_all(engine, runner, sequences))
        assert engine.scheduler.preemptions > 0
        assert [sequence.cached_tokens or 0 for sequence in sequences] == [0, 0, 0], "its own work is no hit"
    assert computed[0] < computed[1]


def test_metrics_count_prompt_tokens_looked_for_and_found_once_each_when_sequences_are_preempted() -> None:
    runner, metrics = ScriptedRunner(), Metrics("test")
    engine = engine_of(runner, BlockPool(7, BLOCK), metrics=metrics, max_step_rows=6)
    for name in ("a", "b"):
        engine.add(sequence_of(prompt_of(10), request_id=name, max_tokens=10))
    while engine.scheduler.has_work:
        engine.step()
    assert engine.scheduler.preemptions > 0
    tokens = metrics.snapshot()["tokens"]
    assert (tokens["prompt_total"], tokens["prefix_queried_total"], tokens["prefix_cached_total"]) == (20, 20, 8)
