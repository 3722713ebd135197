"""Read a GGUF file's header and hand out its tensors' bytes, memory-mapped. Little endian, versions 2 and 3.

Owns the container format (github.com/ggml-org/ggml, docs/gguf.md) and nothing of what it holds: which keys a model
needs is `models.config`, what the bytes of a tensor mean is `models.gguf_loader`. Every count and length is checked
against what is left of the file before it is believed, so a damaged file costs one line and no memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from nanoserve.errors import BadCheckpoint

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
DEFAULT_ALIGNMENT = 32

_STRING = 8
_ARRAY = 9
# value type number -> its code, which struct and numpy share
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALAR_STRUCTS = {number: struct.Struct("<" + code) for number, code in _SCALARS.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# number -> (name, elements per block, bytes per block), as ggml numbers its tensor types
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in numpy order, `[out, in]` for a weight; `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file: `metadata` values are Python ints, floats, bools, strings and lists of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    mapped: mmap.mmap

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, `[nbytes]` uint8, as a read-only view of the mapped file. `release` comes first, so that
        reading tensor by tensor keeps one of them resident."""
        self.release()
        tensor = self.tensors[name]
        return np.frombuffer(self.mapped, np.uint8, tensor.nbytes, tensor.offset)

    def release(self) -> None:
        """Give back the memory of what has been read. Views stay valid: the system reads their pages again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: str | Path) -> GGUFFile:
    """Map the file and parse its header; 49 thousand tokens take some 30 ms.

    Raises BadCheckpoint, naming the file and the field or tensor, for anything that is not a whole, well-formed GGUF.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size < 24:
            raise BadCheckpoint(f"{path} is {size} bytes; a GGUF header needs at least 24: download the file again")
        with path.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(path, mapped)
    tensor_count, key_count = _read_preamble(cursor)
    metadata = _read_metadata(cursor, key_count)
    infos = _read_tensor_infos(cursor, tensor_count)
    tensors = _place_tensors(cursor, infos, metadata)
    return GGUFFile(path, metadata, tensors, mapped)


class _Cursor:
    """A position in the mapped file that cannot be moved past its end."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.view = memoryview(mapped)
        self.size = len(self.view)
        self.at = 0
        self.reading = "the header"

    def fail(self, what: str) -> NoReturn:
        raise BadCheckpoint(f"{self.path}: {self.reading}: {what}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            self.fail(
                f"{what} needs {count} bytes but {self.size - self.at} are left of {self.size}: "
                "the file is truncated or damaged, download it again"
            )

    def u32(self) -> int:
        return int(self.scalar(_U32))

    def u64(self) -> int:
        return int(self.scalar(_U64))

    def scalar(self, layout: struct.Struct) -> Any:
        self.need(layout.size, "a value")
        (value,) = layout.unpack_from(self.view, self.at)
        self.at += layout.size
        return value

    def string(self) -> str:
        start = self.at + _U64.size
        if start > self.size:
            self.need(_U64.size, "a value")
        end = start + _U64.unpack_from(self.view, self.at)[0]
        self.at = start
        if end > self.size:
            self.need(end - start, "a string")
        self.at = end
        try:
            return str(self.view[start:end], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"a string at byte {start} is not UTF-8 ({error.reason})")

    def strings(self, count: int) -> list[str]:
        self.need(count * 8, f"an array of {count} strings")
        return [self.string() for _ in range(count)]

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth + 1)
        layout = _SCALAR_STRUCTS.get(kind)
        if layout is None:
            self.fail(f"value type {kind} is unknown; GGUF defines 0 to 12")
        return self.scalar(layout)

    def array(self, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"arrays nest deeper than {MAX_ARRAY_DEPTH}")
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            self.need(count * 12, f"an array of {count} arrays")
            return [self.array(depth + 1) for _ in range(count)]
        code = _SCALARS.get(kind)
        if code is None:
            self.fail(f"array type {kind} is unknown; GGUF defines 0 to 12")
        dtype = np.dtype("<" + code)
        self.need(count * dtype.itemsize, f"an array of {count} values")
        values: list[Any] = np.frombuffer(self.view, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return values


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """(tensor count, metadata key count), after the magic and the version have been accepted."""
    magic = bytes(cursor.view[:4])
    if magic != MAGIC:
        cursor.fail(f"it starts with {magic!r}, a GGUF file with {MAGIC!r}")
    cursor.at = 4
    version = cursor.u32()
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        cursor.fail(
            "the file is big endian; only little endian files are supported"
            if big_endian
            else f"GGUF version {version} is not supported; versions {VERSIONS[0]} and {VERSIONS[1]} are"
        )
    tensor_count, key_count = cursor.u64(), cursor.u64()
    # The smallest entries there can be: key length + type + one byte; name length + dimensions + one + type + offset.
    cursor.need(key_count * 13 + tensor_count * 32, f"a header of {key_count} keys and {tensor_count} tensors")
    return tensor_count, key_count


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.reading = f"metadata key {index} of {count}"
        key = cursor.string()
        cursor.reading = f"metadata key {key!r}"
        if key in metadata:
            cursor.fail("it occurs twice")
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def _read_tensor_infos(cursor: _Cursor, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    """(name, shape in numpy order, type number, offset in the data section) of every tensor."""
    infos = []
    for index in range(count):
        cursor.reading = f"tensor entry {index} of {count}"
        name = cursor.string()
        cursor.reading = f"tensor {name!r}"
        dimensions = cursor.u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            cursor.fail(f"it has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        shape = tuple(reversed([cursor.u64() for _ in range(dimensions)]))
        infos.append((name, shape, cursor.u32(), cursor.u64()))
    return infos


def _place_tensors(
    cursor: _Cursor, infos: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]
) -> dict[str, GGUFTensor]:
    cursor.reading = "metadata key 'general.alignment'"
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        cursor.fail(f"{alignment!r} is not a positive integer")
    start = math.ceil(cursor.at / alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_number, offset in infos:
        cursor.reading = f"tensor {name!r}"
        if name in tensors:
            cursor.fail("it occurs twice")
        if type_number not in TENSOR_TYPES:
            cursor.fail(f"its type number {type_number} is unknown")
        type_name, block, block_bytes = TENSOR_TYPES[type_number]
        if 0 in shape or shape[-1] % block:
            cursor.fail(f"shape {list(shape)} does not hold whole {type_name} blocks of {block} elements")
        if offset % alignment:
            cursor.fail(f"its offset {offset} is not a multiple of the alignment {alignment}")
        nbytes = math.prod(shape) // block * block_bytes
        cursor.at = min(start + offset, cursor.size)
        cursor.need(nbytes, "its data")
        tensors[name] = GGUFTensor(name, shape, type_name, start + offset, nbytes)
    return tensors
