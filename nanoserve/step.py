"""What every step does on the device, whichever way it reads K/V: table row edits before, choosing tokens after."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from nanoserve.buckets import PagedShapes, Shape, ShapeSet
from nanoserve.cache import BatchedPagedKVCache
from nanoserve.graphs import GraphSet, Origin, RecordingTime
from nanoserve.history import HistoryTable
from nanoserve.inputs import RowSampling
from nanoserve.ops import HistoryWindow, Logprobs, Ops, SamplingWindow, StepWindow
from nanoserve.sequence import NewToken, Sequence, State, StepPlan
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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a program leaves behind, `[rows, ...]`; pad rows hold anything.

    tokens    int64
    logits    [rows, vocab] fp32: the model's own
    logprobs  of a full head only
    """

    tokens: Tensor
    logits: Tensor
    logprobs: Logprobs | None = None


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

    def start(self, plan: StepPlan, notify_fd: int, *, ahead: bool = False) -> Any:
        """Start `plan` and return what `finish` takes once `notify_fd` has been written to. `ahead`: the step before
        still runs, and this one begins at its end."""

    def finish(self, step: Any) -> StepOutcome: ...

    def settle(self) -> None:
        """Return once no started step runs."""

    def capture(self, shape: Any, origin: Origin) -> Any:
        """Record the graph of a shape on a plan that is all padding."""

    def time_recording(self, shape: Any) -> RecordingTime:
        """What a recording of a shape takes; it is thrown away."""

    def check_mirror(self, sequence: Sequence, planned: int) -> None:
        """Raises AssertionError unless the slot table says of a sequence what its block table says."""

    def probe_prefill(self, token_ids: list[int], slots: list[int]) -> None: ...

    def probe_decode(self, shape: Any, slots: list[int]) -> Tensor: ...

    def probe_end(self) -> None: ...


def edit_table_rows(plan: StepPlan, slots: SlotTable, history: HistoryTable, last_tokens: Tensor) -> None:
    """Bring the slot table, and what else is kept per table row, to where the plan's rows say it is."""
    for row in plan.clears:
        slots.clear(row)
        history.clear(row)
    for a, b in plan.swaps:
        slots.swap(a, b)
        history.swap(a, b)
        last_tokens[[a, b]] = last_tokens[[b, a]]
    for row, start, each in plan.slot_writes:
        slots.write(row, start, each)
    for sequence, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True):
        if chunk.last and sequence.params.needs_full_head:
            history.write(chunk.table_row, sequence.tokens, sequence.prompt_tokens, sequence.params)


def check_mirror(sequence: Sequence, planned: int, slots: SlotTable, history: HistoryTable) -> None:
    """Raises AssertionError unless the sequence's table row holds its block table's slots of the tokens `planned`, and
    the sink after that; and its tokens, if their history bears on its choices and it has made one."""
    row = slots.row(sequence.table_row, slots.shape[1]).tolist()
    assert row[:planned] == sequence.table.slots(0, planned), "slot and block table differ"
    assert set(row[planned:]) <= {slots.sink_slot}, "the slot table names slots that no step was planned for"
    known = sequence.state is State.DECODE and sequence.params.needs_full_head
    kept = history.row(sequence.table_row, len(sequence.tokens))
    assert kept == (sequence.tokens if known else None), "the history is not the sequence's"


def row_sampling(sequence: Sequence) -> RowSampling:
    params = sequence.params
    return RowSampling(params.temperature, params.top_k, params.top_p, params.min_p, sequence.seed, sequence.choice)


def choose(
    ops: Ops,
    logits: Tensor,
    sampling: SamplingWindow,
    step: StepWindow,
    index: Tensor | None = None,
    history: HistoryWindow | None = None,
) -> StepOutput:
    """The head's second half: a token for each row of `logits`, left where the next step finds it. `index` says which
    step row a logit row is; with `history` it is the full head."""
    adjusted = logits if history is None else ops.adjust_logits(logits, history, step, index)
    tokens = ops.sample(adjusted, sampling, step.context_lens, index)
    ops.remember(step.last_tokens, step.table_rows, tokens, index)
    if history is None:
        return StepOutput(tokens, logits)
    ops.append_tokens(history, tokens, step, index)
    return StepOutput(tokens, logits, ops.logprobs(logits, tokens, history, step, index))


def new_tokens(sequences: SequenceOf[Sequence], output: StepOutput) -> list[NewToken]:
    """What was chosen for `sequences`, which are the first rows of `output`."""
    count = len(sequences)
    tokens = output.tokens[:count].tolist()
    if output.logprobs is None:
        return [NewToken(sequence, token) for sequence, token in zip(sequences, tokens, strict=True)]
    found = output.logprobs
    chosen, ids, top = found.chosen[:count].tolist(), found.top_ids[:count].tolist(), found.top[:count].tolist()
    return [
        NewToken(sequence, token)
        if (wanted := sequence.params.logprobs) is None
        else NewToken(sequence, token, chosen[row], tuple(zip(ids[row][:wanted], top[row][:wanted], strict=True)))
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
    ]
