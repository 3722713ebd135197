"""Engine: scheduler and runner as three moves. `step()` is all of them.

    plan()     integers: what the next step is
    launch()   the device: run it (on the engine thread)
    commit()   integers: take its tokens

plan and commit belong to one thread (the event loop, or the caller offline); launch may run on another between them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from nanoserve.blocks import BlockPool
from nanoserve.buckets import Shape, key_of
from nanoserve.metrics import Metrics, StepKind, StepRecord
from nanoserve.request import FinishReason
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import NewToken, Sequence, StepPlan
from nanoserve.step import StepOutcome, StepRunner
from nanoserve.warmup import CostModel, WarmupReport, warm_decode
from nanoserve.warmup.record import Progress

log = logging.getLogger("nanoserve")


class Engine:
    """Keeps scheduler, runner and metrics in step. `background` holds the shapes to be recorded in idle gaps;
    `observer`, if there is one, is told of every step that is committed."""

    def __init__(
        self, scheduler: Scheduler, pool: BlockPool, runner: StepRunner, metrics: Metrics, *, paranoid: bool = False
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.background: deque[Shape] = deque()
        self.observer: Callable[[StepPlan, StepOutcome], None] | None = None
        self._pool = pool
        self._metrics = metrics
        self._paranoid = paranoid
        metrics.gauges.blocks_total = pool.num_blocks
        metrics.gauges.block_size = pool.block_size
        if runner.graphs is not None:
            metrics.graph_stats = runner.graphs.stats
            metrics.graph_shapes = runner.graphs.shapes
        self._refresh_gauges()

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self._refresh_gauges()

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence, reason)
        self._refresh_gauges()

    def plan(self) -> StepPlan | None:
        return self.scheduler.plan()

    def launch(self, plan: StepPlan) -> StepOutcome:
        return self.runner.run(plan)

    @property
    def starts(self) -> bool:
        """Whether a step can run beside its caller: then `start` and `finish` take the place of `launch`."""
        return self.runner.starts

    def plan_ahead(self) -> StepPlan | None:
        """The step after the one that was started, if it can be said already; to be started at once, `ahead`."""
        return self.scheduler.plan_ahead() if self.starts else None

    def start(self, plan: StepPlan, notify_fd: int, *, ahead: bool = False) -> Any:
        """Start the step, or let it follow the one that runs, and return; `notify_fd` is written to at its end."""
        return self.runner.start(plan, notify_fd, ahead=ahead)

    def finish_step(self, started: Any) -> StepOutcome:
        return self.runner.finish(started)

    def settle(self) -> None:
        """Return once no started step runs."""
        if self.starts:
            self.runner.settle()

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[NewToken]:
        """The tokens that count: those of sequences that were still wanted when the step ended."""
        self._account(plan, outcome)
        if self.observer is not None:
            self.observer(plan, outcome)
        taken = set(self.scheduler.commit({new.sequence: new.token for new in outcome.tokens}))
        self._metrics.counters.generated_tokens += len(taken)
        if self._paranoid:
            self.check()
        self._refresh_gauges()
        return [new for new in outcome.tokens if new.sequence in taken]

    def abandon(self) -> None:
        """The step in flight raised: whatever it ran is queued again, and nothing it may have written is trusted."""
        self.scheduler.abandon()
        self._refresh_gauges()

    def step(self) -> list[NewToken]:
        """Plan, launch and commit; empty if there is nothing to do."""
        plan = self.plan()
        return self.commit(plan, self.launch(plan)) if plan is not None else []

    # --- recording -----------------------------------------------------------------------------------------

    def warm_decode(
        self,
        shapes: SequenceOf[Shape],
        *,
        cost: CostModel,
        predicted_bytes: int = 0,
        progress: Progress | None = None,
    ) -> WarmupReport:
        """Record the decode graphs of `shapes`, in order, before anything is served; the door of the warm-up."""
        graphs = self.runner.graphs
        assert graphs is not None, "warm_decode without a graph set"
        report = warm_decode(
            self.runner,
            shapes,
            cost=cost,
            predicted_bytes=predicted_bytes,
            arena_bytes=graphs.backend.arena_bytes,
            progress=progress,
        )
        graphs.warmup_seconds, graphs.predicted_seconds = report.seconds, report.predicted_seconds
        return report

    def capture_in_background(self) -> None:
        """Record the next shape of `background`. Runs on the engine thread, between steps, when nothing waits.

        Nobody asked for this recording, so one that fails, for lack of memory say, costs its shape and nothing else."""
        shape = self.background[0]
        graphs = self.runner.graphs
        try:
            if graphs is not None and key_of(shape) not in graphs:
                self.runner.capture(shape, "background")
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning(
                "%s could not be recorded in an idle gap and is left to the step that meets it: %s", shape, reason
            )
        finally:
            self.background.popleft()  # only now: while it is being recorded it is neither covered nor given up

    def uncovered(self) -> list[Shape]:
        """Shapes a step can have that have no graph now."""
        shapes, graphs = self.runner.shapes, self.runner.graphs
        if shapes is None or graphs is None:
            return []
        return [shape for shape in shapes.shapes() if key_of(shape) not in graphs]

    def check(self) -> None:
        """Raises AssertionError if a block is lost or held twice, or the slot table does not mirror a block table.

        Runs after every step in tests and under --paranoid."""
        self.scheduler.check()
        for sequence in self.scheduler.live():
            if sequence.table_row >= 0:
                self.runner.check_mirror(sequence, self.scheduler.planned(sequence))

    def _account(self, plan: StepPlan, outcome: StepOutcome) -> None:
        for sequence in plan.decode_sequences:
            sequence.steps += 1
            sequence.replays += outcome.replayed
            sequence.eager_steps += not outcome.replayed
            sequence.pad_rows += outcome.pad_rows
        for sequence in plan.chunk_sequences:
            sequence.steps += 1
            sequence.replays += outcome.chunks_replayed
            sequence.eager_steps += not outcome.chunks_replayed
        started = [sequence for sequence in plan.chunk_sequences if sequence.steps == 1]
        kind: StepKind = "mixed" if plan.decode and plan.chunks else "decode" if plan.decode else "prefill"
        decoded, prefilled = len(plan.decode), plan.prefill_tokens
        shape = outcome.shape
        self._metrics.record_step(
            StepRecord(
                kind=kind,
                rows=shape.rows if shape is not None else prefilled,
                width=shape.width if shape is not None else None,
                real_rows=shape.rows - outcome.pad_rows if shape is not None else prefilled,
                pad_rows=outcome.pad_rows,
                hit=outcome.hit,
                promised=self.runner.graphs is not None and (bool(plan.decode) or outcome.chunks_replayed),
                seconds=outcome.seconds,
                decode_tokens=decoded,
                prefill_tokens=prefilled,
                prefill_eager=bool(plan.chunks) and not outcome.chunks_replayed,
                started=len(started),
                started_tokens=sum(sequence.target for sequence in started),
            )
        )
        self.scheduler.budget.observe(decoded, prefilled, outcome.seconds)
        counters = self._metrics.counters
        counters.eager_steps += bool(plan.decode) and not outcome.replayed
        counters.preempted = self.scheduler.preemptions
        if (prefix := self.scheduler.prefix) is not None:
            counters.prefix_queried_tokens, counters.prefix_cached_tokens = prefix.queried_tokens, prefix.cached_tokens
        for sequence, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True):
            # A prompt counts once, when its answer begins: not again when a preempted sequence is computed anew.
            counters.prompt_tokens += sequence.prompt_tokens if chunk.last and not sequence.generated else 0

    def _refresh_gauges(self) -> None:
        gauges = self._metrics.gauges
        gauges.running = self.scheduler.running
        gauges.waiting = self.scheduler.waiting
        gauges.blocks_used = self._pool.used_blocks
