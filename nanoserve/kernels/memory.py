"""Memory for K/V: zeroed, and on a CPU mapped only where it is touched, so that a pool costs what its tokens take."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A contiguous zero tensor. torch.zeros writes every page of it; the C library's calloc, which NumPy uses, none."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)
