"""StepInputs: the numbers of one step, in buffers that never move, so that a recorded graph reads each step's values.

Sole owner of those buffers. Written only between replays. Per step row: ids, positions, write slots, context lengths
and table rows; per logit row: how its token is chosen; per table row: the newest token, which the program writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoserve.buckets import PagedPlan
from nanoserve.ops import SamplingWindow, StepWindow

_ROW_FIELDS = 5
_FLOAT_FIELDS = 3
_INT_FIELDS = 4


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one logit row's token is chosen. `position` is that of the token to come."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0


GREEDY = RowSampling()


class StepInputs:
    """Fixed-address inputs of at most `max_rows` step rows, each of which may be a logit row.

    rows   [5, max_rows] int64: input_ids, positions, write_slots, context_lens, table_rows
    ints   [4, max_rows] int64 (top_k, seed, choice, logit_rows); floats [3, max_rows] fp32 (temperature, top_p, min_p)
    counts [2] int64: how many step rows, and how many logit rows, are real
    `last_tokens` [max_sequences + 1] int64 is shared by all StepInputs of an engine; its last entry is the pad rows'.
    """

    def __init__(self, max_rows: int, last_tokens: Tensor) -> None:
        device = last_tokens.device
        self.max_rows = max_rows
        self.last_tokens = last_tokens
        self._rows = torch.zeros((_ROW_FIELDS, max_rows), dtype=torch.int64, device=device)
        self._ints = torch.zeros((_INT_FIELDS, max_rows), dtype=torch.int64, device=device)
        self._floats = torch.zeros((_FLOAT_FIELDS, max_rows), dtype=torch.float32, device=device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._rows[_ROW_FIELDS - 1].fill_(last_tokens.shape[0] - 1)  # a row that no step writes is a pad row

    @property
    def addresses(self) -> tuple[int, ...]:
        """What a recorded graph is bound to (`check_addresses_stable`)."""
        return tuple(
            tensor.data_ptr() for tensor in (self._rows, self._ints, self._floats, self._counts, self.last_tokens)
        )

    def window(self, rows: int) -> StepWindow:
        ids, positions, slots, lens, table = (self._rows[field, :rows] for field in range(_ROW_FIELDS))
        return StepWindow(ids, positions, slots, lens, table, self.last_tokens)

    def sampling(self, rows: int) -> SamplingWindow:
        top_k, seed, choice = (self._ints[field, :rows] for field in range(3))
        temperature, top_p, min_p = (self._floats[field, :rows] for field in range(_FLOAT_FIELDS))
        return SamplingWindow(temperature, top_k, top_p, min_p, seed, choice)

    def logit_rows(self, rows: int) -> Tensor:
        """`[rows]` int64: which step row each logit row is (paged read)."""
        return self._ints[3, :rows]

    @property
    def real_rows(self) -> Tensor:
        """`[1]` int64, what pad rows are cut off by at replay (paged read)."""
        return self._counts[:1]

    @property
    def real_logit_rows(self) -> Tensor:
        return self._counts[1:]

    def write_step(self, plan: PagedPlan, sampling: Sequence[RowSampling]) -> None:
        """Write a whole paged step; `sampling` has an entry for each real logit row."""
        self.write_rows(plan.input_ids, plan.positions, plan.write_slots, plan.context_lens, plan.table_rows)
        if plan.head_rows:
            self.write_sampling([*sampling, *(GREEDY,) * (plan.head_rows - len(sampling))])
            self._ints[3, : plan.head_rows].copy_(torch.tensor(plan.logit_rows, dtype=torch.int64))
        self._counts.copy_(torch.tensor([plan.real_rows, plan.real_logit_rows], dtype=torch.int64))

    def write_rows(
        self,
        input_ids: Sequence[int],
        positions: Sequence[int],
        write_slots: Sequence[int],
        context_lens: Sequence[int],
        table_rows: Sequence[int],
    ) -> None:
        """Write the first `len(input_ids)` rows; all five have the same length."""
        values = np.array([input_ids, positions, write_slots, context_lens, table_rows], dtype=np.int64)
        self._rows[:, : values.shape[1]].copy_(torch.from_numpy(values))

    def write_sampling(self, rows: Sequence[RowSampling]) -> None:
        """Write the first `len(rows)` logit rows."""
        count = len(rows)
        ints = np.array([[r.top_k, r.seed, r.choice] for r in rows], dtype=np.int64).T
        floats = np.array([[r.temperature, r.top_p, r.min_p] for r in rows], dtype=np.float32).T
        self._ints[:3, :count].copy_(torch.from_numpy(np.ascontiguousarray(ints)))
        self._floats[:, :count].copy_(torch.from_numpy(np.ascontiguousarray(floats)))


def new_last_tokens(max_sequences: int, device: torch.device | str) -> Tensor:
    """`[max_sequences + 1]` int64: the newest token of each table row; the last entry is written by pad rows."""
    return torch.zeros(max_sequences + 1, dtype=torch.int64, device=device)
