"""What every step does on the device, whichever way it reads K/V: slot table edits before, choosing tokens after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoserve.buckets import PagedShapes, Shape, ShapeSet
from nanoserve.cache import BatchedPagedKVCache
from nanoserve.graphs import GraphSet, Origin
from nanoserve.inputs import RowSampling, StepInputs
from nanoserve.kernels.sampling import adjust_logits, sample_rows
from nanoserve.sequence import NewToken, Sequence, StepPlan
from nanoserve.slots import SlotTable


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step chose and what it was.

    shape            of its decode part, or of the whole step in the paged read; None if nothing promised a graph
    replayed         a graph ran that part
    hit              all graphs it took were recorded before this step
    chunks_replayed  a graph ran the prompt chunks too
    """

    tokens: tuple[NewToken, ...]
    shape: Shape | None
    replayed: bool
    hit: bool
    pad_rows: int
    seconds: float
    chunks_replayed: bool = False


class StepRunner(Protocol):
    """The device side of an engine, whichever way it reads K/V: `runner.Runner`, `paged_runner.PagedRunner`."""

    @property
    def graphs(self) -> GraphSet[Any] | None: ...

    @property
    def shapes(self) -> ShapeSet | PagedShapes | None: ...

    @property
    def cache(self) -> BatchedPagedKVCache: ...

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run `plan`; returns when its tokens are on the host."""

    @property
    def starts(self) -> bool:
        """Whether steps can run beside their caller."""

    def start(self, plan: StepPlan, notify_fd: int) -> Any:
        """Start `plan` and return what `finish` takes once `notify_fd` has been written to."""

    def finish(self, step: Any) -> StepOutcome: ...

    def settle(self) -> None:
        """Return once no started step runs."""

    def capture(self, shape: Any, origin: Origin) -> Any:
        """Record the graph of a shape on a plan that is all padding."""

    def time_recording(self, shape: Any) -> float:
        """Seconds one recording of a shape takes; the recording is thrown away."""

    def check_mirror(self, sequence: Sequence) -> None:
        """Raises AssertionError unless the slot table says of a sequence what its block table says."""

    def probe_prefill(self, token_ids: list[int], slots: list[int]) -> None: ...

    def probe_decode(self, shape: Any, slots: list[int]) -> Tensor: ...

    def probe_end(self) -> None: ...


def edit_slots(plan: StepPlan, slots: SlotTable, last_tokens: Tensor) -> None:
    """Bring the slot table, and what else is kept per table row, to where the plan's rows say it is."""
    for row in plan.clears:
        slots.clear(row)
    for a, b in plan.swaps:
        slots.swap(a, b)
        last_tokens[[a, b]] = last_tokens[[b, a]]
    for row, start, each in plan.slot_writes:
        slots.write(row, start, each)


def check_mirror(sequence: Sequence, slots: SlotTable) -> None:
    """Raises AssertionError unless the sequence's table row holds its block table's slots, as far as they are computed,
    and the sink after that."""
    row = slots.row(sequence.table_row, slots.shape[1]).tolist()
    assert row[: sequence.computed] == sequence.table.slots(0, sequence.computed), "slot and block table differ"
    assert set(row[sequence.computed :]) <= {slots.sink_slot}, "the slot table names slots not computed yet"


def row_sampling(sequence: Sequence) -> RowSampling:
    params = sequence.params
    return RowSampling(params.temperature, params.top_k, params.top_p, params.min_p, sequence.seed, sequence.choice)


class Chooser:
    """Takes a step's tokens, and chooses again for the sequences whose choice needs their history."""

    def __init__(self, last_tokens: Tensor) -> None:
        self._last_tokens = last_tokens

    def choose(self, sequences: tuple[Sequence, ...], logits: Tensor, tokens: Tensor) -> list[NewToken]:
        """`logits` `[rows, vocab]` and `tokens` `[rows]`, of which the first rows are those of `sequences`."""
        chosen = tokens[: len(sequences)].tolist()
        return [
            self._choose_with_history(sequence, logits[row])
            if sequence.params.needs_full_head
            else NewToken(sequence, chosen[row])
            for row, sequence in enumerate(sequences)
        ]

    def _choose_with_history(self, sequence: Sequence, row: Tensor) -> NewToken:
        """The program chose from the plain logits; choose again from the adjusted ones, and remember it."""
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
        chosen = int(sample_rows(adjusted.unsqueeze(0), inputs.sampling(1), position))
        self._last_tokens[sequence.table_row] = chosen
        if params.logprobs is None:
            return NewToken(sequence, chosen)
        logprobs = torch.log_softmax(row, dim=-1)
        top = logprobs.topk(params.logprobs)
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return NewToken(sequence, chosen, float(logprobs[chosen]), pairs)
