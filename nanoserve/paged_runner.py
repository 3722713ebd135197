"""PagedRunner: one step of any kind, decode and prompt chunks together, as one body and one head.

Each row walks the slot table to its own length, so width leaves the key, and a chunk of n prompt tokens is n rows that
share a table row at consecutive positions: `position + 1` as `context_lens` is the causal mask. Every step replays
graphs recorded before, prefill included. Runs on the engine thread, as `runner.Runner` does, which reads rectangles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from nanoserve.buckets import GraphKey, PagedPlan, PagedShapes, Shape, StepRows, key_of, pad_step, plan_step
from nanoserve.cache import BatchedPagedKVCache, PagedCacheRows
from nanoserve.errors import GateError
from nanoserve.gates import check_addresses_stable, check_paged_addressing, check_paged_pad_inert, check_table_stable
from nanoserve.graphs import GraphEntry, GraphSet, Origin, RecordingTime
from nanoserve.history import HistoryTable
from nanoserve.inputs import RowSampling, StepInputs
from nanoserve.models.decoder import Decoder, Hidden
from nanoserve.ops import Ops
from nanoserve.relay import Relay
from nanoserve.sequence import Sequence, StepPlan
from nanoserve.slots import SlotTable
from nanoserve.step import (
    StepOutcome,
    StepOutput,
    check_mirror,
    choose,
    edit_table_rows,
    new_tokens,
    row_sampling,
)


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step whose numbers are written. `hit` if its graphs, the body's first, were recorded before; times in seconds
    of the runner's clock; `moved` is where its tokens will be, if it chooses any and runs beside its caller."""

    plan: PagedPlan
    keys: list[GraphKey]
    sequences: tuple[Sequence, ...]
    hit: bool
    started_at: float
    replayed_at: float
    moved: StepOutput | None = None


class PagedRunner:
    """hidden  of `max_step_rows` rows, in the activations' dtype: where a body leaves what a head reads
    relay     for a backend that runs beside its caller

    strict    a step whose shape has no graph raises GateError instead of recording one
    paranoid  run every gate on every step
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        cache: BatchedPagedKVCache,
        slots: SlotTable,
        history: HistoryTable,
        inputs: StepInputs,
        hidden: Hidden,
        *,
        shapes: PagedShapes,
        graphs: GraphSet[StepOutput],
        relay: Relay | None = None,
        strict: bool = False,
        paranoid: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.history = history
        self.shapes = shapes
        self.graphs = graphs
        self._decoder = decoder
        self._ops = ops
        self._inputs = inputs
        self._hidden = hidden
        self._relay = relay
        self._strict = strict
        self._paranoid = paranoid
        self._clock = clock
        self._table_address = slots.address
        self._addresses = self._bound_addresses()
        self._pad_row = inputs.last_tokens.shape[0] - 1
        self._last_end = 0.0

    # --- a step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        """Run `plan`; returns when its tokens are on the host."""
        step = self._prepare(plan)
        outputs = self.graphs.replay_step(step.keys, step.plan)
        return self._conclude(step, outputs[1] if step.plan.head_rows else None)

    @property
    def starts(self) -> bool:
        """Whether the backend can run a step beside its caller (`start` and `finish`)."""
        return self._relay is not None

    def start(self, plan: StepPlan, notify_fd: int, *, ahead: bool = False) -> StartedStep:
        """Start `plan` and return; `notify_fd` is written to when it is over, which is when `finish` may be called.
        `ahead`: the step before still runs, and this one begins at its end. Such a plan swaps nothing, and clears no
        table row that the other reads."""
        assert self._relay is not None, "start() with a backend that runs in its caller"
        step = self._prepare(plan, ahead=ahead)
        before = [self._relay.arrival] if ahead else []
        if not step.plan.head_rows:
            self.graphs.start_step(step.keys, notify_fd, before=before)
            return step
        head = step.keys[1]
        departure, moved = self._relay.departure(head, self.graphs.output(head))
        self.graphs.start_step(step.keys, notify_fd, before=before, after=[departure])
        return replace(step, moved=moved)

    def finish(self, step: StartedStep) -> StepOutcome:
        """The outcome of a started step that is over; the one after it may be running."""
        self.graphs.finish_step(step.keys, step.plan)
        return self._conclude(step, step.moved)

    def settle(self) -> None:
        """Return once no started step runs."""
        self.graphs.settle()

    def _prepare(self, plan: StepPlan, *, ahead: bool = False) -> StartedStep:
        """Edit the table rows and write the step's numbers; afterwards every graph it takes exists."""
        started = self._clock()
        edit_table_rows(plan, self.slots, self.history, self._inputs.last_tokens)
        rows = StepRows()
        for row in plan.decode:
            rows.add_decode(row)
        for chunk in plan.chunks:
            rows.add(chunk.token_ids, chunk.start, chunk.write_slots, chunk.table_row)
            if chunk.last:
                rows.logit_rows.append(len(rows.input_ids) - 1)
        ending = [s for s, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True) if chunk.last]
        sequences = (*plan.decode_sequences, *ending)
        padded = plan_step(rows, self.shapes, sink_slot=self.slots.sink_slot, pad_row=self._pad_row)
        keys = self._keys(padded)
        missing = [key for key in keys if key not in self.graphs]
        if missing and ahead:
            self.settle()  # a recording writes the numbers that the step before reads
        for key in missing:
            self._capture_late(key)
        self._write(padded, [row_sampling(sequence) for sequence in sequences], ahead=ahead)
        return StartedStep(padded, keys, sequences, not missing, started, self._clock())

    def _conclude(self, step: StartedStep, output: StepOutput | None) -> StepOutcome:
        """Take the tokens of a step that is over. One that was started ahead began when the one before it ended."""
        now, began = self._clock(), max(step.started_at, self._last_end)
        self._last_end = now
        self.graphs.add_seconds(step.keys[0], now - max(step.replayed_at, began))
        new = new_tokens(step.sequences, output) if output is not None else []
        return StepOutcome(
            tuple(new), step.keys[0], True, step.hit, step.plan.pad_rows, now - began, chunks_replayed=True
        )

    def _capture_late(self, key: GraphKey) -> None:
        if self._strict:
            raise GateError(f"no graph is recorded for {key} and --strict-shapes allows no recording now")
        self.capture(key, "cold")

    def _write(self, plan: PagedPlan, sampling: list[RowSampling], *, ahead: bool) -> None:
        self._inputs.write_step(plan, sampling, ahead=ahead)
        if self._paranoid:
            self._check(plan, ahead=ahead)

    def _check(self, plan: PagedPlan, *, ahead: bool = False) -> None:
        """The preconditions of recording and replaying, the same for real and warm plans."""
        check_paged_pad_inert(plan, self.slots.sink_slot, self._pad_row)
        check_table_stable(self._table_address, self.slots)
        check_paged_addressing(plan, self._inputs.window(plan.rows, ahead=ahead), self.slots)
        check_addresses_stable(self._addresses, self._bound_addresses())

    def _bound_addresses(self) -> tuple[int, ...]:
        return (*self._inputs.addresses, *self.history.addresses)

    def _keys(self, plan: PagedPlan) -> list[GraphKey]:
        """The body's, and the head's if the step chooses tokens."""
        body = GraphKey("body", plan.rows, None)
        if not plan.head_rows:
            return [body]
        full = self.history.bears_on(plan.table_rows[row] for row in plan.logit_rows[: plan.real_logit_rows])
        return [body, GraphKey("head_full" if full else "head", plan.head_rows, None)]

    def check_mirror(self, sequence: Sequence, planned: int) -> None:
        check_mirror(sequence, planned, self.slots, self.history)

    # --- recording -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, shape: Shape, origin: Origin) -> GraphEntry[StepOutput]:
        """Record the graph of a body or head on a plan that is all padding: it freezes no rows.

        Raises GateError if the plan or its windows are not what a graph may be bound to.
        """
        key = key_of(shape)
        plan, program = self._warm_program(key)
        rows = plan.table_rows[: plan.real_rows]
        return self.graphs.capture(key, program, origin=origin, rows=rows, clock=self._clock)

    @torch.inference_mode()
    def time_recording(self, shape: Shape) -> RecordingTime:
        """What a recording of `shape` takes; it is thrown away."""
        key = key_of(shape)
        _, program = self._warm_program(key)
        return self.graphs.time_recording(key, program, clock=self._clock)

    def _warm_program(self, key: GraphKey) -> tuple[PagedPlan, Callable[[], StepOutput]]:
        body, head = (key.rows, 0) if key.kind == "body" else (self.shapes.row_ladder[0], key.rows)
        plan = pad_step(StepRows(), body, head, sink_slot=self.slots.sink_slot, pad_row=self._pad_row)
        self._inputs.write_step(plan, [])
        self._check(plan)
        return plan, lambda: self._body(key.rows) if key.kind == "body" else self._head(key)

    def _body(self, rows: int) -> StepOutput:
        step = self._inputs.window(rows)
        table = self.slots.read((), pad_rows=self.slots.shape[0], width=self.slots.shape[1])
        hidden = self._decoder.body(self._ops, step, PagedCacheRows(self.cache, step, table))
        for part, place in zip(hidden, self._hidden, strict=True):
            self._ops.keep(part, place)
        return StepOutput(step.input_ids, self._hidden.attended)

    def _head(self, key: GraphKey) -> StepOutput:
        step, index = self._inputs.window(self._inputs.max_rows), self._inputs.logit_rows(key.rows)
        logits = self._decoder.head(self._ops, self._hidden.rows(self._ops, index))
        history = self.history.window if key.kind == "head_full" else None
        return choose(self._ops, logits, self._inputs.sampling(key.rows), step, index, history)

    # --- outside a schedule ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def logits(self, rows: StepRows) -> Tensor:
        """`[len(rows.logit_rows), vocab]` fp32 of a step that belongs to no sequence, valid until the next one: for
        measurements. Whoever calls it has written the slot table, and nothing else may be running."""
        plan = plan_step(rows, self.shapes, sink_slot=self.slots.sink_slot, pad_row=self._pad_row)
        keys = self._keys(plan)
        for key in keys:
            if key not in self.graphs:
                self._capture_late(key)
        self._write(plan, [], ahead=False)
        return self.graphs.rehearse(*keys)[1].logits[: plan.real_logit_rows]

    # --- the padding self-test's way in (`warmup.selftest.Prober`) ---------------------------------------------

    @torch.inference_mode()
    def probe_prefill(self, token_ids: list[int], slots: list[int]) -> None:
        self.slots.write(0, 0, slots)
        for position, (token, slot) in enumerate(zip(token_ids, slots, strict=True)):
            self._probe(self.shapes.alone[0], token, position, slot)

    @torch.inference_mode()
    def probe_decode(self, shape: Shape, slots: list[int]) -> Tensor:
        self.slots.write(0, 0, slots)
        return self._probe(key_of(shape), 0, len(slots) - 1, slots[-1])

    def _probe(self, key: GraphKey, token: int, position: int, slot: int) -> Tensor:
        """What the graph of `key` leaves for one token: of a body, the last layer's attention; of a head, which reads
        what the last body left, logits."""
        rows = StepRows()
        rows.add((token,), position, (slot,), 0)
        body, head = key.rows, 0
        if key.kind != "body":
            body, head = self.shapes.alone[0].rows, key.rows
            rows.logit_rows.append(0)
        never_real = self.shapes.row_ladder[-1]
        plan = pad_step(
            rows, body, head, sink_slot=self.slots.sink_slot, pad_row=self._pad_row, pad_logit_row=never_real
        )
        self._inputs.write_step(plan, [])
        self._check(plan)
        return self.graphs.rehearse(key)[0].logits[0].clone()

    def probe_end(self) -> None:
        self.slots.clear(0)
