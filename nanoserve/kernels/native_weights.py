"""`ops.WeightMaker` of the native kernels: quantised blocks are repacked, floats keep their type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nanoserve.kernels.native_lib import LANES
from nanoserve.kernels.native_pack import PackedMatrix, pack_dense, pack_gguf
from nanoserve.ops import StoredTensor

DENSE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class PackedStack:
    """Matrices stacked along their outputs that cannot be one: their kinds differ, or one ends inside a tile."""

    parts: tuple[PackedMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class NativeWeights:
    """Vectors are fp32. K/V is bf16, whatever the weights are."""

    dtype = torch.bfloat16

    def vector(self, parts: Sequence[StoredTensor]) -> Tensor:
        return torch.cat([part.fetch().float().flatten() for part in parts])

    def matrix(self, parts: Sequence[StoredTensor]) -> PackedMatrix | PackedStack:
        packed = [_pack(part) for part in parts]
        if all(a.kind is b.kind and a.rows % LANES == 0 for a, b in pairwise(packed)):
            if len(packed) == 1:
                return packed[0]
            rows = sum(each.rows for each in packed)
            data = np.concatenate([each.data.numpy() for each in packed])
            return PackedMatrix(packed[0].kind, rows, packed[0].cols, torch.from_numpy(data))
        return PackedStack(tuple(packed))

    def table(self, part: StoredTensor) -> PackedMatrix | Tensor:
        """Packed where it is quantised; plain rows where it is floats."""
        return _pack(part) if part.blocks() is not None else _dense(part)

    def tied(self, table: PackedMatrix | Tensor, part: StoredTensor) -> PackedMatrix:
        return pack_dense(table) if isinstance(table, Tensor) else table


def _pack(part: StoredTensor) -> PackedMatrix:
    rows, cols = part.shape
    blocks = part.blocks()
    if blocks is None:
        return pack_dense(_dense(part))
    return pack_gguf(blocks.raw, blocks.type_name, rows, cols, blocks.order)


def _dense(part: StoredTensor) -> Tensor:
    tensor = part.fetch()
    return (tensor if tensor.dtype in DENSE else tensor.float()).contiguous()
