"""Runner: one step from plan to tokens. Edits the slot table, fills StepInputs, picks the graph key, replays.

Runs on the engine thread and is the only caller of the model. Knows nothing of requests beyond how a row is sampled,
and decides nothing: what runs is the scheduler's plan, which key it takes is `buckets`, and a graph is recorded here
unasked only where a step meets a key without one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nanoserve.buckets import DecodePlan, DecodeRow, DecodeShape, ShapeSet, plan_decode
from nanoserve.cache import BatchedPagedKVCache, Chunk
from nanoserve.errors import GateError
from nanoserve.gates import (
    BoundPlan,
    check_addresses_stable,
    check_mapping_is_window,
    check_pad_inert,
    check_plan_addressing,
    check_table_stable,
    check_window_intact,
)
from nanoserve.graphs import GraphEntry, GraphKey, GraphSet, Origin, RecordingTime
from nanoserve.history import HistoryTable
from nanoserve.inputs import GREEDY, RowSampling, StepInputs
from nanoserve.models.decoder import Decoder, Hidden
from nanoserve.ops import CacheRows, Ops, SamplingWindow, StepWindow
from nanoserve.sequence import ChunkPlan, NewToken, Sequence, StepPlan
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
from nanoserve.warmup import check_warm_rows_empty, check_warm_writes_sink, warmup_batch, warmup_plan


class Runner:
    """The device side of an engine.

    inputs    the step buffers; None makes new ones for every step
    shapes    the closed set of decode shapes; None runs every batch at its own size
    graphs    where decode graphs are recorded; None records nothing
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
        last_tokens: Tensor,
        *,
        inputs: StepInputs | None,
        shapes: ShapeSet | None,
        graphs: GraphSet[StepOutput] | None,
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
        self._last_tokens = last_tokens
        self._inputs = inputs
        self._strict = strict
        self._paranoid = paranoid
        self._clock = clock
        self._table_address = slots.address
        self._input_addresses = inputs.addresses if inputs is not None else ()

    # --- a step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        """Run `plan`; returns when its tokens are on the host."""
        started = self._clock()
        edit_table_rows(plan, self.slots, self.history, self._last_tokens)
        new: list[NewToken] = []
        shape: DecodeShape | None = None
        hit, pad_rows = False, 0
        if plan.decode:
            padded = plan_decode(plan.decode, self.shapes, self.slots.sink_slot)
            shape, pad_rows = padded.shape, padded.pad_rows
            bound, output, hit = self._decode(padded, plan.decode_sequences)
            new += self._take(plan.decode_sequences, output, bound.step)
        if plan.chunks:
            new += self._prefill(plan)
        replayed = shape is not None and self.graphs is not None
        return StepOutcome(tuple(new), shape, replayed, hit, pad_rows, self._clock() - started)

    starts = False

    def start(self, plan: StepPlan, notify_fd: int, *, ahead: bool = False) -> Any:
        raise TypeError("a rectangle step runs in its caller")

    def finish(self, step: Any) -> StepOutcome:
        raise TypeError("a rectangle step runs in its caller")

    def settle(self) -> None:
        """Nothing runs beside its caller."""

    # --- decode --------------------------------------------------------------------------------------------

    def _decode(self, plan: DecodePlan, sequences: tuple[Sequence, ...]) -> tuple[BoundPlan, StepOutput, bool]:
        """(what ran, its output, whether a graph recorded before this step ran it)."""
        sampling = [row_sampling(sequence) for sequence in sequences]
        if self.graphs is None:
            bound = self._bind(plan, sampling)
            self._check_step(bound, sequences)
            return bound, self._forward(bound, self.cache.view(plan.rows, bound.step, bound.slot_mapping)), False
        key = GraphKey("decode", *plan.shape)
        hit = key in self.graphs
        if not hit:
            if self._strict:
                raise GateError(f"no graph is recorded for {key} and --strict-shapes allows no recording now")
            self.capture(plan.shape, "cold")
        bound = self._bind(plan, sampling)
        self._check_step(bound, sequences)
        started = self._clock()
        output = self.graphs.replay(key, plan)
        self.graphs.add_seconds(key, self._clock() - started)
        return bound, output, hit

    def _bind(self, plan: DecodePlan, sampling: SequenceOf[RowSampling]) -> BoundPlan:
        """Write the plan's numbers into the step buffers and hand out the windows."""
        rows = plan.shape.rows
        inputs = self._inputs or StepInputs(rows, self._last_tokens)
        pad_row = self._last_tokens.shape[0] - 1
        table_rows = (*plan.rows, *(pad_row,) * plan.pad_rows)
        inputs.write_rows(plan.input_ids, plan.positions, plan.write_slots, plan.context_lens, table_rows)
        inputs.write_sampling([*sampling, *(GREEDY,) * plan.pad_rows])
        return BoundPlan(
            plan=plan,
            step=inputs.window(rows),
            sampling=inputs.sampling(rows),
            slot_mapping=self.slots.read(plan.rows, pad_rows=plan.pad_rows, width=plan.shape.width),
        )

    def _forward(self, bound: BoundPlan, rows: CacheRows) -> StepOutput:
        hidden = self._decoder.body(self._ops, bound.step, rows)
        return choose(self._ops, self._decoder.head(self._ops, hidden), bound.sampling, bound.step)

    def _take(
        self, sequences: tuple[Sequence, ...], output: StepOutput, step: StepWindow, index: Tensor | None = None
    ) -> list[NewToken]:
        """The tokens of `sequences`, the first rows of `output` and rows `index` of `step`, or the first. The recorded
        decode steps have the plain head; sequences that need the full one choose again, from the same logits."""
        new = new_tokens(sequences, output)
        again = [row for row, sequence in enumerate(sequences) if sequence.params.needs_full_head]
        if again:
            rows = torch.tensor(again, device=output.logits.device)
            at = rows if index is None else index[rows]
            anew = tuple(sequences[row] for row in again)
            full = choose(self._ops, output.logits[rows], self._sampling(anew), step, at, self.history.window)
            for row, token in zip(again, new_tokens(anew, full), strict=True):
                new[row] = token
        return new

    def _sampling(self, sequences: tuple[Sequence, ...]) -> SamplingWindow:
        """For logits that no step buffer describes."""
        inputs = StepInputs(len(sequences), self._last_tokens)
        inputs.write_sampling([row_sampling(sequence) for sequence in sequences])
        return inputs.sampling(len(sequences))

    def check_mirror(self, sequence: Sequence, planned: int) -> None:
        check_mirror(sequence, planned, self.slots, self.history)

    # --- recording -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, shape: DecodeShape, origin: Origin) -> GraphEntry[StepOutput]:
        """Record the graph of `shape` on a plan that is all padding: it freezes no rows and touches no sequence.

        Raises GateError if the plan or its windows are not what a graph may be bound to.
        """
        assert self.graphs is not None, "capture without a graph set"
        bound, program = self._warm_program(shape)
        key = GraphKey("decode", *shape)
        return self.graphs.capture(key, program, origin=origin, rows=bound.plan.rows, clock=self._clock)

    @torch.inference_mode()
    def time_recording(self, shape: DecodeShape) -> RecordingTime:
        """What a recording of `shape` takes; it is thrown away."""
        assert self.graphs is not None, "time_recording without a graph set"
        _, program = self._warm_program(shape)
        return self.graphs.time_recording(GraphKey("decode", *shape), program, clock=self._clock)

    def _warm_program(self, shape: DecodeShape) -> tuple[BoundPlan, Callable[[], StepOutput]]:
        assert self._inputs is not None, "a recording needs step buffers that keep their address"
        bound = warmup_plan(shape, self.slots, self._inputs)
        check_warm_rows_empty(bound.plan)
        check_warm_writes_sink(bound.plan, self.slots.sink_slot)
        self._check_bound(bound, ())
        return bound, lambda: self._forward(bound, warmup_batch(bound, self.cache))

    def _check_step(self, bound: BoundPlan, sequences: tuple[Sequence, ...]) -> None:
        if self._paranoid:
            lens = bound.plan.context_lens
            self._check_bound(bound, [s.table.slots(0, lens[row]) for row, s in enumerate(sequences)])

    def _check_bound(self, bound: BoundPlan, expected: SequenceOf[SequenceOf[int]]) -> None:
        """The preconditions of recording and replaying, the same for real and warm plans."""
        check_pad_inert(bound.plan, self.slots.sink_slot)
        check_table_stable(self._table_address, self.slots)
        check_mapping_is_window(bound, self.slots)
        check_window_intact(bound, expected)
        check_plan_addressing(bound)
        if self._inputs is not None:
            check_addresses_stable(self._input_addresses, self._inputs.addresses)

    # --- prefill -------------------------------------------------------------------------------------------

    def _prefill(self, plan: StepPlan) -> list[NewToken]:
        """All chunks in one eager forward; heads for the rows after which a token is chosen."""
        hidden, step = self._forward_chunks(plan.chunks)
        ends = [end for chunk, end in zip(plan.chunks, _ends(plan.chunks), strict=True) if chunk.last]
        sequences = tuple(s for s, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True) if chunk.last)
        if not ends:
            return []
        logit_rows = torch.tensor([end - 1 for end in ends], dtype=torch.int64, device=self._last_tokens.device)
        logits = self._decoder.head(self._ops, hidden.rows(self._ops, logit_rows))
        output = choose(self._ops, logits, self._sampling(sequences), step, logit_rows)
        return self._take(sequences, output, step, logit_rows)

    def _forward_chunks(self, plans: tuple[ChunkPlan, ...]) -> tuple[Hidden, StepWindow]:
        """What the body leaves of all chunks, one after the other, and the inputs it came from."""
        ids: list[int] = []
        positions: list[int] = []
        write_slots: list[int] = []
        table_rows: list[int] = []
        chunks: list[Chunk] = []
        for chunk in plans:
            first, count = len(ids), len(chunk.token_ids)
            ids += chunk.token_ids
            positions += range(chunk.start, chunk.start + count)
            write_slots += chunk.write_slots
            table_rows += [chunk.table_row] * count
            chunks.append(Chunk(first, first + count, self.slots.row(chunk.table_row, chunk.start + count)))
        fields = torch.tensor(
            [ids, positions, write_slots, table_rows], dtype=torch.int64, device=self._last_tokens.device
        )
        step = StepWindow(fields[0], fields[1], fields[2], fields[1] + 1, fields[3], self._last_tokens)
        return self._decoder.body(self._ops, step, self.cache.view_chunks(chunks, step)), step

    # --- the padding self-test's way in (`warmup.selftest.Prober`) ---------------------------------------------

    @torch.inference_mode()
    def probe_prefill(self, token_ids: list[int], slots: list[int]) -> None:
        self.slots.write(0, 0, slots)
        self._forward_chunks((ChunkPlan(0, 0, tuple(token_ids), tuple(slots), last=False),))

    @torch.inference_mode()
    def probe_decode(self, shape: DecodeShape, slots: list[int]) -> Tensor:
        assert self.graphs is not None, "the self-test runs on recorded graphs"
        position, slot = len(slots) - 1, slots[-1]
        self.slots.write(0, position, [slot])
        self._last_tokens[0] = 0
        only = ShapeSet((shape.rows,), (shape.width,))
        bound = self._bind(plan_decode([DecodeRow(0, position, slot)], only, self.slots.sink_slot), [GREEDY])
        self._check_bound(bound, [slots])
        return self.graphs.rehearse(GraphKey("decode", *shape))[0].logits[0].clone()

    def probe_end(self) -> None:
        self.slots.clear(0)


def _ends(chunks: tuple[ChunkPlan, ...]) -> list[int]:
    """Where each chunk ends among the rows of a forward over all of them."""
    ends, total = [], 0
    for chunk in chunks:
        total += len(chunk.token_ids)
        ends.append(total)
    return ends
