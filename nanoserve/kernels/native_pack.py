"""Weights in the layout the native kernels stream (csrc/ns_abi.h, ns_kind): 16 output rows a tile, groups of 32 inputs.

Quantised GGUF blocks are repacked, never requantised: every value is exactly what the block says. Block-wise scale
products of the K-quants (fp16 times an integer of 6 or 8 bits) are exact in fp32, so they are stored multiplied out.
Formats as in github.com/ggml-org/ggml, ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoserve.errors import BadCheckpoint
from nanoserve.kernels.native_lib import GROUP, LANES, Kind

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Halves = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
PART = 1 << 20
"""Elements that are packed at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """`[rows, cols]` in tiles. `data` is uint8 `[tiles, tile bytes]`; rows past the last are zero."""

    kind: Kind
    rows: int
    cols: int
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix:
    """Matrices of one input, stacked along the outputs, not one: their kinds differ, or a tile is cut."""

    parts: tuple[PackedMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Take = Callable[[int, int], Tensor]
"""Room for `[rows, row bytes]` uint8 of weights."""


def _own(rows: int, row_bytes: int) -> Tensor:
    return torch.empty((rows, row_bytes), dtype=torch.uint8)


def stack(parts: Sequence[PackedMatrix]) -> PackedMatrix | StackedMatrix:
    """One matrix of all outputs, in order: one to the kernels too wherever its tiles can follow one another. Nothing is
    copied where they do so in memory already."""
    whole = all(part.kind == parts[0].kind for part in parts) and not any(part.rows % LANES for part in parts[:-1])
    if not whole:
        return StackedMatrix(tuple(parts))
    if len(parts) == 1:
        return parts[0]
    first, tiles = parts[0].data, sum(len(part.data) for part in parts)
    joined = first.untyped_storage().data_ptr()
    side_by_side = all(part.data.untyped_storage().data_ptr() == joined for part in parts) and all(
        left.data.data_ptr() + left.nbytes == right.data.data_ptr() for left, right in pairwise(parts)
    )
    data = (
        first.as_strided((tiles, first.shape[1]), first.stride())
        if side_by_side
        else torch.cat([part.data for part in parts])
    )
    return PackedMatrix(parts[0].kind, sum(part.rows for part in parts), parts[0].cols, data)


@dataclass(frozen=True, slots=True)
class Groups:
    """A quantised matrix by rows: quants `[rows, groups, words]`, where a word is four consecutive inputs (8 bits) or
    inputs 4j … 4j+3 and 16+4j … 16+4j+3 in low and high nibbles (4 bits); scales `[rows, groups]` each."""

    kind: Kind
    quants: Words
    scales: tuple[Halves | Floats, ...]


def packed_bytes(rows: int, cols: int) -> int:
    """No matrix of that many rows and columns, packed, is larger."""
    return -(-rows // LANES) * LANES * (cols + 2 * GROUP) * 4


def pack_gguf(
    raw: Bytes,
    type_name: str,
    rows: int,
    cols: int,
    order: npt.NDArray[np.int64] | None = None,
    *,
    take: Take = _own,
) -> PackedMatrix:
    """Repack a GGUF tensor's bytes; `order` takes its rows in another order (undoing Llama's interleaved heads).

    Raises BadCheckpoint for a type without a native layout.
    """
    if type_name not in _READERS:
        raise BadCheckpoint(f"tensor type {type_name} has no native layout; supported are {', '.join(_READERS)}")
    blocks = raw.reshape(rows, -1)
    # A part of the rows at a time, in whole tiles: what a reader spreads out on the way is several times the result.
    step = max(1, PART // (cols * LANES)) * LANES
    parts = (slice(start, start + step) for start in range(0, rows, step))
    packed: Tensor | None = None
    for part in parts:
        groups = _READERS[type_name](blocks[part] if order is None else blocks[order[part]])
        if packed is None:
            packed = take(-(-rows // LANES), _tile_bytes(groups))
        _fill(packed.numpy()[part.start // LANES : -(-part.stop // LANES)], groups)
    assert packed is not None, "a matrix without rows"
    return PackedMatrix(groups.kind, rows, cols, packed)


def pack_dense(weight: Tensor, *, take: Take = _own) -> PackedMatrix:
    """`[rows, cols]` fp32, fp16 or bf16, kept as it is."""
    rows, cols = weight.shape
    kind = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}[weight.dtype]
    tiles = -(-rows // LANES)
    depth = cols + cols % 2 if kind is Kind.BF16 else cols
    padded = weight
    if (rows, cols) != (tiles * LANES, depth):
        padded = torch.zeros((tiles * LANES, depth), dtype=weight.dtype)
        padded[:rows, :cols] = weight
    if kind is Kind.BF16:
        packed = padded.view(tiles, LANES, depth // 2, 2).permute(0, 2, 1, 3)
    else:
        packed = padded.view(tiles, LANES, depth).permute(0, 2, 1)
    data = take(tiles, depth * LANES * weight.itemsize)
    data.view(weight.dtype).view(packed.shape).copy_(packed)
    return PackedMatrix(kind, rows, cols, data)


def unpack(matrix: PackedMatrix) -> Tensor:
    """`[rows, cols]` fp32: what the packed values stand for."""
    if matrix.kind.is_dense:
        return _unpack_dense(matrix)
    bits4 = matrix.kind in (Kind.Q4Z, Kind.Q4M, Kind.Q4MF)
    groups, tiles = matrix.cols // GROUP, matrix.data.shape[0]
    words = 4 if bits4 else 8
    wide = matrix.kind in (Kind.Q4MF, Kind.Q8MF, Kind.Q8G)
    pair = 1 if matrix.kind in (Kind.Q4Z, Kind.Q8Z) else 2
    data = matrix.data.numpy().reshape(tiles, (groups + 1) // 2, -1)
    quants = data[..., : words * 128].reshape(tiles, -1, words, LANES, 4)[:, :groups].transpose(0, 3, 1, 2, 4)
    values = np.concatenate([quants & 15, quants >> 4], axis=3) if bits4 else quants
    values = values.reshape(tiles * LANES, groups, GROUP).astype(np.float32)
    scales = np.ascontiguousarray(data[..., words * 128 :]).view(np.float32 if wide else np.float16)
    scales = scales.reshape(tiles, -1, pair, LANES)[:, :groups].transpose(0, 3, 1, 2).reshape(-1, groups, pair)
    scales = scales.astype(np.float32)
    if matrix.kind is Kind.Q8G:
        out = (values - 128).reshape(-1, groups, 2, 16) * scales[..., None]
    elif pair == 2:
        out = values * scales[..., :1] + scales[..., 1:]
    else:
        out = (values - (8 if bits4 else 128)) * scales
    return torch.from_numpy(out.reshape(tiles * LANES, matrix.cols)[: matrix.rows].copy())


def _unpack_dense(matrix: PackedMatrix) -> Tensor:
    dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[matrix.kind]
    tiles = matrix.data.shape[0]
    data = matrix.data.view(dtype)
    if matrix.kind is Kind.BF16:
        rows = data.view(tiles, -1, LANES, 2).permute(0, 2, 1, 3)
    else:
        rows = data.view(tiles, -1, LANES).permute(0, 2, 1)
    return rows.reshape(tiles * LANES, -1)[: matrix.rows, : matrix.cols].float()


def _tile_bytes(groups: Groups) -> int:
    _, count, words = groups.quants.shape
    return int((count + 1) // 2 * 2 * (words * 64 + len(groups.scales) * LANES * groups.scales[0].itemsize))


def _fill(out: Bytes, groups: Groups) -> None:
    """Write `out` `[tiles, bytes]`: word j of 16 rows is one 64-byte vector; the scales of two groups follow their
    quants."""
    rows, count, words = groups.quants.shape
    tiles, pairs, planes = -(-rows // LANES), (count + 1) // 2, len(groups.scales)
    view = out.reshape(tiles, pairs, -1)
    # What no copy below reaches is cleared by hand: clearing all of it would cost more than the packing.
    view[rows // LANES :] = 0
    view[:, count // 2 :] = 0
    quants = view[..., : words * 128].view(np.uint32).reshape(tiles, pairs, 2, words, LANES)
    scales = view[..., words * 128 :].view(groups.scales[0].dtype).reshape(tiles, pairs, 2, planes, LANES)
    whole = rows // LANES
    for start, height, part in ((0, LANES, slice(0, whole)), (whole * LANES, rows % LANES, slice(whole, tiles))):
        n = part.stop - part.start
        if not n or not height:
            continue
        stop = start + n * height
        for odd in (0, 1):
            used = len(range(odd, count, 2))
            source = groups.quants[start:stop, odd::2].reshape(n, height, used, words)
            quants[part, :used, odd, :, :height] = source.transpose(0, 2, 3, 1)
            for index, scale in enumerate(groups.scales):
                plane = scale[start:stop, odd::2].reshape(n, height, used)
                scales[part, :used, odd, index, :height] = plane.transpose(0, 2, 1)


def _q4_0(blocks: Bytes) -> Groups:
    halves = blocks.view(np.uint16).reshape(blocks.shape[0], -1, 9)
    return Groups(Kind.Q4Z, np.ascontiguousarray(halves[..., 1:]).view(np.uint32), (halves[..., 0],))


def _q4_1(blocks: Bytes) -> Groups:
    words = blocks.view(np.uint32).reshape(blocks.shape[0], -1, 5)
    scales = blocks.view(np.uint16).reshape(blocks.shape[0], -1, 10)
    return Groups(Kind.Q4M, words[..., 1:], (scales[..., 0], scales[..., 1]))


def _q8_0(blocks: Bytes) -> Groups:
    halves = blocks.view(np.uint16).reshape(blocks.shape[0], -1, 17)
    # A new array: ascontiguousarray of a single block is the mapped file itself.
    quants = np.ascontiguousarray(halves[..., 1:]).view(np.uint32) ^ np.uint32(0x80808080)
    return Groups(Kind.Q8Z, quants, (halves[..., 0],))


def _fifth_bits(nibbles: Bytes, high: Bytes) -> Bytes:
    """`[…, 32]` from 16 bytes of nibbles and 4 bytes of fifth bits, bit i for element i."""
    low = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    values: Bytes = low | (np.unpackbits(high, axis=-1, bitorder="little") << 4)
    return values


def _q5_0(blocks: Bytes) -> Groups:
    parts = blocks.reshape(blocks.shape[0], -1, 22)
    values = _fifth_bits(parts[..., 6:], parts[..., 2:6]) + np.uint8(112)  # q - 16, with 128 added
    return Groups(Kind.Q8Z, values.view(np.uint32), (_halves(parts, 0),))


def _q5_1(blocks: Bytes) -> Groups:
    parts = blocks.reshape(blocks.shape[0], -1, 24)
    values = _fifth_bits(parts[..., 8:], parts[..., 4:8])
    return Groups(Kind.Q8M, values.view(np.uint32), (_halves(parts, 0), _halves(parts, 2)))


def _halves(parts: Bytes, at: int) -> Halves:
    """`[rows, blocks]`: the fp16 at byte `at` of every block, as its bits."""
    bits: Halves = np.ascontiguousarray(parts[..., at : at + 2]).view(np.uint16)[..., 0]
    return bits


def _k_scales(parts: Bytes) -> tuple[Floats, Floats]:
    """(scales, minima) `[rows, blocks, 8]` of Q4_K and Q5_K: d and dmin times six-bit integers, packed in 12 bytes."""
    d = _halves(parts, 0).view(np.float16).astype(np.float32)[..., None]
    dmin = _halves(parts, 2).view(np.float16).astype(np.float32)[..., None]
    packed = parts[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minimum = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return d * scale.astype(np.float32), -dmin * minimum.astype(np.float32)


def _by_group(values: Floats) -> Floats:
    return values.reshape(values.shape[0], -1)


def _q4_k(blocks: Bytes) -> Groups:
    rows = blocks.shape[0]
    parts = blocks.reshape(rows, -1, 144)
    scale, minimum = _k_scales(parts)
    pairs = parts[..., 16:].reshape(rows, -1, 4, 32)  # low nibbles: group 2i, high: group 2i + 1
    values = np.stack([pairs & 15, pairs >> 4], axis=3).reshape(rows, -1, GROUP)
    nibbles = values[..., :16] | (values[..., 16:] << 4)
    return Groups(Kind.Q4MF, nibbles.view(np.uint32), (_by_group(scale), _by_group(minimum)))


def _q5_k(blocks: Bytes) -> Groups:
    rows = blocks.shape[0]
    parts = blocks.reshape(rows, -1, 176)
    scale, minimum = _k_scales(parts)
    pairs = parts[..., 48:].reshape(rows, -1, 4, 32)
    low = np.stack([pairs & 15, pairs >> 4], axis=3).reshape(rows, -1, 8, GROUP)
    bits = (
        np.unpackbits(parts[..., 16:48], axis=-1, bitorder="little").reshape(rows, -1, GROUP, 8).transpose(0, 1, 3, 2)
    )
    values = np.ascontiguousarray(low | (bits << 4)).reshape(rows, -1, GROUP)
    return Groups(Kind.Q8MF, values.view(np.uint32), (_by_group(scale), _by_group(minimum)))


def _q6_k(blocks: Bytes) -> Groups:
    rows = blocks.shape[0]
    parts = blocks.reshape(rows, -1, 210)
    low = parts[..., :128].reshape(rows, -1, 2, 2, 32)  # half of the block, 32 of each 64 bytes
    high = parts[..., 128:192].reshape(rows, -1, 2, 32)
    nibbles = np.stack([low[..., 0, :] & 15, low[..., 1, :] & 15, low[..., 0, :] >> 4, low[..., 1, :] >> 4], axis=3)
    tops = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=3)
    values = (nibbles | (tops << 4)).reshape(rows, -1, GROUP) + np.uint8(96)  # q - 32, with 128 added
    d = _halves(parts, 208).view(np.float16).astype(np.float32)[..., None]
    scale = (d * parts[..., 192:208].view(np.int8).astype(np.float32)).reshape(rows, -1, 2)
    return Groups(Kind.Q8G, values.view(np.uint32), (scale[..., 0], scale[..., 1]))


_READERS: Mapping[str, Callable[[Bytes], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
NATIVE_TYPES = tuple(_READERS)
