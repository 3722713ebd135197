"""Memory for recorded programs: tensors whose place is handed back when the last view of them is dropped.

While a forward is recorded its ops allocate outputs here. Records run in the order they were recorded in, so a place
that was free when an op was recorded is free when it runs. The storage never moves; pages are touched at first use.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import insort
from collections.abc import Callable

import torch
from torch import Tensor

from nanoserve.errors import OutOfMemory

ALIGNMENT = 64


class Arena:
    """`size` bytes of address space, of which `peak` were ever in use. First fit; neighbours merge when freed."""

    def __init__(self, size: int) -> None:
        try:
            self._memory = mmap.mmap(-1, size)
        except (OSError, ValueError) as error:
            raise OutOfMemory(
                f"no {size:,} bytes of address space for a step's scratch ({error}); lower the step's rows"
            ) from error
        self._bytes = (ctypes.c_uint8 * size).from_buffer(self._memory)
        self.size = size
        self.address = ctypes.addressof(self._bytes)
        self.peak = 0
        self._free: list[tuple[int, int]] = [(0, size)]

    @property
    def used(self) -> int:
        return self.size - sum(length for _, length in self._free)

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` bytes, aligned to a cache line. Raises OutOfMemory."""
        wanted = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        for index, (start, length) in enumerate(self._free):
            if length >= wanted:
                if length == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (start + wanted, length - wanted)
                self.peak = max(self.peak, start + wanted)
                return start
        raise OutOfMemory(f"a step's scratch needs {nbytes:,} bytes more than its {self.size:,}; lower the step's rows")

    def give(self, start: int, nbytes: int) -> None:
        length = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        insort(self._free, (start, length))
        merged: list[tuple[int, int]] = []
        for at, size in self._free:
            if merged and merged[-1][0] + merged[-1][1] == at:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((at, size))
        self._free = merged

    def tensor(self, rows: int, cols: int, dtype: torch.dtype, released: Callable[[int], None] | None = None) -> Tensor:
        """`[rows, cols]`, uninitialised. Once the tensor and every view of it are gone, `released(address)` is called
        and its place is free. `released` is a bound method; its object may be gone by then, and so may the arena."""
        nbytes = rows * cols * dtype.itemsize
        start = self.take(nbytes)
        place = (ctypes.c_uint8 * nbytes).from_buffer(self._memory, start)
        told = weakref.WeakMethod(released) if released is not None else None
        weakref.finalize(place, _release, weakref.ref(self), start, nbytes, told)
        return torch.frombuffer(place, dtype=dtype).view(rows, cols)


def _release(
    holder: weakref.ref[Arena], start: int, nbytes: int, told: weakref.WeakMethod[Callable[[int], None]] | None
) -> None:
    """Weak, because whoever owns an arena may own its tensors too, and a finalizer's arguments are never garbage."""
    if (arena := holder()) is None:
        return
    arena.give(start, nbytes)
    if told is not None and (released := told()) is not None:
        released(arena.address + start)
