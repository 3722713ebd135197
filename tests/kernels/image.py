"""A launch as a file: its records, what each may touch, and the memory behind it, for driver.c to replay.

`operands` is an account of the ABI (csrc/ns_abi.h) that is independent of how programs are recorded: from a record's
sizes and the step's own numbers it says which bytes that record may read or write. Everything else is out of bounds,
though it may well be mapped: the arena's other values, pad rows, K/V of other sequences.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.kernels import native_lib as lib
from nanoserve.kernels.native_lib import GROUP, LANES, QGROUP_BYTES, ROWS, Kind, Op

COUNTS_BYTES, PENALTIES_BYTES = 24, 12
"""ns_history_counts, ns_penalties."""
READ, SCRATCH = 0, 1
"""Scratch: depends on the number of threads, so a replay's end is compared without it, and it comes uninitialised."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`base`: where the record's pointer points, if that is before the first byte it may touch."""

    address: int
    nbytes: int
    use: int = READ
    base: int = 0


def integers(address: int | None, count: int) -> list[int]:
    return list((c_int64 * count).from_address(address)) if address and count else []


def matrix_bytes(w: Any, *, plain: bool) -> int:
    """ns_kind: tiles of 16 outputs, in pairs of groups of 32 inputs. `plain`: an embedding's dense rows."""
    kind = Kind(w.kind)
    itemsize = 4 if kind is Kind.F32 else 2
    if kind.is_dense and plain:
        return int(w.rows * w.cols * itemsize)
    if kind.is_dense:
        depth = w.cols + (w.cols % 2 if kind is Kind.BF16 else 0)
        return int(-(-w.rows // LANES) * LANES * depth * itemsize)
    quants = 256 if kind in (Kind.Q4Z, Kind.Q4M, Kind.Q4MF) else 512
    wide = 4 if kind in (Kind.Q4MF, Kind.Q8MF, Kind.Q8G) else 2
    planes = 1 if kind in (Kind.Q4Z, Kind.Q8Z) else 2
    pairs = (w.cols // GROUP + 1) // 2
    return int(-(-w.rows // LANES) * pairs * 2 * (quants + LANES * wide * planes))


def lines(address: int | None, rows: int, pitch: int, length: int, itemsize: int = 4) -> Iterator[Extent]:
    """Rows of `length` items that lie `pitch` items apart."""
    if address and pitch == length:
        yield Extent(address, rows * length * itemsize)
    elif address:
        for row in range(rows):
            yield Extent(address + row * pitch * itemsize, length * itemsize)


def quants(address: int | None, rows: int, cols: int) -> Iterator[Extent]:
    return lines(address, -(-rows // ROWS), cols // GROUP, cols // GROUP, QGROUP_BYTES)


def entries(address: int | None, indices: Sequence[int]) -> Iterator[Extent]:
    for index in sorted(set(indices)):
        yield Extent(address + 8 * index, 8, base=address) if address else Extent(0, 0)


def plan_bytes(rows: int) -> int:
    return lib.PLAN_BYTES + rows * lib.ROW_GROUP_BYTES


def _plan(r: Any, rows: int) -> Iterator[Extent]:
    yield from lines(r.table_rows, rows, 1, 1, 8)
    yield from lines(r.context_lens, rows, 1, 1, 8)
    yield Extent(r.plan, plan_bytes(rows), SCRATCH)


def _embed(r: Any, rows: int) -> Iterator[Extent]:
    yield Extent(r.table.data, matrix_bytes(r.table, plain=True))
    yield from lines(r.ids, rows, 1, 1, 8)
    newest = [row for row, token in enumerate(integers(r.ids, rows)) if token < 0]
    yield from entries(r.table_rows, newest)
    table_rows = integers(r.table_rows, rows)
    yield from entries(r.last_tokens, [table_rows[row] for row in newest])
    yield from lines(r.out, rows, r.ld, r.table.cols)


def _norm(r: Any, rows: int) -> Iterator[Extent]:
    yield from lines(r.x, rows, r.x_ld, r.cols)
    yield from lines(r.weight, 1, r.cols, r.cols)
    for each in (r.residual, r.total, r.out):
        yield from lines(each, rows, r.cols, r.cols)
    yield from quants(r.quants, rows, r.cols)


def _quant(r: Any, rows: int) -> Iterator[Extent]:
    yield from lines(r.x, rows, r.x_ld, r.cols)
    yield from quants(r.quants, rows, r.cols)
    pitch = r.cols + r.cols % 2
    yield from lines(r.halves, rows, pitch, pitch, 2)


def _linear(r: Any, rows: int) -> Iterator[Extent]:
    outputs = r.w.rows if r.gate < 0 else r.w.rows // 2
    pitch = r.w.cols + r.w.cols % 2
    yield Extent(r.w.data, matrix_bytes(r.w, plain=False))
    yield from quants(r.quants, rows, r.w.cols)
    yield from lines(r.halves, rows, pitch, pitch, 2)
    yield from lines(r.x, rows, r.x_ld, r.w.cols)
    yield from lines(r.bias, 1, r.w.rows, r.w.rows)
    yield from lines(r.out, rows, r.out_ld, outputs)
    yield from quants(r.out_quants, rows, outputs)


def _gate(r: Any, rows: int) -> Iterator[Extent]:
    yield from lines(r.x, rows, r.x_ld, 2 * r.n)
    yield from lines(r.out, rows, r.n, r.n)
    yield from quants(r.quants, rows, r.n)


def _rope(r: Any, rows: int) -> Iterator[Extent]:
    width, half = (r.heads + 2 * r.kv_heads) * r.head_dim, r.head_dim // 2
    yield from lines(r.qkv, rows, r.qkv_ld, width)
    for each in (r.q_norm, r.k_norm):
        yield from lines(each, 1, r.head_dim, r.head_dim)
    yield from lines(r.positions, rows, 1, 1, 8)
    yield from lines(r.write_slots, rows, 1, 1, 8)
    for position in integers(r.positions, rows):
        for each in (r.cos, r.sin):
            yield Extent(each + position * half * 4, half * 4, base=each)
    yield from _blocks(r, {slot // ROWS for slot in integers(r.write_slots, rows)})


def _blocks(r: Any, blocks: set[int]) -> Iterator[Extent]:
    """The K and V of whole blocks, `[kv_heads, head_dim, 16]` bf16."""
    size = r.kv_heads * r.head_dim * ROWS * 2
    for block in sorted(blocks):
        for each in (r.keys, r.values):
            yield Extent(each + block * size, size, base=each)


def _attention(r: Any, rows: int) -> Iterator[Extent]:
    width = r.heads * r.head_dim
    yield from lines(r.q, rows, r.q_ld, width)
    yield from lines(r.table_rows, rows, 1, 1, 8)
    yield from lines(r.context_lens, rows, 1, 1, 8)
    # A group of rows reads what lies between its first key and its last, whichever row's window that is in.
    spans: dict[int, tuple[int, int]] = {}
    for table_row, lens in zip(integers(r.table_rows, rows), integers(r.context_lens, rows), strict=True):
        first, last = spans.get(table_row, (lens, 0))
        spans[table_row] = min(first, max(0, lens - r.window) if r.window else 0), max(last, lens)
    seen: set[int] = set()
    for table_row, (first, last) in spans.items():
        at = r.table + table_row * r.table_ld * 8
        seen |= {slot // ROWS for slot in integers(at, last)[first // ROWS * ROWS :: ROWS]}
        yield Extent(at, last * 8, base=r.table)
    yield from _blocks(r, seen)
    yield Extent(r.plan, plan_bytes(rows), SCRATCH)
    splits = -(-max(integers(r.context_lens, rows)) // lib.SPLIT)
    yield Extent(r.partials, min(rows * r.heads * splits, lib.PLAN_PARTIALS) * (r.head_dim + 2) * 4, SCRATCH)
    yield from lines(r.out, rows, width, width)
    yield from quants(r.quants, rows, width)


def _gather(r: Any, rows: int) -> Iterator[Extent]:
    yield from lines(r.index, rows, 1, 1, 8)
    for row in integers(r.index, rows):
        yield Extent(r.x + row * r.x_ld * 4, r.cols * 4, base=r.x)
    yield from lines(r.out, rows, r.cols, r.cols)
    yield from quants(r.quants, rows, r.cols)


def _sample(r: Any, rows: int) -> Iterator[Extent]:
    yield from lines(r.logits, rows, r.vocab, r.vocab)
    for each in (r.temperature, r.top_p, r.min_p):
        yield from lines(each, rows, 1, 1)
    for each in (r.top_k, r.seed, r.choice, r.index, r.tokens):
        yield from lines(each, rows, 1, 1, 8)
    yield from entries(r.positions, integers(r.index, rows) or range(rows))


def _remember(r: Any, rows: int) -> Iterator[Extent]:
    yield from lines(r.tokens, rows, 1, 1, 8)
    yield from lines(r.index, rows, 1, 1, 8)
    chosen = integers(r.index, rows) or list(range(rows))
    yield from entries(r.table_rows, chosen)
    yield from entries(r.last_tokens, [integers(r.table_rows + 8 * row, 1)[0] for row in chosen])


def _of_table_rows(r: Any, chosen: Sequence[int], **sizes: int) -> Iterator[Extent]:
    """What the records of a full head take of a history, by the name of the field: so many bytes a table row."""
    for row in {integers(r.table_rows + 8 * row, 1)[0] for row in chosen}:
        for name, size in sizes.items():
            yield Extent(getattr(r, name) + row * size, size, base=getattr(r, name))


def _adjust(r: Any, rows: int) -> Iterator[Extent]:
    chosen = integers(r.index, rows) or list(range(rows))
    yield from lines(r.logits, rows, r.vocab, r.vocab)
    yield from lines(r.out, rows, r.vocab, r.vocab)
    yield from lines(r.index, rows, 1, 1, 8)
    yield from entries(r.table_rows, chosen)
    yield from entries(r.positions, chosen)
    yield from _of_table_rows(r, chosen, counts=COUNTS_BYTES, penalties=PENALTIES_BYTES, tokens=4 * r.tokens_ld)
    yield from _of_table_rows(r, chosen, bias_ids=4 * r.bias_ld, bias_values=4 * r.bias_ld)


def _logprobs(r: Any, rows: int) -> Iterator[Extent]:
    chosen = integers(r.index, rows) or list(range(rows))
    yield from lines(r.logits, rows, r.vocab, r.vocab)
    yield from lines(r.tokens, rows, 1, 1, 8)
    yield from lines(r.index, rows, 1, 1, 8)
    yield from entries(r.table_rows, chosen)
    yield from _of_table_rows(r, chosen, counts=COUNTS_BYTES)
    yield from lines(r.chosen, rows, 1, 1)
    for each in (r.top_ids, r.top):
        yield from lines(each, rows, r.top_ld, r.top_ld)


def _append(r: Any, rows: int) -> Iterator[Extent]:
    chosen = integers(r.index, rows) or list(range(rows))
    yield from lines(r.chosen, rows, 1, 1, 8)
    yield from lines(r.index, rows, 1, 1, 8)
    yield from entries(r.table_rows, chosen)
    yield from entries(r.positions, chosen)
    for row in chosen:
        (table_row,), (position,) = integers(r.table_rows + 8 * row, 1), integers(r.positions + 8 * row, 1)
        if position < r.tokens_ld:
            yield Extent(r.tokens + 4 * (table_row * r.tokens_ld + position), 4, base=r.tokens)


def _copy(r: Any, rows: int) -> Iterator[Extent]:
    yield Extent(r.source, r.bytes)
    yield Extent(r.target, r.bytes)


OPERANDS: dict[Op, tuple[str, Callable[[Any, int], Iterator[Extent]]]] = {
    Op.PLAN: ("plan", _plan), Op.EMBED: ("embed", _embed), Op.NORM: ("norm", _norm), Op.QUANT: ("quant", _quant),
    Op.LINEAR: ("linear", _linear), Op.GATE: ("gate", _gate), Op.ROPE: ("rope", _rope),
    Op.ATTENTION: ("attention", _attention), Op.GATHER: ("gather", _gather), Op.SAMPLE: ("sample", _sample),
    Op.REMEMBER: ("remember", _remember), Op.ADJUST: ("adjust", _adjust), Op.LOGPROBS: ("logprobs", _logprobs),
    Op.APPEND: ("append", _append), Op.COPY: ("copy", _copy),
}  # fmt: skip
"""Of every op: the union member that holds its record, and what it may touch."""


def live_rows(record: lib.Record) -> int:
    live = integers(record.head.live, 1)
    return min(live[0], record.head.rows) if live else int(record.head.rows)


def operands(record: lib.Record) -> list[Extent]:
    name, account = OPERANDS[Op(record.head.op)]
    rows = live_rows(record)
    made = [Extent(record.head.live, 8)] if record.head.live else []
    return made + ([each for each in account(getattr(record, name), rows) if each.nbytes] if rows else [])


def pointers(record: lib.Record) -> list[int]:
    """Byte offsets of the record's pointers that are not null."""
    name, _ = OPERANDS[Op(record.head.op)]
    return [at for at in _pointers(type(getattr(record, name))) if c_void_p.from_buffer(record, at).value]


def _pointers(kind: Any, base: int = 0) -> Iterator[int]:
    for name, each in kind._fields_:
        at = base + getattr(kind, name).offset
        if each is c_void_p:
            yield at
        elif issubclass(each, ctypes.Structure):
            yield from _pointers(each, at)


@dataclass(slots=True)
class Image:
    """One launch, as it was before it ran. `records` are its segments', one after the other.

    rows    of each record: how many are real
    shown   what whoever films wants to know about it
    """

    records: list[lib.Record] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    shown: set[str] = field(default_factory=set)
    extents: list[list[Extent]] = field(default_factory=list)
    regions: list[tuple[int, bytes | int]] = field(default_factory=list)
    scratch_bytes: int = 0

    @classmethod
    def take(cls, launch: lib.Launch, scratch_bytes: int) -> Image:
        image = cls(scratch_bytes=scratch_bytes)
        for segment in launch.segments:
            for record in (lib.Record * segment.count).from_address(segment.records):
                image.records.append(lib.Record.from_buffer_copy(record))
                image.rows.append(live_rows(record))
                image.extents.append(operands(record))
        for use in (READ, SCRATCH):
            mine = [each for extents in image.extents for each in extents if each.use == use]
            for start, stop in _union(mine):
                image.regions.append((start, ctypes.string_at(start, stop - start) if use == READ else stop - start))
        return image

    def write(self, path: Path) -> Path:
        """Little endian: see driver.c, `load`."""
        parts = [struct.pack("<4q", len(self.regions), len(self.records), lib.LAYOUT[0], self.scratch_bytes)]
        for address, content in self.regions:
            stored = isinstance(content, bytes)
            parts.append(struct.pack("<3q", address, len(content) if isinstance(content, bytes) else content, stored))
            parts += [content] if isinstance(content, bytes) else []
        for record, extents in zip(self.records, self.extents, strict=True):
            at = pointers(record)
            parts += [bytes(record), struct.pack(f"<{2 + len(at)}q", len(at), len(extents), *at)]
            parts += [struct.pack("<2q", each.address, each.nbytes) for each in extents]
        path.write_bytes(b"".join(parts))
        return path


def _union(extents: Sequence[Extent]) -> list[tuple[int, int]]:
    """Ascending, disjoint and not touching."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((each.base or each.address, each.address + each.nbytes) for each in extents):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


class CameraPool:
    """A pool that takes an image of a launch before it runs it; not of one that shows nothing that others did not."""

    def __init__(self, pool: lib.Pool, images: list[Image], look: Callable[[Image], set[str]]) -> None:
        self._pool = pool
        self._images = images
        self._look = look
        self._scratch_bytes = 0
        self.threads = pool.threads

    def reserve(self, scratch_bytes: int) -> None:
        self._scratch_bytes = max(self._scratch_bytes, scratch_bytes)
        self._pool.reserve(scratch_bytes)

    def launch(self, launch: lib.Launch, notify_fd: int = -1) -> None:
        image = Image.take(launch, self._scratch_bytes)
        image.shown = self._look(image)
        if image.shown - set().union(*(each.shown for each in self._images)) or not image.shown:
            self._images.append(image)
        self._pool.launch(launch, notify_fd)

    def wait(self) -> None:
        self._pool.wait()

    def run(self, launch: lib.Launch) -> None:
        self.launch(launch)
        self.wait()

    def close(self) -> None:
        self._pool.close()


class CameraLibrary:
    """A native library whose pools take images. `look` says what one shows, while its memory is as it was."""

    def __init__(self, library: lib.NativeLibrary, look: Callable[[Image], set[str]] = lambda image: set()) -> None:
        self._library = library
        self._look = look
        self.images: list[Image] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def pool(self, threads: int) -> CameraPool:
        return CameraPool(self._library.pool(threads), self.images, self._look)
