"""Scheduler: FCFS, chunked prefill, preemption by recompute.

Run against a model in integers whose answers change if any slot, block or token is not where it should be.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.blocks import BlockPool
from nanoserve.budget import StepBudget
from nanoserve.engine import Engine
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, State, StepPlan
from tests.engines import (
    EOS,
    VOCABULARY,
    HashRunner,
    assert_exact,
    check_mirror,
    hash_answer,
    hash_engine,
    prompt_of,
    run_to_end,
    sequence_of,
)

# --- one request -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16])
def test_answer_is_exact_when_a_prompt_is_chunked_around_block_borders(length: int, budget: int) -> None:
    engine, runner, pool = hash_engine(blocks=8, max_sequences=1, max_step_rows=budget)
    sequence = sequence_of(prompt_of(length), max_tokens=9)
    engine.add(sequence)
    run_to_end(engine, runner)
    assert_exact(sequence, prompt_of(length))
    assert pool.used_blocks == 0


def test_chunks_follow_the_budget_and_only_the_last_chooses_a_token() -> None:
    scheduler = Scheduler(BlockPool(16, 4), max_sequences=2, budget=StepBudget(5))
    sequence = sequence_of(prompt_of(12))
    scheduler.add(sequence)
    chunks = []
    while sequence.generated == 0:
        plan = scheduler.plan()
        assert plan is not None
        (chunk,) = plan.chunks
        chunks.append((chunk.start, len(chunk.token_ids), chunk.last))
        scheduler.commit({sequence: 7} if chunk.last else {})
    assert chunks == [(0, 5, False), (5, 5, False), (10, 2, True)]


def test_request_may_use_the_whole_pool_to_its_last_slot() -> None:
    """The newest token needs no slot: 9 prompt tokens and 7 generated ones take 15 of 16 slots."""
    engine, runner, _pool = hash_engine(blocks=4)
    sequence = sequence_of(prompt_of(9), max_tokens=7)
    engine.add(sequence)
    run_to_end(engine, runner)
    assert_exact(sequence, prompt_of(9))
    assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize("reason", ["eos", "length"])
def test_sequence_ends_truly_when_a_stop_token_or_the_limit_comes(reason: str) -> None:
    scheduler = Scheduler(BlockPool(4, 4), max_sequences=1, budget=StepBudget(8))
    sequence = sequence_of([1], max_tokens=2, eos=frozenset({EOS}))
    scheduler.add(sequence)
    scheduler.plan()
    assert scheduler.commit({sequence: 5}) == [sequence]
    assert sequence.finish_reason is None
    scheduler.plan()
    scheduler.commit({sequence: EOS if reason == "eos" else 6})
    assert sequence.finish_reason == ("stop" if reason == "eos" else "length")
    assert not scheduler.has_work
    assert scheduler.plan() is None


# --- several ---------------------------------------------------------------------------------------------------


def test_requests_start_in_order_of_arrival_when_rows_are_few() -> None:
    engine, runner, _ = hash_engine(blocks=32, max_sequences=2, max_step_rows=8)
    sequences = [sequence_of(prompt_of(6, kind), max_tokens=4) for kind in range(5)]
    for sequence in sequences:
        engine.add(sequence)
    started: list[Sequence] = []
    while engine.scheduler.has_work:
        plan = engine.plan()
        assert plan is not None
        started += [
            s for s, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True) if chunk.start == s.cached_tokens
        ]
        assert len(plan.decode) + plan.prefill_tokens <= 8
        engine.commit(plan, engine.launch(plan))
        check_mirror(engine, runner.slots)
    assert started == sequences
    for kind, sequence in enumerate(sequences):
        assert_exact(sequence, prompt_of(6, kind))


def test_decoding_sequences_hold_the_first_rows_when_others_leave() -> None:
    engine, runner, _ = hash_engine(blocks=32, max_sequences=4)
    sequences = [sequence_of(prompt_of(4, kind), max_tokens=3 + 2 * (kind % 3)) for kind in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    while (plan := engine.plan()) is not None:
        assert [row.table_row for row in plan.decode] == list(range(len(plan.decode)))
        engine.commit(plan, engine.launch(plan))
        check_mirror(engine, runner.slots)
    for kind, sequence in enumerate(sequences):
        assert_exact(sequence, prompt_of(4, kind))


def test_running_streams_go_on_when_a_long_prompt_is_prefilled() -> None:
    engine, _, _ = hash_engine(blocks=64, max_step_rows=5)
    short = sequence_of(prompt_of(2), max_tokens=40)
    engine.add(short)
    engine.step()
    engine.add(sequence_of(prompt_of(100, 1), max_tokens=2))
    for count in range(2, 26):
        engine.step()
        assert short.generated == count


def test_no_sequence_is_lost_when_the_pool_holds_one_and_a_half() -> None:
    """64 concurrent requests that share a prefix of three blocks, in a pool of 1.5 requests."""
    engine, runner, pool = hash_engine(blocks=12, max_sequences=8, max_step_rows=10)
    prompts = [[*prompt_of(12), kind % VOCABULARY, kind // VOCABULARY] for kind in range(64)]
    sequences = [sequence_of(prompt, max_tokens=20, seed=kind % 2) for kind, prompt in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    run_to_end(engine, runner, limit=20_000)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert_exact(sequence, prompt)
        assert sequence.generated == 20
    assert engine.scheduler.preemptions > 0
    assert pool.free_blocks == 12


def test_latest_arrival_is_the_victim_and_runs_again_first_when_the_pool_is_full() -> None:
    engine, runner, _pool = hash_engine(blocks=7)
    sequences = [sequence_of(prompt_of(8, kind), max_tokens=12) for kind in range(3)]
    for sequence in sequences:
        engine.add(sequence)
    running: list[list[int]] = []
    while engine.scheduler.has_work:
        engine.step()
        check_mirror(engine, runner.slots)
        running.append([k for k, s in enumerate(sequences) if s.state in (State.PREFILL, State.DECODE)])
        assert running[-1] == sorted(running[-1])
    assert engine.scheduler.preemptions > 0
    for now in running:
        done = [k for k, s in enumerate(sequences) if k not in now]
        assert not now or all(k < min(now) or k > max(now) for k in done), "an earlier arrival waited for a later one"
    for kind, sequence in enumerate(sequences):
        assert_exact(sequence, prompt_of(8, kind))


# --- ends from outside -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "prefill", "decode", "preempted"])
def test_blocks_are_back_at_once_when_a_sequence_is_ended_between_steps(when: str) -> None:
    engine, runner, pool = hash_engine(blocks=6, max_sequences=1 if when == "queued" else 2, max_step_rows=3)
    other = sequence_of(prompt_of(4), max_tokens=16)
    victim = sequence_of(prompt_of(9, 1), max_tokens=12)
    engine.add(other)
    engine.add(victim)
    wanted = {"queued": State.WAITING, "prefill": State.PREFILL, "decode": State.DECODE, "preempted": State.WAITING}
    for _ in range(60):
        if victim.state is wanted[when] and (when != "preempted" or victim.generated):
            break
        engine.step()
    else:
        raise AssertionError(f"the sequence was never {when}")
    for _ in range(2):
        engine.finish(victim, "cancelled")
        engine.check()
        assert pool.used_blocks == len(other.table.blocks)
        assert victim.finish_reason == "cancelled"
    run_to_end(engine, runner)
    assert_exact(other, prompt_of(4))
    assert victim.finish_reason == "cancelled"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_blocks_are_kept_until_commit_when_a_step_in_flight_addresses_them(phase: str) -> None:
    engine, runner, pool = hash_engine(blocks=8)
    victim, other = sequence_of([9, 8, 7, 6, 5]), sequence_of(prompt_of(5))
    engine.add(victim)
    engine.add(other)
    if phase == "decode":
        engine.step()
    plan = engine.plan()
    assert plan is not None
    engine.finish(victim, "cancelled")
    assert len(victim.table.blocks) == 2
    tokens = engine.commit(plan, engine.launch(plan))
    assert [new.sequence for new in tokens] == [other], "the token of an ended sequence counts for nothing"
    assert victim.table.blocks == []
    assert victim.generated == (1 if phase == "decode" else 0)
    engine.check()
    run_to_end(engine, runner)
    assert_exact(other, prompt_of(5))
    assert pool.used_blocks == 0


def decoding(engine: Engine, runner: HashRunner, *sequences: Sequence) -> StepPlan:
    """The plan of a step in flight that decodes all of them."""
    for sequence in sequences:
        engine.add(sequence)
    engine.step()
    plan = engine.plan()
    assert plan is not None
    assert set(plan.decode_sequences) == set(sequences)
    runner.slots.edit(plan)
    return plan


def test_step_ahead_decodes_what_goes_on_before_its_tokens_are_known() -> None:
    engine, runner, _ = hash_engine(blocks=16)
    first, last = sequence_of(prompt_of(5), max_tokens=9), sequence_of(prompt_of(3, 1), max_tokens=2)
    plan = decoding(engine, runner, first, last)
    ahead = engine.scheduler.plan_ahead()
    assert ahead is not None
    assert [(row.table_row, row.position) for row in ahead.decode] == [(first.table_row, 6)], (
        "the other one's limit is 2"
    )
    assert engine.scheduler.plan_ahead() is None, "one step ahead, not two"
    runner.slots.edit(ahead)
    assert {new.sequence for new in engine.commit(plan, runner.compute(plan))} == {first, last}
    assert (last.finish_reason, last.table.blocks) == ("length", [])
    assert [new.sequence for new in engine.commit(ahead, runner.compute(ahead))] == [first]
    run_to_end(engine, runner)
    assert_exact(first, prompt_of(5))
    assert_exact(last, prompt_of(3, 1))


def test_token_chosen_in_vain_is_seen_by_nobody_when_a_sequence_ended_the_step_before() -> None:
    engine, runner, pool = hash_engine(blocks=16)
    answer = hash_answer(sequence_of(prompt_of(5)), prompt_of(5), VOCABULARY)
    sequence = sequence_of(prompt_of(5), eos=frozenset({answer[1]}))
    plan = decoding(engine, runner, sequence)
    ahead = engine.scheduler.plan_ahead()
    assert ahead is not None
    runner.slots.edit(ahead)
    assert [new.token for new in engine.commit(plan, runner.compute(plan))] == answer[1:2]
    assert sequence.finish_reason == "stop"
    assert sequence.table.blocks, "the step that runs still addresses them"
    assert engine.commit(ahead, runner.compute(ahead)) == []
    assert sequence.output_ids == answer[:2]
    assert pool.used_blocks == 0
    engine.check()


@pytest.mark.parametrize("why", ["a prompt", "an arrival", "no block", "nothing goes on", "an abort", "no step"])
def test_step_ahead_is_refused_and_takes_nothing(why: str) -> None:
    engine, runner, pool = hash_engine(blocks=2, max_step_rows=5 if why == "a prompt" else 64)
    sequence = sequence_of(prompt_of(3 if why == "no block" else 2), max_tokens=2 if why == "nothing goes on" else 6)
    plan = decoding(engine, runner, sequence)
    if why == "no step":
        engine.commit(plan, runner.compute(plan))
    if why == "a prompt":
        engine.commit(plan, runner.compute(plan))
        engine.add(sequence_of(prompt_of(3, 1)))
        plan = engine.plan()
        assert plan is not None
        assert plan.chunks
    if why == "an arrival":
        engine.add(sequence_of(prompt_of(3, 1)))
    if why == "no block":
        pool.allocate(pool.free_blocks)
    if why == "an abort":
        engine.finish(sequence, "cancelled")
    free = pool.free_blocks
    assert engine.scheduler.plan_ahead() is None
    assert pool.free_blocks == free


def test_next_request_starts_clean_when_one_was_aborted_inside_a_block() -> None:
    engine, runner, _ = hash_engine(blocks=6, max_sequences=2, max_step_rows=3)
    first, again = sequence_of(prompt_of(14)), sequence_of(prompt_of(14))
    engine.add(first)
    engine.step()
    engine.finish(first, "cancelled")
    engine.add(again)
    run_to_end(engine, runner)
    assert_exact(again, prompt_of(14))


def test_answers_stay_exact_when_a_step_raised_and_was_abandoned() -> None:
    engine, runner, pool = hash_engine(blocks=10, max_step_rows=6)
    sequences = [sequence_of(prompt_of(7, kind), max_tokens=9) for kind in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    for round_ in range(4):
        engine.step()
        plan = engine.plan()
        assert plan is not None
        runner.slots.rows.reverse()  # a step that died in the middle of its edits
        if round_ == 2:
            engine.finish(sequences[1], "cancelled")
        engine.scheduler.abandon()
        engine.check()
        assert pool.used_blocks == 0
    engine.scheduler.abandon()
    run_to_end(engine, runner)
    for kind in (0, 2, 3):
        assert_exact(sequences[kind], prompt_of(7, kind))
    assert sequences[1].finish_reason == "cancelled"


@pytest.mark.parametrize(
    "damage",
    [
        lambda a, b: a.table.blocks.append(b.table.blocks[0]),
        lambda a, b: a.tokens.__setitem__(0, 22) or a.digests.clear(),
        lambda a, b: a.table.blocks.pop(),
        lambda a, b: setattr(a, "table_row", b.table_row),
    ],
    ids=["shared block", "other content", "lost block", "wrong row"],
)
def test_check_speaks_up_when_state_is_damaged(damage: Any) -> None:
    engine, _, _ = hash_engine(blocks=8)
    a, b = sequence_of(prompt_of(5)), sequence_of([9, 8, 7, 6, 5])
    engine.add(a)
    engine.add(b)
    engine.step()
    engine.check()
    damage(a, b)
    with pytest.raises(AssertionError):
        engine.check()


def test_steps_must_alternate_with_commits() -> None:
    scheduler = Scheduler(BlockPool(4, 4), max_sequences=1, budget=StepBudget(8))
    with pytest.raises(AssertionError, match="without a step in flight"):
        scheduler.commit({})
    scheduler.add(sequence_of([1]))
    scheduler.plan()
    with pytest.raises(AssertionError, match="while a step is in flight"):
        scheduler.plan()


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 16), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(9, 20),
    st.integers(1, 5),
    st.integers(1, 24),
)
@settings(max_examples=60)
def test_answers_equal_solo_runs_when_any_batch_shares_a_tiny_pool(
    shapes: list[tuple[int, int, int]], blocks: int, rows: int, budget: int
) -> None:
    engine, runner, pool = hash_engine(blocks=blocks, max_sequences=rows, max_step_rows=rows + budget)
    pairs = []
    for length, max_tokens, kind in shapes:
        prompt = prompt_of(length, kind)
        sequence = sequence_of(prompt, max_tokens=max_tokens, eos=frozenset({EOS}))
        pairs.append((sequence, prompt))
        engine.add(sequence)
    run_to_end(engine, runner)
    for sequence, prompt in pairs:
        assert_exact(sequence, prompt)
    assert pool.free_blocks == blocks
