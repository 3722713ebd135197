"""Quantising at load: a checkpoint's float matrices as GGUF blocks of 32 inputs, `w4` (Q4_1) or `w8` (Q8_0).

The blocks go the way of a GGUF file's own: the native kernels repack them exactly, the reference kernels dequantise the
same values and so remain their oracle. Block formats as in github.com/ggml-org/ggml, ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoserve.errors import BadCheckpoint
from nanoserve.models.assembly import EMBED, HEAD, Checkpoint
from nanoserve.models.gguf_loader import read_tensor
from nanoserve.ops import QuantisedBlocks

Bytes = npt.NDArray[np.uint8]
Format = Literal["w4", "w8"]
FLOATS = ("F64", "F32", "F16", "BF16")
GROUP = 32
CHUNK = 4096  # groups: what the search works on stays in a core's second-level cache
MARGINS = (-1.0, -0.6, -0.2, 0.2, 0.6, 1.0, 1.4)
"""Candidate steps of a 4-bit group are its range / (15 + margin): a finer step clips the extremes, a coarser one leaves
codes unused. These seven take the squared error of normally distributed weights 19 % below plain minimum and maximum;
twenty would take it 20 %."""


@dataclass(frozen=True, slots=True)
class Quantise:
    """What becomes of which matrices; None leaves them as they are stored.

    matrices  every float matrix of the layers. The embedding, whose error would be in every hidden state and, where it
              is tied, in every logit, gets 8 bits with either format
    head      the output head, whatever it is stored as: it then has a copy of its own even if the model ties it
    """

    matrices: Format | None = None
    head: Format | None = None

    def __bool__(self) -> bool:
        return bool(self.matrices or self.head)


class QuantisedCheckpoint:
    """A `Checkpoint` whose matrices are quantised as they are read. Matrices whose inputs are no multiple of 32 stay as
    they are stored. Raises BadCheckpoint for one with values that no format can hold."""

    def __init__(self, checkpoint: Checkpoint, quantise: Quantise) -> None:
        self._checkpoint = checkpoint
        self._quantise = quantise
        self._head_is_embed = HEAD not in checkpoint.shapes

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(self._checkpoint.shapes)
        if self._quantise.head and self._head_is_embed and EMBED in shapes:
            shapes[HEAD] = shapes[EMBED]
        return shapes

    @property
    def where(self) -> str:
        return self._checkpoint.where

    def label(self, name: str) -> str:
        return self._checkpoint.label(self._stored(name))

    def kind(self, name: str) -> str:
        return self._format(name) or self._checkpoint.kind(self._stored(name))

    def fetch(self, name: str) -> Tensor:
        blocks = self._quantised(name)
        if blocks is None:
            return self._checkpoint.fetch(self._stored(name))
        return read_tensor(blocks.raw.reshape(-1), blocks.type_name, self.shapes[name])

    def blocks(self, name: str) -> QuantisedBlocks | None:
        return self._quantised(name) or self._checkpoint.blocks(self._stored(name))

    def _stored(self, name: str) -> str:
        return EMBED if name == HEAD and self._head_is_embed else name

    def _format(self, name: str) -> Format | None:
        """What `name` is to become; None if it stays what it is."""
        shape = self.shapes[name]
        if len(shape) != 2 or shape[1] % GROUP:
            return None
        if name == HEAD and self._quantise.head:
            return self._quantise.head
        if self._quantise.matrices is None or self._checkpoint.kind(self._stored(name)) not in FLOATS:
            return None
        return "w8" if name in (EMBED, HEAD) else self._quantise.matrices

    def _quantised(self, name: str) -> QuantisedBlocks | None:
        form = self._format(name)
        if form is None:
            return None
        values = self._checkpoint.fetch(self._stored(name))
        quantise, type_name = (quantise_q4_1, "Q4_1") if form == "w4" else (quantise_q8_0, "Q8_0")
        try:
            return QuantisedBlocks(quantise(values), type_name, None)
        except OverflowError as error:
            raise BadCheckpoint(f"{self.label(name)} {error}; drop --quantize and --quantize-head") from error


def quantise_q8_0(weight: Tensor) -> Bytes:
    """`[rows, cols]` of any float dtype as Q8_0 blocks, uint8 `[rows, cols / 32 * 34]`: d = max |w| / 127, q = w / d.

    Raises OverflowError if a value is not finite, or too large for a scale in fp16.
    """

    def encode(groups: Tensor, out: Tensor) -> None:
        scale = _as_half(groups.abs().amax(0) / 127)
        q = (groups * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)
        out[:, :2] = scale.view(-1, 1).view(torch.uint8)
        out[:, 2:] = q.T.view(torch.uint8)

    return _blocks(weight, 34, encode)


def quantise_q4_1(weight: Tensor) -> Bytes:
    """`[rows, cols]` of any float dtype as Q4_1 blocks, uint8 `[rows, cols / 32 * 20]`: w ≈ d · q + m, q in 0 … 15.

    For each of `MARGINS` the codes are rounded and d and m fitted to them by least squares; the best fit's d and m are
    kept, in fp16, and the codes rounded once more. Raises OverflowError as `quantise_q8_0` does.
    """

    def encode(groups: Tensor, out: Tensor) -> None:
        scale, minimum = (_as_half(each) for each in _best_fit(groups))
        q = ((groups - minimum.float()) * _inverse(scale)).round_().clamp_(0, 15).to(torch.uint8)
        out[:, :2] = scale.view(-1, 1).view(torch.uint8)
        out[:, 2:4] = minimum.view(-1, 1).view(torch.uint8)
        out[:, 4:] = (q[:16] | (q[16:] << 4)).T

    return _blocks(weight, 20, encode)


def _best_fit(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(d, m) `[n]` fp32 of the candidate that leaves the least squared error of `groups` `[32, n]`."""
    low = groups.amin(0)
    shifted = groups - low
    span, total = _finite(shifted.amax(0)), shifted.sum(0)
    best, scale, minimum = (torch.full_like(low, -1.0), torch.zeros_like(low), torch.zeros_like(low))
    q, product = torch.empty_like(shifted), torch.empty_like(shifted)
    for margin in MARGINS:
        torch.mul(shifted, (15 + margin) * _inverse(span), out=q)
        q.round_().clamp_(0, 15)
        ones = q.sum(0)
        squares = torch.mul(q, q, out=product).sum(0)
        cross = torch.mul(q, shifted, out=product).sum(0)
        # Normal equations of d·q + m; the error they leave is sum(shifted²) less this gain. A constant group has none.
        d = (GROUP * cross - ones * total) * _inverse(GROUP * squares - ones * ones)
        m = (total - d * ones) / GROUP
        gain = d * cross + m * total
        better = gain > best
        best, scale, minimum = (torch.where(better, new, old) for new, old in ((gain, best), (d, scale), (m, minimum)))
    return scale, minimum + low


def _blocks(weight: Tensor, block_bytes: int, encode: Callable[[Tensor, Tensor], None]) -> Bytes:
    """Encode a chunk of groups at a time: `encode(groups [32, n] fp32, out [n, block_bytes] uint8)`."""
    rows, cols = weight.shape
    groups = weight.reshape(-1, GROUP)
    out = torch.empty((groups.shape[0], block_bytes), dtype=torch.uint8)
    for part in _chunks(groups.shape[0]):
        encode(groups[part].T.to(torch.float32, memory_format=torch.contiguous_format), out[part])
    return out.numpy().reshape(rows, cols // GROUP * block_bytes)


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def _as_half(values: Tensor) -> Tensor:
    return _finite(values.half())


def _finite(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise OverflowError("has values that are not finite or too large for a scale in fp16")
    return values


def _inverse(values: Tensor) -> Tensor:
    """1 / values in fp32, and 0 for 0: a group that is all alike has no scale."""
    wide = values.float()
    return torch.where(wide == 0, 0.0, 1 / wide)
