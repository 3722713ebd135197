"""Any schedule of submits, steps, ends and failures, in pools that hold little more than one request.

Requests start alike, answer earlier answers, and are isolated by salts, so blocks are shared, evicted and found again.
Every step ends with the integrity checks and a look at what each cached block holds; every answer is compared with the
same request alone.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoserve.sequence import Sequence
from tests.engines import (
    EOS,
    VOCABULARY,
    Contents,
    assert_exact,
    check_mirror,
    hash_answer,
    hash_engine,
    prompt_of,
    run_to_end,
    sequence_of,
)


class AnySchedule(RuleBasedStateMachine):
    """Requests of one to three choices come and go between and during steps, in a pool of 1.5 requests or more."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[tuple[Sequence, list[int]]] = []
        self.ended: list[tuple[Sequence, list[int], int]] = []
        self.made: list[Sequence] = []
        self.ran_ahead = False

    @initialize(blocks=st.integers(6, 14), rows=st.integers(1, 5), budget=st.integers(1, 12), block=st.integers(1, 5))
    def build(self, blocks: int, rows: int, budget: int, block: int) -> None:
        self.block_size = block
        self.room = 2 * blocks * block // 3
        self.engine, self.runner, self.pool = hash_engine(
            blocks=blocks, block_size=block, max_sequences=rows, max_step_rows=rows + budget
        )
        assert self.engine.scheduler.prefix is not None
        self.contents = Contents(self.pool, self.engine.scheduler.prefix, self.runner)

    @rule(
        length=st.integers(1, 40),
        limit=st.integers(1, 40),
        kind=st.integers(0, 3),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "a"]),
    )
    def submit(self, length: int, limit: int, kind: int, n: int, priority: int, salt: str) -> None:
        """Prompts of one kind are prefixes of each other."""
        self.add(prompt_of(min(length, self.room - 1), kind), limit, kind, n, salt, priority)

    @precondition(lambda self: self.made)
    @rule(data=st.data(), more=st.integers(1, 6), limit=st.integers(1, 20))
    def go_on(self, data: st.DataObject, more: int, limit: int) -> None:
        """The next turn of a chat: what was asked and answered so far, and something new."""
        said = data.draw(st.sampled_from(self.made))
        prompt = [*said.tokens, *prompt_of(more, 1)][: self.room - 1]
        self.add(prompt, limit, said.seed, 1, said.cache_salt)

    def add(self, prompt: list[int], limit: int, seed: int, n: int, salt: str, priority: int = 0) -> None:
        for choice in range(n):
            sequence = sequence_of(
                prompt,
                max_tokens=min(limit, self.room - len(prompt)),
                seed=seed,
                choice=choice,
                block_size=self.block_size,
                eos=frozenset({EOS}),
                priority=priority,
                cache_salt=salt,
            )
            self.live.append((sequence, prompt))
            self.made.append(sequence)
            self.engine.add(sequence)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.check()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end_between_steps(self, data: st.DataObject) -> None:
        self.end(data.draw(st.integers(0, len(self.live) - 1)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end_while_a_step_runs(self, data: st.DataObject) -> None:
        """As stop strings and aborts do: after plan, before or after the device ran."""
        plan = self.engine.plan()
        if plan is None:
            return
        early = data.draw(st.booleans())
        index = data.draw(st.integers(0, len(self.live) - 1))
        if early:
            self.end(index)
        outcome = self.engine.launch(plan)
        if not early:
            self.end(index)
        self.engine.commit(plan, outcome)

    @rule(data=st.data(), count=st.integers(1, 6))
    def step_ahead(self, data: st.DataObject, count: int) -> None:
        """Each step is planned, and the slot table edited for it, before the one before it has run."""
        plan = self.engine.plan()
        if plan is None:
            return
        self.runner.slots.edit(plan)
        for left in reversed(range(count)):
            self.may_end(data)
            following = self.engine.scheduler.plan_ahead() if left else None
            if following is not None:
                self.ran_ahead = True
                self.runner.slots.edit(following)
            self.may_end(data)
            self.engine.commit(plan, self.runner.compute(plan))
            self.check()
            if following is None:
                return
            plan = following

    def may_end(self, data: st.DataObject) -> None:
        if self.live and data.draw(st.integers(0, 4)) == 0:
            self.end(data.draw(st.integers(0, len(self.live) - 1)))

    @precondition(lambda self: self.live)
    @rule(ahead=st.booleans())
    def step_raises(self, ahead: bool) -> None:
        plan = self.engine.plan()
        if plan is not None:
            self.runner.slots.edit(plan)
            if ahead and (following := self.engine.scheduler.plan_ahead()) is not None:
                self.runner.slots.edit(following)
            self.engine.scheduler.abandon()

    def end(self, index: int) -> None:
        sequence, prompt = self.live[index]
        if sequence.finish_reason is None:
            self.live.pop(index)
            self.ended.append((sequence, prompt, sequence.generated))
        self.engine.finish(sequence, "cancelled")

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        check_mirror(self.engine, self.runner.slots)
        self.contents.check(self.made)
        for sequence, prompt in self.live:
            answer = hash_answer(sequence, prompt, VOCABULARY)
            assert sequence.output_ids == answer[: sequence.generated]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        run_to_end(self.engine, self.runner)
        assert self.pool.free_blocks == self.pool.num_blocks
        for sequence, prompt in self.live:
            assert_exact(sequence, prompt)
            assert sequence.cached_tokens is not None
            assert sequence.cached_tokens < len(prompt)
        for sequence, prompt, generated in self.ended:
            assert sequence.finish_reason == "cancelled"
            assert sequence.generated == generated
            assert sequence.output_ids == hash_answer(sequence, prompt, VOCABULARY)[:generated]
        event(f"reused {any(sequence.cached_tokens for sequence in self.made)}")
        event(f"ran ahead {self.ran_ahead}")
        event(f"preempted {self.engine.scheduler.preemptions > 0}")


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]
TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=150, stateful_step_count=30, suppress_health_check=CHECKS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestThousandsOfSchedules(AnySchedule.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=3_000, stateful_step_count=50, suppress_health_check=CHECKS)
