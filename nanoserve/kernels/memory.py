"""Memory for K/V and for weights, on a CPU mapped only where it is touched.

Weights lie on huge pages where there are any: every step reads all of them in order, and a core's prefetcher stops at
the end of a page. K/V, whose blocks are read a few lines at a time, gains nothing by them, and pays: a pool that
grows into a new huge page in every layer at once halts a step for as long as they all take to be zeroed.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Python's default is memory that a child would share, which has no huge pages."""
SMALL_PAGES, HUGE_PAGES = (getattr(mmap, f"MADV_{name}", None) for name in ("NOHUGEPAGE", "HUGEPAGE"))
"""What the kernel is told, where it can be."""
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
    return _mapped(nbytes, SMALL_PAGES).view(dtype).view(shape)


class WeightMemory:
    """Room for weights, never given back: they lie in the order in which it was taken."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """The next `nbytes` taken will lie side by side. Raises MemoryError."""
        if nbytes > len(self._room):
            self._room = _mapped(max(nbytes, ROOM), HUGE_PAGES)

    def take(self, rows: int, row_bytes: int) -> Tensor:
        """`[rows, row_bytes]` uint8 zeros, at the beginning of a cache line. Raises MemoryError."""
        nbytes = rows * row_bytes
        self.reserve(nbytes)
        taken, self._room = self._room[:nbytes], self._room[-(-nbytes // LINE) * LINE :]
        return taken.view(rows, row_bytes)


def _mapped(nbytes: int, advice: int | None) -> Tensor:
    """`[nbytes]` uint8 zeros in a mapping of their own."""
    try:
        memory = mmap.mmap(-1, nbytes, **PRIVATE)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"no {nbytes:,} bytes of address space: {error}") from error
    if advice is not None:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)
