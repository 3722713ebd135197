"""PagedRunner: one step of any kind, decode and prompt chunks together, as one body and one head.

Each row walks the slot table to its own length, so width leaves the key, and a chunk of n prompt tokens is n rows that
share a table row at consecutive positions: `position + 1` as `context_lens` is the causal mask. Every step replays
graphs recorded before, prefill included. Runs on the engine thread, as `runner.Runner` does, which reads rectangles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from nanoserve.buckets import GraphKey, PagedPlan, PagedShapes, Shape, StepRows, key_of, pad_step, plan_step
from nanoserve.cache import BatchedPagedKVCache, PagedCacheRows
from nanoserve.errors import GateError
from nanoserve.gates import check_addresses_stable, check_paged_addressing, check_paged_pad_inert, check_table_stable
from nanoserve.graphs import GraphEntry, GraphSet, Origin
from nanoserve.inputs import RowSampling, StepInputs
from nanoserve.models.decoder import Decoder
from nanoserve.ops import Ops
from nanoserve.runner import DecodeOutput
from nanoserve.sequence import Sequence, StepPlan
from nanoserve.slots import SlotTable
from nanoserve.step import Chooser, StepOutcome, check_mirror, edit_slots, row_sampling


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step whose numbers are written. `hit` if its graphs, the body's first, were recorded before; times in seconds
    of the runner's clock."""

    plan: PagedPlan
    keys: list[GraphKey]
    sequences: tuple[Sequence, ...]
    hit: bool
    started_at: float
    replayed_at: float


class PagedRunner:
    """hidden  `[max_step_rows, hidden_size]` in the activations' dtype: where a body leaves what a head reads

    strict    a step whose shape has no graph raises GateError instead of recording one
    paranoid  run every gate on every step
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        cache: BatchedPagedKVCache,
        slots: SlotTable,
        inputs: StepInputs,
        hidden: Tensor,
        *,
        shapes: PagedShapes,
        graphs: GraphSet[DecodeOutput],
        strict: bool = False,
        paranoid: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.shapes = shapes
        self.graphs = graphs
        self._decoder = decoder
        self._ops = ops
        self._inputs = inputs
        self._hidden = hidden
        self._chooser = Chooser(inputs.last_tokens)
        self._strict = strict
        self._paranoid = paranoid
        self._clock = clock
        self._table_address = slots.address
        self._input_addresses = inputs.addresses
        self._pad_row = inputs.last_tokens.shape[0] - 1

    # --- a step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        """Run `plan`; returns when its tokens are on the host."""
        step = self._prepare(plan)
        return self._conclude(step, self.graphs.replay_step(step.keys, step.plan))

    @property
    def starts(self) -> bool:
        """Whether the backend can run a step beside its caller (`start` and `finish`)."""
        return self.graphs.starts

    @torch.inference_mode()
    def start(self, plan: StepPlan, notify_fd: int) -> StartedStep:
        """Start `plan` and return; `notify_fd` is written to when it is over, which is when `finish` may be called."""
        step = self._prepare(plan)
        self.graphs.start_step(step.keys, notify_fd)
        return step

    @torch.inference_mode()
    def finish(self, step: StartedStep) -> StepOutcome:
        return self._conclude(step, self.graphs.finish_step(step.keys, step.plan))

    def settle(self) -> None:
        """Return once no started step runs."""
        self.graphs.settle()

    def _prepare(self, plan: StepPlan) -> StartedStep:
        """Edit the slot table and write the step's numbers; afterwards every graph it takes exists."""
        started = self._clock()
        edit_slots(plan, self.slots, self._inputs.last_tokens)
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
        keys = _keys(padded)
        missing = [key for key in keys if key not in self.graphs]
        for key in missing:
            self._capture_late(key)
        self._write(padded, [row_sampling(sequence) for sequence in sequences])
        return StartedStep(padded, keys, sequences, not missing, started, self._clock())

    def _conclude(self, step: StartedStep, outputs: list[DecodeOutput]) -> StepOutcome:
        """Take the tokens of a step that is over."""
        now = self._clock()
        self.graphs.add_seconds(step.keys[0], now - step.replayed_at)
        new = self._chooser.choose(step.sequences, outputs[1].logits, outputs[1].tokens) if step.plan.head_rows else []
        return StepOutcome(
            tuple(new), step.keys[0], True, step.hit, step.plan.pad_rows, now - step.started_at, chunks_replayed=True
        )

    def _capture_late(self, key: GraphKey) -> None:
        if self._strict:
            raise GateError(f"no graph is recorded for {key} and --strict-shapes allows no recording now")
        self.capture(key, "cold")

    def _write(self, plan: PagedPlan, sampling: list[RowSampling]) -> None:
        self._inputs.write_step(plan, sampling)
        if self._paranoid:
            self._check(plan)

    def _check(self, plan: PagedPlan) -> None:
        """The preconditions of recording and replaying, the same for real and warm plans."""
        check_paged_pad_inert(plan, self.slots.sink_slot, self._pad_row)
        check_table_stable(self._table_address, self.slots)
        check_paged_addressing(plan, self._inputs.window(plan.rows), self.slots)
        check_addresses_stable(self._input_addresses, self._inputs.addresses)

    def check_mirror(self, sequence: Sequence) -> None:
        check_mirror(sequence, self.slots)

    # --- recording -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, shape: Shape, origin: Origin) -> GraphEntry[DecodeOutput]:
        """Record the graph of a body or head on a plan that is all padding: it freezes no rows.

        Raises GateError if the plan or its windows are not what a graph may be bound to.
        """
        key = key_of(shape)
        plan, program = self._warm_program(key)
        rows = plan.table_rows[: plan.real_rows]
        return self.graphs.capture(key, program, origin=origin, rows=rows, clock=self._clock)

    @torch.inference_mode()
    def time_recording(self, shape: Shape) -> float:
        """Seconds one recording of `shape` takes; the recording is thrown away."""
        _, program = self._warm_program(key_of(shape))
        started = self._clock()
        self.graphs.backend.record(program)
        return self._clock() - started

    def _warm_program(self, key: GraphKey) -> tuple[PagedPlan, Callable[[], DecodeOutput]]:
        body, head = (key.rows, 0) if key.kind == "body" else (self.shapes.row_ladder[0], key.rows)
        plan = pad_step(StepRows(), body, head, sink_slot=self.slots.sink_slot, pad_row=self._pad_row)
        self._inputs.write_step(plan, [])
        self._check(plan)
        return plan, lambda: self._body(key.rows) if key.kind == "body" else self._head(key.rows)

    def _body(self, rows: int) -> DecodeOutput:
        step = self._inputs.window(rows)
        table = self.slots.read((), pad_rows=self.slots.shape[0], width=self.slots.shape[1])
        hidden = self._decoder.body(self._ops, step, PagedCacheRows(self.cache, step, table))
        self._ops.keep(hidden, self._hidden)
        return DecodeOutput(step.input_ids, self._hidden)

    def _head(self, rows: int) -> DecodeOutput:
        step, index = self._inputs.window(self._inputs.max_rows), self._inputs.logit_rows(rows)
        logits = self._decoder.head(self._ops, self._ops.gather_rows(self._hidden, index))
        tokens = self._ops.sample(logits, self._inputs.sampling(rows), step.context_lens, index)
        self._ops.remember(step.last_tokens, step.table_rows, tokens, index)
        return DecodeOutput(tokens, logits)

    # --- outside a schedule ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def logits(self, rows: StepRows) -> Tensor:
        """`[len(rows.logit_rows), vocab]` fp32 of a step that belongs to no sequence, valid until the next one: for
        measurements. Whoever calls it has written the slot table, and nothing else may be running."""
        plan = plan_step(rows, self.shapes, sink_slot=self.slots.sink_slot, pad_row=self._pad_row)
        keys = _keys(plan)
        for key in keys:
            if key not in self.graphs:
                self._capture_late(key)
        self._write(plan, [])
        return self.graphs.rehearse(*keys)[1].logits[: plan.real_logit_rows]

    # --- the padding self-test's way in (`warmup.selftest.Prober`) ---------------------------------------------

    @torch.inference_mode()
    def probe_prefill(self, token_ids: list[int], slots: list[int]) -> None:
        self.slots.write(0, 0, slots)
        for position, (token, slot) in enumerate(zip(token_ids, slots, strict=True)):
            self._probe(GraphKey("body", self.shapes.row_ladder[0], None), token, position, slot)

    @torch.inference_mode()
    def probe_decode(self, shape: Shape, slots: list[int]) -> Tensor:
        self.slots.write(0, 0, slots)
        return self._probe(key_of(shape), 0, len(slots) - 1, slots[-1])

    def _probe(self, body: GraphKey, token: int, position: int, slot: int) -> Tensor:
        head = GraphKey("head", self.shapes.head_ladder[0], None)
        rows = StepRows()
        rows.add((token,), position, (slot,), 0)
        rows.logit_rows.append(0)
        plan = pad_step(rows, body.rows, head.rows, sink_slot=self.slots.sink_slot, pad_row=self._pad_row)
        self._inputs.write_step(plan, [])
        self._check(plan)
        return self.graphs.rehearse(body, head)[1].logits[0].clone()

    def probe_end(self) -> None:
        self.slots.clear(0)


def _keys(plan: PagedPlan) -> list[GraphKey]:
    body = GraphKey("body", plan.rows, None)
    return [body, GraphKey("head", plan.head_rows, None)] if plan.head_rows else [body]
