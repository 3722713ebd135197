"""StepInputs: the numbers of one step, in buffers that never move, so that a recorded graph reads each step's values.

Sole owner of those buffers. The live ones are written only between replays. Per step row: ids, positions, write slots,
context lengths and table rows; per logit row: how its token is chosen; per table row: the newest token, which the
program writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoserve.buckets import PagedPlan
from nanoserve.ops import SamplingWindow, StepWindow

_ROW_FIELDS = 5
_FLOAT_FIELDS = 3
_INT_FIELDS = 4


class RowSampling(NamedTuple):
    """How one logit row's token is chosen."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0


GREEDY = RowSampling()


class StepNumbers:
    """The numbers of one step in one stretch of memory, so that they can be moved by one copy. All are int64 but the
    floats, fp32.

    rows   [5, max_rows]: input_ids, positions, write_slots, context_lens, table_rows
    ints   [4, max_rows]: top_k, seed, choice, logit_rows; floats [3, max_rows]: temperature, top_p, min_p
    counts [2]: how many step rows, and how many logit rows, are real
    """

    def __init__(self, max_rows: int, pad_row: int, device: torch.device) -> None:
        words = (_ROW_FIELDS + _INT_FIELDS) * max_rows + 2
        self.whole = torch.zeros(words + -(-_FLOAT_FIELDS * max_rows // 2), dtype=torch.int64, device=device)
        first, second = _ROW_FIELDS * max_rows, words - 2
        self.rows = self.whole[:first].view(_ROW_FIELDS, max_rows)
        self.ints = self.whole[first:second].view(_INT_FIELDS, max_rows)
        self.counts = self.whole[second:words]
        floats = self.whole[words:].view(torch.float32)
        self.floats = floats[: _FLOAT_FIELDS * max_rows].view(_FLOAT_FIELDS, max_rows)
        self.rows[_ROW_FIELDS - 1].fill_(pad_row)  # a row that no step writes is a pad row
        self._parts = tuple(map(_writer, (self.rows, self.ints, self.floats, self.counts)))
        self._sampling: list[RowSampling] = []

    def write_rows(self, *fields: Sequence[int]) -> None:
        """The five fields of the first rows, as many as each has entries."""
        self._parts[0](slice(None), np.array(fields, dtype=np.int64))

    def write_sampling(self, rows: list[RowSampling]) -> None:
        """The first `len(rows)` logit rows. Most steps choose as the one before did, and write nothing."""
        if rows == self._sampling:
            return
        temperature, top_k, top_p, min_p, seed, choice = zip(*rows, strict=True)
        self._parts[1](slice(3), np.array((top_k, seed, choice), dtype=np.int64))
        self._parts[2](slice(None), np.array((temperature, top_p, min_p), dtype=np.float32))
        self._sampling = rows

    def become(self, other: StepNumbers) -> None:
        """All of `other` is about to be copied here by a program: know what will stand here then."""
        self._sampling = other._sampling

    def write_logit_rows(self, logit_rows: Sequence[int]) -> None:
        self._parts[1](3, np.array(logit_rows, dtype=np.int64))

    def write_counts(self, real_rows: int, real_logit_rows: int) -> None:
        self._parts[3](..., np.array([real_rows, real_logit_rows], dtype=np.int64))


class StepInputs:
    """Fixed-address inputs of at most `max_rows` step rows, each of which may be a logit row.

    `live` is what graphs read. What is written `ahead`, while a step runs, waits in one of `waiting` until a program
    copies it over. The loop may be told that the step before is over sooner than that, and write the next one ahead: so
    that one takes the other place.
    `last_tokens` [max_sequences + 1] int64 is shared by all StepInputs of an engine; its last entry is the pad rows'.
    """

    def __init__(self, max_rows: int, last_tokens: Tensor) -> None:
        pad_row, device = last_tokens.shape[0] - 1, last_tokens.device
        self.max_rows = max_rows
        self.last_tokens = last_tokens
        self.live = StepNumbers(max_rows, pad_row, device)
        self.waiting = tuple(StepNumbers(max_rows, pad_row, device) for _ in range(2))
        self.place = 0
        """Of `waiting`: where the newest step that was written ahead is."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """What a recorded graph is bound to (`check_addresses_stable`)."""
        return self.live.whole.data_ptr(), self.last_tokens.data_ptr()

    def window(self, rows: int, *, ahead: bool = False) -> StepWindow:
        numbers = self.waiting[self.place] if ahead else self.live
        ids, positions, slots, lens, table = (numbers.rows[field, :rows] for field in range(_ROW_FIELDS))
        return StepWindow(ids, positions, slots, lens, table, self.last_tokens)

    def sampling(self, rows: int) -> SamplingWindow:
        top_k, seed, choice = (self.live.ints[field, :rows] for field in range(3))
        temperature, top_p, min_p = (self.live.floats[field, :rows] for field in range(_FLOAT_FIELDS))
        return SamplingWindow(temperature, top_k, top_p, min_p, seed, choice)

    def logit_rows(self, rows: int) -> Tensor:
        """`[rows]` int64: which step row each logit row is (paged read)."""
        return self.live.ints[3, :rows]

    @property
    def real_rows(self) -> Tensor:
        """`[1]` int64, what pad rows are cut off by at replay (paged read)."""
        return self.live.counts[:1]

    @property
    def real_logit_rows(self) -> Tensor:
        return self.live.counts[1:]

    def write_step(self, plan: PagedPlan, sampling: list[RowSampling], *, ahead: bool = False) -> None:
        """Write a whole paged step; `sampling` has an entry for each real logit row."""
        self.place = (self.place + ahead) % len(self.waiting)
        numbers = self.waiting[self.place] if ahead else self.live
        numbers.write_rows(plan.input_ids, plan.positions, plan.write_slots, plan.context_lens, plan.table_rows)
        if plan.head_rows:
            numbers.write_sampling([*sampling, *(GREEDY,) * (plan.head_rows - len(sampling))])
            numbers.write_logit_rows(plan.logit_rows)
        numbers.write_counts(plan.real_rows, plan.real_logit_rows)
        if ahead:
            self.live.become(numbers)

    def write_rows(
        self,
        input_ids: Sequence[int],
        positions: Sequence[int],
        write_slots: Sequence[int],
        context_lens: Sequence[int],
        table_rows: Sequence[int],
    ) -> None:
        """Write the first `len(input_ids)` rows; all five have the same length."""
        self.live.write_rows(input_ids, positions, write_slots, context_lens, table_rows)

    def write_sampling(self, rows: list[RowSampling]) -> None:
        """Write the first `len(rows)` logit rows."""
        self.live.write_sampling(rows)


def _writer(part: Tensor) -> Callable[[Any, npt.NDArray[Any]], None]:
    """Writes `values` to the first columns of the fields named: through NumPy where the CPU holds the memory, which is
    ten times as fast as a tensor's assignment."""
    host = part.numpy() if part.device.type == "cpu" else None

    def write(fields: Any, values: npt.NDArray[Any]) -> None:
        if host is not None:
            host[fields, : values.shape[-1]] = values
        else:
            part[fields, : values.shape[-1]] = torch.from_numpy(values).to(part.device)

    return write


def new_last_tokens(max_sequences: int, device: torch.device | str) -> Tensor:
    """`[max_sequences + 1]` int64: the newest token of each table row; the last entry is written by pad rows."""
    return torch.zeros(max_sequences + 1, dtype=torch.int64, device=device)
