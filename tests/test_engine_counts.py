"""What the engine counts, on a scripted runner."""

from __future__ import annotations

from nanoserve.blocks import BlockPool
from nanoserve.metrics import Metrics
from tests.engines import ScriptedRunner, engine_of, sequence_of


def test_discarded_tokens_are_not_counted_when_a_sequence_ends_while_its_step_runs() -> None:
    runner = ScriptedRunner()
    metrics = Metrics("test")
    engine = engine_of(runner, BlockPool(8, 4), metrics=metrics)
    sequence = sequence_of([1, 2, 3])
    engine.add(sequence)
    engine.step()
    plan = engine.plan()
    assert plan is not None
    outcome = engine.launch(plan)
    engine.finish(sequence, "stop")
    assert engine.commit(plan, outcome) == []
    assert metrics.counters.generated_tokens == sequence.generated == 1


def test_prompts_count_once_when_sequences_are_preempted() -> None:
    runner = ScriptedRunner()
    metrics = Metrics("test")
    engine = engine_of(runner, BlockPool(5, 4), metrics=metrics)
    for name in ("a", "b"):
        engine.add(sequence_of([1, 2, 3, 4, 5, 6], request_id=name, max_tokens=10))
    while engine.scheduler.has_work:
        engine.step()
    assert engine.scheduler.preemptions > 0
    assert metrics.counters.prompt_tokens == 12
