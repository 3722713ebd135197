"""HistoryTable: the tokens of each table row so far, and how they and its request's wishes bear on its next choice.

Holds the tokens themselves, not a count for each token of the vocabulary. A history is short, its newest entry is all
that a step adds, and a position says how much of it counts: so the decode program appends to it, a token chosen in vain
is written over, and nothing is counted twice when a preempted sequence comes back. Only rows whose sequences need the
full head are ever written.

The runner writes a row when its sequence's prompt ends, between replays; the program appends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nanoserve.kernels.memory import lazy_zeros
from nanoserve.ops import HistoryWindow
from nanoserve.request import MAX_BIASES, SamplingParams

NOTHING_COUNTS = (0, 0, -1)
NO_PENALTIES = (1.0, 0.0, 0.0)


class HistoryTable:
    """Rows for `max_sequences` table rows and one for pad rows, of `max_tokens` tokens. `window` is bound by recorded
    graphs; a row that nobody wrote changes no choice."""

    def __init__(self, max_sequences: int, max_tokens: int, device: torch.device) -> None:
        rows = max_sequences + 1
        self.window = HistoryWindow(
            tokens=lazy_zeros((rows, max_tokens), torch.int32, device),
            counts=torch.tensor([NOTHING_COUNTS] * rows, dtype=torch.int64, device=device),
            penalties=torch.tensor([NO_PENALTIES] * rows, dtype=torch.float32, device=device),
            bias_ids=lazy_zeros((rows, MAX_BIASES), torch.int32, device),
            bias_values=lazy_zeros((rows, MAX_BIASES), torch.float32, device),
        )
        self._written: set[int] = set()

    @property
    def addresses(self) -> tuple[int, ...]:
        """What a recorded graph is bound to (`check_addresses_stable`)."""
        return tuple(tensor.data_ptr() for tensor in self._tensors())

    def bears_on(self, table_rows: Iterable[int]) -> bool:
        """Whether a token of one of the rows takes the full head."""
        return bool(self._written) and not self._written.isdisjoint(table_rows)

    def write(self, row: int, tokens: Sequence[int], prompt_tokens: int, params: SamplingParams) -> None:
        """`tokens` are all that is known of the row's sequence, the first `prompt_tokens` of them its prompt."""
        window, biases = self.window, params.logit_bias
        top = params.logprobs if params.logprobs is not None else -1
        window.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        window.counts[row] = torch.tensor((prompt_tokens, len(biases), top))
        window.penalties[row] = torch.tensor(
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        )
        if biases:
            ids, values = zip(*biases, strict=True)
            window.bias_ids[row, : len(biases)] = torch.tensor(ids, dtype=torch.int32)
            window.bias_values[row, : len(biases)] = torch.tensor(values)
        self._written.add(row)

    def clear(self, row: int) -> None:
        if row in self._written:
            self._written.remove(row)
            self.window.counts[row] = torch.tensor(NOTHING_COUNTS)
            self.window.penalties[row] = torch.tensor(NO_PENALTIES)

    def swap(self, a: int, b: int) -> None:
        """Exchange two table rows (row compaction)."""
        moved = {a: b, b: a}
        if self._written.isdisjoint(moved):
            return
        for tensor in self._tensors():
            tensor[[a, b]] = tensor[[b, a]]
        self._written = {moved.get(row, row) for row in self._written}

    def row(self, row: int, length: int) -> list[int] | None:
        """The first `length` tokens of a row; None if nobody wrote it."""
        return self.window.tokens[row, :length].tolist() if row in self._written else None

    def _tensors(self) -> tuple[Tensor, ...]:
        window = self.window
        return window.tokens, window.counts, window.penalties, window.bias_ids, window.bias_values
