"""Runner: one step from plan to tokens. Edits the slot table, fills StepInputs, picks the graph key, replays.

Runs on the engine thread and is the only caller of the model. Knows nothing of requests beyond how a row is sampled,
and decides nothing: what runs is the scheduler's plan, which key it takes is `buckets`, and a graph is recorded here
unasked only where a step meets a key without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from nanoserve.buckets import DecodePlan, DecodeShape, ShapeSet, pad_plan, plan_decode
from nanoserve.cache import BatchedCacheRows, BatchedPagedKVCache, Chunk
from nanoserve.gates import BoundPlan
from nanoserve.graphs import GraphEntry, GraphKey, GraphSet, Origin
from nanoserve.inputs import GREEDY, RowSampling, StepInputs
from nanoserve.kernels.sampling import adjust_logits
from nanoserve.models.decoder import Decoder
from nanoserve.ops import CacheRows, Ops, StepWindow
from nanoserve.sequence import NewToken, Sequence, StepPlan
from nanoserve.slots import SlotTable


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """tokens `[rows]` int64, logits `[rows, vocab]` fp32; pad rows hold anything."""

    tokens: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step chose and what it was.

    shape      of its decode part, None if nothing decoded
    replayed   a graph ran the decode part
    hit        that graph was recorded before this step
    """

    tokens: tuple[NewToken, ...]
    shape: DecodeShape | None
    replayed: bool
    hit: bool
    pad_rows: int
    seconds: float


class Runner:
    """The device side of an engine. `shapes` None runs every batch at its own size; `graphs` None records nothing."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        cache: BatchedPagedKVCache,
        slots: SlotTable,
        last_tokens: Tensor,
        *,
        inputs: StepInputs | None,
        shapes: ShapeSet | None,
        graphs: GraphSet[DecodeOutput] | None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.shapes = shapes
        self.graphs = graphs
        self._decoder = decoder
        self._ops = ops
        self._last_tokens = last_tokens
        self._inputs = inputs
        self._clock = clock

    # --- a step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        """Run `plan`; returns when its tokens are on the host."""
        started = self._clock()
        self._edit_slots(plan)
        new: list[NewToken] = []
        shape: DecodeShape | None = None
        hit, pad_rows = False, 0
        if plan.decode:
            padded = plan_decode(plan.decode, self.shapes, self.slots.sink_slot)
            shape, pad_rows = padded.shape, padded.pad_rows
            output, hit = self._decode(padded, plan.decode_sequences)
            new += self._choose(plan.decode_sequences, output.logits, output.tokens)
        if plan.chunks:
            new += self._prefill(plan)
        replayed = shape is not None and self.graphs is not None
        return StepOutcome(tuple(new), shape, replayed, hit, pad_rows, self._clock() - started)

    def _edit_slots(self, plan: StepPlan) -> None:
        for row in plan.clears:
            self.slots.clear(row)
        for a, b in plan.swaps:
            self.slots.swap(a, b)
            self._last_tokens[[a, b]] = self._last_tokens[[b, a]]
        for row, start, slots in plan.slot_writes:
            self.slots.write(row, start, slots)

    # --- decode --------------------------------------------------------------------------------------------

    def _decode(self, plan: DecodePlan, sequences: tuple[Sequence, ...]) -> tuple[DecodeOutput, bool]:
        """(output, whether a graph recorded before this step ran it)."""
        if self.graphs is None:
            bound = self._bind(plan, sequences)
            return self._forward(bound, self.cache.view(plan.rows, bound.step, bound.slot_mapping)), False
        key = GraphKey("decode", *plan.shape)
        hit = key in self.graphs
        if not hit:
            self.capture(plan.shape, "cold")
        self._bind(plan, sequences)
        started = self._clock()
        output = self.graphs.replay(key, plan)
        self.graphs.add_seconds(key, self._clock() - started)
        return output, hit

    @torch.inference_mode()
    def capture(self, shape: DecodeShape, origin: Origin) -> GraphEntry[DecodeOutput]:
        """Record the graph of `shape` on a plan that is all padding: it freezes no rows and touches no sequence."""
        assert self.graphs is not None, "capture without a graph set"
        bound = self.warm_plan(shape)
        return self.graphs.capture(
            GraphKey("decode", *shape),
            lambda: self._forward(bound, BatchedCacheRows(self.cache, bound.step, bound.slot_mapping)),
            origin=origin,
            rows=bound.plan.rows,
            clock=self._clock,
        )

    def warm_plan(self, shape: DecodeShape) -> BoundPlan:
        """`shape` over no sequences, written into the real buffers."""
        return self._bind(pad_plan(shape, self.slots.sink_slot), ())

    def _bind(self, plan: DecodePlan, sequences: tuple[Sequence, ...]) -> BoundPlan:
        """Write the plan's numbers into the step buffers and hand out the windows."""
        rows = plan.shape.rows
        inputs = self._inputs or StepInputs(rows, self._last_tokens)
        pad_row = self._last_tokens.shape[0] - 1
        table_rows = (*plan.rows, *(pad_row,) * plan.pad_rows)
        inputs.write_rows(plan.input_ids, plan.positions, plan.write_slots, plan.context_lens, table_rows)
        inputs.write_sampling([*map(row_sampling, sequences), *(GREEDY,) * plan.pad_rows])
        return BoundPlan(
            plan=plan,
            step=inputs.window(rows),
            sampling=inputs.sampling(rows),
            slot_mapping=self.slots.read(plan.rows, pad_rows=plan.pad_rows, width=plan.shape.width),
        )

    def _forward(self, bound: BoundPlan, rows: CacheRows) -> DecodeOutput:
        hidden = self._decoder.body(self._ops, bound.step, rows)
        logits = self._decoder.head(self._ops, hidden)
        tokens = self._ops.sample(logits, bound.sampling, bound.step.context_lens)
        self._ops.remember(bound.step.last_tokens, bound.step.table_rows, tokens)
        return DecodeOutput(tokens, logits)

    # --- prefill -------------------------------------------------------------------------------------------

    def _prefill(self, plan: StepPlan) -> list[NewToken]:
        """All chunks in one eager forward; heads for the rows after which a token is chosen."""
        ids: list[int] = []
        positions: list[int] = []
        write_slots: list[int] = []
        table_rows: list[int] = []
        chunks: list[Chunk] = []
        last_rows: list[int] = []
        last_sequences: list[Sequence] = []
        for chunk, sequence in zip(plan.chunks, plan.chunk_sequences, strict=True):
            first, count = len(ids), len(chunk.token_ids)
            ids += chunk.token_ids
            positions += range(chunk.start, chunk.start + count)
            write_slots += chunk.write_slots
            table_rows += [chunk.table_row] * count
            chunks.append(Chunk(first, first + count, self.slots.row(chunk.table_row, chunk.start + count)))
            if chunk.last:
                last_rows.append(len(ids) - 1)
                last_sequences.append(sequence)
        device = self._last_tokens.device
        fields = torch.tensor([ids, positions, write_slots, table_rows], dtype=torch.int64, device=device)
        step = StepWindow(fields[0], fields[1], fields[2], fields[1] + 1, fields[3], self._last_tokens)
        hidden = self._decoder.body(self._ops, step, self.cache.view_chunks(chunks, step))
        if not last_rows:
            return []
        logit_rows = torch.tensor(last_rows, dtype=torch.int64, device=device)
        logits = self._decoder.head(self._ops, self._ops.gather_rows(hidden, logit_rows))
        inputs = StepInputs(len(last_rows), self._last_tokens)
        inputs.write_sampling([row_sampling(sequence) for sequence in last_sequences])
        tokens = self._ops.sample(logits, inputs.sampling(len(last_rows)), step.context_lens[logit_rows])
        self._ops.remember(self._last_tokens, step.table_rows[logit_rows], tokens)
        return self._choose(tuple(last_sequences), logits, tokens)

    # --- choosing with penalties, bias and logprobs ----------------------------------------------------------

    def _choose(self, sequences: tuple[Sequence, ...], logits: Tensor, tokens: Tensor) -> list[NewToken]:
        chosen = tokens[: len(sequences)].tolist()
        return [
            self._choose_with_history(sequence, logits[row])
            if sequence.params.needs_full_head
            else NewToken(sequence, chosen[row])
            for row, sequence in enumerate(sequences)
        ]

    def _choose_with_history(self, sequence: Sequence, row: Tensor) -> NewToken:
        """The step's token was chosen from the plain logits; choose again from the adjusted ones, and remember it."""
        params = sequence.params
        adjusted = adjust_logits(
            row,
            prompt_ids=sequence.tokens[: sequence.prompt_tokens],
            output_ids=sequence.output_ids,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
        )
        inputs = StepInputs(1, self._last_tokens)
        inputs.write_sampling([row_sampling(sequence)])
        position = torch.tensor([len(sequence.tokens)], dtype=torch.int64, device=row.device)
        token = self._ops.sample(adjusted.unsqueeze(0), inputs.sampling(1), position)
        table_row = torch.tensor([sequence.table_row], dtype=torch.int64, device=row.device)
        self._ops.remember(self._last_tokens, table_row, token)
        chosen = int(token)
        if params.logprobs is None:
            return NewToken(sequence, chosen)
        logprobs = torch.log_softmax(row, dim=-1)
        top = logprobs.topk(params.logprobs) if params.logprobs else None
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else ()
        return NewToken(sequence, chosen, float(logprobs[chosen]), pairs)


def row_sampling(sequence: Sequence) -> RowSampling:
    params = sequence.params
    return RowSampling(params.temperature, params.top_k, params.top_p, params.min_p, sequence.seed, sequence.choice)
