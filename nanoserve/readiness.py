"""The warm part of a boot: price the plan, carry it out, prove it, and go on saying what is covered.

Runs after the K/V pool is planned and before anything is served. The two ceilings of the warm list come from here: rows
from the scheduler, width from the smaller of what the deployment sells and what memory allows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanoserve.blocks import blocks_for
from nanoserve.boot import BootProgress, Report
from nanoserve.buckets import DecodeShape, PagedShapes, Shape, ShapeSet, key_of
from nanoserve.config import EngineConfig
from nanoserve.engine import Engine
from nanoserve.errors import ConfigError, OutOfMemory
from nanoserve.gates import check_pool_budget
from nanoserve.warmup import (
    CostModel,
    SelfTestReport,
    WarmupPlan,
    WarmupReport,
    check_all_warm,
    check_no_cold_captures,
    check_warm_budget,
    check_warm_graphs_unbound,
    load_warm_list,
    padding_self_test,
    plan_warmup,
    price,
    save_warm_list,
    score_bytes,
    warm_budget_bytes,
)
from nanoserve.warmup.selftest import PROMPT_TOKENS

log = logging.getLogger("nanoserve")
WARMUP_FLAGS = "--kv-memory, --warm-width, --warm-rows or --max-sequences"
"""What to lower where the warm-up, or the K/V pool at its first use, does not fit."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What pricing and proving need to know of the model."""

    num_heads: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Readiness:
    """A warm-up that has been carried out, and what /health says of it."""

    engine: Engine
    plan: WarmupPlan
    report: WarmupReport
    self_test: SelfTestReport
    warm_list: Path | None

    def summary(self) -> dict[str, Any]:
        """The second sizing decision, beside the K/V pool's: the plan, the report, and what is uncovered now."""
        plan, report = self.plan, self.report
        return {
            "graphs": report.graphs,
            "seconds": report.seconds,
            "predicted_seconds": report.predicted_seconds,
            "prediction_error": report.prediction_error,
            "predicted_bytes": report.predicted_bytes,
            "arena_bytes": report.arena_bytes,
            "row_ceiling": plan.row_ceiling,
            "width_ceiling": plan.width_ceiling,
            "budget_seconds": plan.budget_seconds,
            "budget_bytes": plan.budget_bytes,
            "trimmed": len(plan.trimmed),
            "background_left": len(self.engine.background),
            "uncovered": [list(shape) for shape in self.engine.uncovered()],
            "self_test": self.self_test.summary(),
        }

    def degraded(self) -> str | None:
        if self.self_test.verdict == "failed":
            return f"the padding self-test failed: {self.self_test.reason}"
        uncovered = [] if self.engine.background else self.engine.uncovered()
        return f"{describe_shapes(uncovered)} without a graph; a step that meets one records it" if uncovered else None

    def close(self) -> None:
        """Save the shapes that were replayed, where the operator asked for it."""
        if self.warm_list is None or self.engine.runner.graphs is None:
            return
        replays: dict[Shape, int] = {
            entry.key if entry.key.width is None else DecodeShape(entry.key.rows, entry.key.width): entry.replays
            for entry in self.engine.runner.graphs.entries()
            if entry.replays
        }
        if not replays:
            return  # nothing was served: what an earlier process learnt is worth more
        try:
            save_warm_list(self.warm_list, replays)
        except OSError as error:
            log.warning("the warm list could not be saved to %s: %s", self.warm_list, error)


def price_plan(
    engine: Engine, config: EngineConfig, facts: ModelFacts, free_bytes: int
) -> tuple[WarmupPlan, CostModel]:
    """Time two recordings, fit, and plan. Raises ConfigError for a warm list file that is none, OutOfMemory."""
    served: Mapping[Shape, int] = load_warm_list(Path(config.warm_list)) if config.warm_list else {}

    def plan(cost: CostModel, seconds: float | None) -> WarmupPlan:
        return plan_warmup(
            _shapes(engine),
            num_heads=facts.num_heads,
            cost=cost,
            budget_bytes=warm_budget_bytes(free_bytes=free_bytes),
            max_rows=config.warm_rows,
            max_width=config.warm_width,
            budget_seconds=seconds,
            served=served,
        )

    # Only what the ceilings leave may be tried: a shape that memory does not hold must not be recorded for its price.
    candidates = plan(CostModel(0.0, 0.0), None).shapes if config.warmup_seconds != 0 else ()
    with memory_is_enough("the warm-up", WARMUP_FLAGS):
        cost = price(engine.runner, candidates)
    return plan(cost, config.warmup_seconds), cost


def check_covered(config: EngineConfig, plan: WarmupPlan) -> None:
    """Raises ConfigError under `strict_shapes` if a step could meet a shape that the plan leaves without a graph."""
    if config.strict_shapes and plan.uncovered:
        raise ConfigError(
            f"--strict-shapes, and the warm-up leaves {describe_shapes(plan.uncovered)} without a graph; "
            "raise --warmup-seconds, --warm-rows or --warm-width, or lower --max-sequences or --max-model-len"
        )


def make_ready(
    engine: Engine, config: EngineConfig, facts: ModelFacts, free_bytes: int, report: Report, *, bar: bool = True
) -> Readiness:
    """Price, warm and prove.

    Raises ConfigError under `strict_shapes` if a step could meet a shape without a graph, OutOfMemory, and GateError if
    a recording is not what it has to be.
    """
    report(BootProgress("warming"))
    plan, cost = price_plan(engine, config, facts, free_bytes)
    log.info(plan.describe())
    check_covered(config, plan)
    check_warm_budget(plan.predicted_bytes, plan.budget_bytes)
    for shape in (*plan.shapes, *plan.background):
        check_pool_budget(score_bytes(shape, num_heads=facts.num_heads), plan.budget_bytes)
    hidden = not bar or not plan.shapes
    with tqdm(total=len(plan.shapes), desc="warming", unit="graph", disable=hidden, dynamic_ncols=True) as meter:

        def progress(done: int, total: int, eta: float | None) -> None:
            meter.update(done - meter.n)
            report(BootProgress("warming", done, total, eta))

        with memory_is_enough("the warm-up", WARMUP_FLAGS):
            warmed = engine.warm_decode(plan.shapes, cost=cost, predicted_bytes=plan.predicted_bytes, progress=progress)
    graphs, shapes = engine.runner.graphs, _shapes(engine)
    assert graphs is not None, "a warm-up without a graph set"
    check_all_warm(graphs, plan.shapes)
    check_warm_graphs_unbound(graphs)
    check_no_cold_captures(graphs)
    verdict = padding_self_test(
        engine.runner,
        shapes,
        lambda shape: key_of(shape) in graphs,
        slots=_spare_slots(engine, config.block_size),
        vocab_size=facts.vocab_size,
        seconds=config.self_test_seconds,
    )
    engine.background.extend(plan.background)
    readiness = Readiness(engine, plan, warmed, verdict, Path(config.warm_list) if config.warm_list else None)
    log.info(boot_line(readiness))
    return readiness


@contextmanager
def memory_is_enough(what: str, flags: str) -> Iterator[None]:
    """Raises OutOfMemory, naming `flags` to lower, where torch cannot allocate what `what` needs."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OutOfMemory(f"{what} ran out of memory ({reason}); lower {flags}") from error


def boot_line(readiness: Readiness) -> str:
    plan, report = readiness.plan, readiness.report
    trimmed = f"; trimmed: {describe_shapes(plan.trimmed)}" if plan.trimmed else ""
    later = f"; in idle gaps: {describe_shapes(plan.background)}" if plan.background else ""
    uncovered = readiness.engine.uncovered()
    covered = "every shape covered" if not uncovered else f"uncovered now: {describe_shapes(uncovered)}"
    return (
        f"warmed {report.graphs} graphs in {report.seconds:.2f} s (predicted {report.predicted_seconds:.2f} s), "
        f"{report.predicted_bytes / 1e6:.1f} MB of scores at the widest; {covered}{trimmed}{later}; "
        f"padding self-test {readiness.self_test.verdict}"
    )


def describe_shapes(shapes: Iterable[Shape]) -> str:
    """`12 shapes (rows 4 to 8, width 512 to 2,048)`."""
    listed = list(shapes)
    if not listed:
        return "no shapes"
    rows, widths = [shape.rows for shape in listed], [shape.width for shape in listed if shape.width is not None]
    width = f", width {min(widths):,} to {max(widths):,}" if widths else ""
    return f"{len(listed)} shapes (rows {min(rows)} to {max(rows)}{width})"


def _shapes(engine: Engine) -> ShapeSet | PagedShapes:
    assert engine.runner.shapes is not None, "a warm-up without a closed set of shapes"
    return engine.runner.shapes


def _spare_slots(engine: Engine, block_size: int) -> list[int]:
    """Slots for the self-test's prompt and its next token: the pool's first blocks, none of which is taken yet."""
    blocks = range(blocks_for(PROMPT_TOKENS + 1, block_size))
    return [block * block_size + offset for block in blocks for offset in range(block_size)][: PROMPT_TOKENS + 1]
