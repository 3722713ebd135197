"""Memory for K/V and for weights: on a CPU mapped only where it is touched, and on huge pages where there are any.

A step reads all of both. With small pages it waits for the page table, and for a core's prefetcher, which stops at the
end of each: one core reads 22 GB/s of small pages and 30 of huge ones (docs/BENCHMARKS.md, "Engine").
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

HUGE = 4 << 20
"""From this many bytes on, huge pages are asked for."""
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Python's default is memory that a child would share, which Linux keeps on small pages."""
LINE = 64
ROOM = 256 << 20
"""Bytes of address space that weights get at a time; what they do not fill is never touched."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A contiguous zero tensor. Raises MemoryError.

    torch.zeros writes every page of it, and so does the C library's calloc where it has freed memory at hand: only a
    mapping of its own is sure to take nothing yet.
    """
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes or (device is not None and device.type != "cpu"):
        return torch.zeros(shape, dtype=dtype, device=device)
    return _mapped(nbytes).view(dtype).view(shape)


class WeightMemory:
    """Room for weights, never given back: they lie in the order in which it was taken."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """The next `nbytes` taken will lie side by side. Raises MemoryError."""
        if nbytes > len(self._room):
            self._room = _mapped(max(nbytes, ROOM))

    def take(self, rows: int, row_bytes: int) -> Tensor:
        """`[rows, row_bytes]` uint8 zeros, at the beginning of a cache line. Raises MemoryError."""
        nbytes = rows * row_bytes
        self.reserve(nbytes)
        taken, self._room = self._room[:nbytes], self._room[-(-nbytes // LINE) * LINE :]
        return taken.view(rows, row_bytes)


def _mapped(nbytes: int) -> Tensor:
    """`[nbytes]` uint8 zeros in a mapping of their own."""
    try:
        memory = mmap.mmap(-1, nbytes, **PRIVATE)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"no {nbytes:,} bytes of address space: {error}") from error
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
