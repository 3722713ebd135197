"""`ops.WeightMaker` of the native kernels: quantised blocks are repacked, floats keep their type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoserve.kernels.memory import WeightMemory
from nanoserve.kernels.native_pack import (
    PackedMatrix,
    StackedMatrix,
    pack_dense,
    pack_gguf,
    packed_bytes,
    stack,
)
from nanoserve.ops import QuantisedBlocks, StoredTensor

DENSE = (torch.float32, torch.float16, torch.bfloat16)


class NativeWeights:
    """Vectors are fp32. K/V is bf16, whatever the weights are. Matrices lie in the order in which a step reads them."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        self._memory = WeightMemory()

    def vector(self, parts: Sequence[StoredTensor]) -> Tensor:
        return torch.cat([part.fetch().float().flatten() for part in parts])

    def matrix(self, parts: Sequence[StoredTensor]) -> PackedMatrix | StackedMatrix:
        self._memory.reserve(sum(packed_bytes(*part.shape) for part in parts))
        return stack([self._pack(part) for part in parts])

    def table(self, part: StoredTensor) -> PackedMatrix | Tensor:
        """Packed where it is quantised; plain rows where it is floats."""
        blocks = part.blocks()
        return _dense(part) if blocks is None else self._repack(part, blocks)

    def tied(self, table: PackedMatrix | Tensor, part: StoredTensor) -> PackedMatrix:
        return pack_dense(table, take=self._memory.take) if isinstance(table, Tensor) else table

    def _pack(self, part: StoredTensor) -> PackedMatrix:
        blocks = part.blocks()
        return pack_dense(_dense(part), take=self._memory.take) if blocks is None else self._repack(part, blocks)

    def _repack(self, part: StoredTensor, blocks: QuantisedBlocks) -> PackedMatrix:
        rows, cols = part.shape
        return pack_gguf(blocks.raw, blocks.type_name, rows, cols, blocks.order, take=self._memory.take)


def _dense(part: StoredTensor) -> Tensor:
    tensor = part.fetch()
    return (tensor if tensor.dtype in DENSE else tensor.float()).contiguous()
