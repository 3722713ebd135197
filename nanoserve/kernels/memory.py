"""Memory for K/V: zeroed, and on a CPU mapped only where it is touched, so that a pool costs what its tokens take."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

HUGE = 4 << 20
"""From this many bytes on, huge pages are asked for."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A contiguous zero tensor. Raises MemoryError.

    torch.zeros writes every page of it, and so does the C library's calloc where it has freed memory at hand: only a
    mapping of its own is sure to take nothing yet.
    """
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes or (device is not None and device.type != "cpu"):
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"no {nbytes:,} bytes of address space: {error}") from error
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # a step reads the pool all over: fewer page table entries to look up
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
