"""Any schedule of submits, steps, ends and failures, in pools that hold little more than one request.

Every step ends with the integrity checks; every answer is compared with the same request alone.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoserve.sequence import Sequence
from tests.engines import (
    EOS,
    VOCABULARY,
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

    @initialize(blocks=st.integers(6, 14), rows=st.integers(1, 5), budget=st.integers(1, 12), block=st.integers(1, 5))
    def build(self, blocks: int, rows: int, budget: int, block: int) -> None:
        self.block_size = block
        self.room = 2 * blocks * block // 3
        self.engine, self.runner, self.pool = hash_engine(
            blocks=blocks, block_size=block, max_sequences=rows, max_step_rows=rows + budget
        )

    @rule(
        length=st.integers(1, 40),
        limit=st.integers(1, 40),
        kind=st.integers(0, 3),
        n=st.integers(1, 3),
        priority=st.integers(-1, 1),
    )
    def submit(self, length: int, limit: int, kind: int, n: int, priority: int) -> None:
        prompt = prompt_of(min(length, self.room - 1), kind)
        max_tokens = min(limit, self.room - len(prompt))
        for choice in range(n):
            sequence = sequence_of(
                prompt,
                max_tokens=max_tokens,
                seed=kind,
                choice=choice,
                block_size=self.block_size,
                eos=frozenset({EOS}),
                priority=priority,
            )
            self.live.append((sequence, prompt))
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

    @precondition(lambda self: self.live)
    @rule()
    def step_raises(self) -> None:
        plan = self.engine.plan()
        if plan is not None:
            self.runner.slots.edit(plan)
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
        for sequence, prompt, generated in self.ended:
            assert sequence.finish_reason == "cancelled"
            assert sequence.generated == generated
            assert sequence.output_ids == hash_answer(sequence, prompt, VOCABULARY)[:generated]


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]
TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=60, stateful_step_count=30, suppress_health_check=CHECKS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestThousandsOfSchedules(AnySchedule.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=3_000, stateful_step_count=50, suppress_health_check=CHECKS)
