"""SlotTable: the one map from (table row, position) to slot, on the device, at an address that recorded graphs keep.

Sole writer of that map. Entries without a slot are the sink. Graphs read windows on the table, so it is written only
between replays, and `to`, which reallocates, must never run once a window has been handed out (`check_table_stable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class SlotTable:
    """`[max_sequences, max_width]` int64, contiguous; filled with `sink_slot`."""

    def __init__(self, max_sequences: int, max_width: int, sink_slot: int, device: torch.device | str = "cpu") -> None:
        self.sink_slot = sink_slot
        self._table = torch.full((max_sequences, max_width), sink_slot, dtype=torch.int64, device=device)
        self._host = self._host_view()

    @property
    def address(self) -> int:
        return self._table.data_ptr()

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self._table.shape
        return rows, width

    @property
    def device(self) -> torch.device:
        return self._table.device

    def to(self, device: torch.device | str) -> None:
        """Move the table, which reallocates it: every window handed out before is stale afterwards."""
        self._table = self._table.to(device)
        self._host = self._host_view()

    def _host_view(self) -> npt.NDArray[np.int64] | None:
        """The same memory as a NumPy array, where the CPU can write it: a tenth of what a tensor's assignment takes."""
        return self._table.numpy() if self._table.device.type == "cpu" else None

    @property
    def _best(self) -> Any:
        """What to assign to where both would do."""
        return self._table if self._host is None else self._host

    def write(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Assign the slots of positions start … start + len(slots) - 1 of a table row."""
        if self._host is not None:
            self._host[row, start : start + len(slots)] = slots
            return
        self._table[row, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int64, device=self.device)

    def clear(self, row: int) -> None:
        self._best[row] = self.sink_slot

    def swap(self, a: int, b: int) -> None:
        """Exchange two table rows (row compaction)."""
        self._best[[a, b]] = self._best[[b, a]]

    def read(self, rows: Sequence[int], *, pad_rows: int = 0, width: int) -> Tensor:
        """The window `[len(rows) + pad_rows, width]` on the table: a view, never a copy.

        `rows` must be a prefix of the table (0, 1, …). It may be empty only if something is padded: a window over no
        rows at all is a step with nothing in it. Raises ValueError otherwise, or if the window leaves the table.
        """
        if not rows and pad_rows <= 0:
            raise ValueError("a slot window over no rows and no pad rows; plan at least one row")
        if tuple(rows) != tuple(range(len(rows))):
            raise ValueError(f"rows {tuple(rows)} are not a prefix of the slot table; compact the table first")
        total = len(rows) + pad_rows
        if total > self._table.shape[0] or not 0 < width <= self._table.shape[1]:
            raise ValueError(f"window [{total}, {width}] does not lie within the slot table {self.shape}")
        return self._table[:total, :width]

    def row(self, row: int, width: int) -> Tensor:
        """`[width]`: the slots of one table row, as a view (prefill reads one sequence at a time)."""
        return self._table[row, :width]
