"""The native library as ctypes sees it: a mirror of csrc/ns_abi.h, checked at load, and the thread pool.

Every record class is one op's operands; `PAYLOADS` says which. Pointers are plain addresses: who fills a record keeps
what it points at alive for as long as a program may run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections import deque
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nanoserve.errors import KernelBuildError
from nanoserve.kernels import native_build

if TYPE_CHECKING:
    from collections.abc import Mapping


class Op(IntEnum):
    PLAN = 0
    EMBED = 1
    NORM = 2
    QUANT = 3
    LINEAR = 4
    GATE = 5
    ROPE = 6
    ATTENTION = 7
    GATHER = 8
    SAMPLE = 9
    REMEMBER = 10
    ADJUST = 11
    LOGPROBS = 12
    APPEND = 13
    COPY = 14


class Kind(IntEnum):
    """How a matrix is packed (ns_kind)."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4Z = 3
    Q4M = 4
    Q4MF = 5
    Q8Z = 6
    Q8M = 7
    Q8MF = 8
    Q8G = 9

    @property
    def is_dense(self) -> bool:
        return self <= Kind.BF16


class Gate(IntEnum):
    SILU = 0
    GELU = 1


LANES, GROUP, ROWS, SPLIT = 16, 32, 16, 128
MAX_QUERIES, MAX_HEAD_DIM, PLAN_PARTIALS, MAX_TOP = 32, 256, 16384, 20
QGROUP_BYTES = 832
PLAN_BYTES, ROW_GROUP_BYTES = 8 + 1024 * 12, 16


class _Struct(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]]


class Matrix(_Struct):
    _fields_ = [("kind", c_int32), ("rows", c_int32), ("cols", c_int32), ("reserved", c_int32), ("data", c_void_p)]


class Head(_Struct):
    _fields_ = [("op", c_int32), ("rows", c_int32), ("live", c_void_p)]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names]


class PlanRecord(_Struct):
    _fields_ = [
        ("head", Head), *_pointers("table_rows", "context_lens", "plan"),
        ("rows_per_group", c_int32), ("kv_heads", c_int32), ("group_queries", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class EmbedRecord(_Struct):
    _fields_ = [
        ("head", Head),
        ("table", Matrix),
        *_pointers("ids", "table_rows", "last_tokens", "out"),
        ("ld", c_int64),
    ]


class NormRecord(_Struct):
    _fields_ = [
        ("head", Head), *_pointers("x", "residual", "weight", "total", "out", "quants"),
        ("x_ld", c_int64), ("cols", c_int32), ("eps", c_float),
    ]  # fmt: skip


class QuantRecord(_Struct):
    _fields_ = [
        ("head", Head),
        *_pointers("x", "quants", "halves"),
        ("x_ld", c_int64),
        ("cols", c_int32),
        ("reserved", c_int32),
    ]


class LinearRecord(_Struct):
    _fields_ = [
        ("head", Head), ("w", Matrix), *_pointers("quants", "halves", "x", "bias", "out", "out_quants"),
        ("x_ld", c_int64), ("out_ld", c_int64), ("gate", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class GateRecord(_Struct):
    _fields_ = [("head", Head), *_pointers("x", "out", "quants"), ("x_ld", c_int64), ("n", c_int32), ("gate", c_int32)]


class RopeRecord(_Struct):
    _fields_ = [
        ("head", Head), *_pointers("qkv", "q_norm", "k_norm", "cos", "sin", "positions", "write_slots"),
        *_pointers("keys", "values"),
        ("qkv_ld", c_int64), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("eps", c_float),
    ]  # fmt: skip


class AttentionRecord(_Struct):
    _fields_ = [
        ("head", Head),
        *_pointers("q", "table", "table_rows", "context_lens", "keys", "values", "plan", "partials", "out", "quants"),
        ("q_ld", c_int64), ("table_ld", c_int64), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("window", c_int32), ("scale", c_float), ("reserved", c_int32),
    ]  # fmt: skip


class GatherRecord(_Struct):
    _fields_ = [
        ("head", Head), *_pointers("x", "index", "out", "quants"), ("x_ld", c_int64), ("cols", c_int32),
        ("reserved", c_int32),
    ]  # fmt: skip


class SampleRecord(_Struct):
    _fields_ = [
        ("head", Head),
        *_pointers("logits", "temperature", "top_p", "min_p", "top_k", "seed", "choice", "positions", "index"),
        *_pointers("tokens"),
        ("vocab", c_int32), ("reserved", c_int32),
    ]  # fmt: skip


class RememberRecord(_Struct):
    _fields_ = [("head", Head), *_pointers("tokens", "table_rows", "index", "last_tokens")]


class AdjustRecord(_Struct):
    _fields_ = [
        ("head", Head),
        *_pointers("logits", "out", "table_rows", "positions", "index", "tokens", "counts", "penalties"),
        *_pointers("bias_ids", "bias_values"),
        ("tokens_ld", c_int64), ("bias_ld", c_int32), ("vocab", c_int32),
    ]  # fmt: skip


class LogprobsRecord(_Struct):
    _fields_ = [
        ("head", Head),
        *_pointers("logits", "tokens", "table_rows", "index", "counts", "chosen", "top_ids", "top"),
        ("vocab", c_int32), ("top_ld", c_int32),
    ]  # fmt: skip


class AppendRecord(_Struct):
    _fields_ = [
        ("head", Head),
        *_pointers("chosen", "table_rows", "positions", "index", "tokens"),
        ("tokens_ld", c_int64),
    ]


class CopyRecord(_Struct):
    _fields_ = [("head", Head), *_pointers("source", "target"), ("bytes", c_int64)]


class Record(ctypes.Union):
    _fields_: ClassVar[Sequence[Any]] = [
        ("head", Head), ("plan", PlanRecord), ("embed", EmbedRecord), ("norm", NormRecord), ("quant", QuantRecord),
        ("linear", LinearRecord), ("gate", GateRecord), ("rope", RopeRecord), ("attention", AttentionRecord),
        ("gather", GatherRecord), ("sample", SampleRecord), ("remember", RememberRecord), ("adjust", AdjustRecord),
        ("logprobs", LogprobsRecord), ("append", AppendRecord), ("copy", CopyRecord),
    ]  # fmt: skip


class Segment(_Struct):
    _fields_ = [("records", c_void_p), ("count", c_int64)]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """What one launch runs. `keep` is everything the segments point at."""

    segments: ctypes.Array[Segment]
    keep: tuple[object, ...]


OP_OF: Mapping[type[_Struct], Op] = {
    PlanRecord: Op.PLAN, EmbedRecord: Op.EMBED, NormRecord: Op.NORM, QuantRecord: Op.QUANT, LinearRecord: Op.LINEAR,
    GateRecord: Op.GATE, RopeRecord: Op.ROPE, AttentionRecord: Op.ATTENTION, GatherRecord: Op.GATHER,
    SampleRecord: Op.SAMPLE, RememberRecord: Op.REMEMBER, AdjustRecord: Op.ADJUST, LogprobsRecord: Op.LOGPROBS,
    AppendRecord: Op.APPEND, CopyRecord: Op.COPY,
}  # fmt: skip

LAYOUT: tuple[int, ...] = (
    ctypes.sizeof(Record), *map(ctypes.sizeof, OP_OF), ctypes.sizeof(Matrix),
    QGROUP_BYTES, PLAN_BYTES, ROW_GROUP_BYTES, len(Op), len(Kind), PLAN_PARTIALS, SPLIT, MAX_TOP,
)  # fmt: skip


class NativeLibrary:
    """One loaded shared object. Raises KernelBuildError if it is not the library this module mirrors."""

    def __init__(self, path: Path) -> None:
        try:
            # PyDLL keeps the GIL: a launch returns within a microsecond, sooner than the GIL could be had back.
            self._quick = ctypes.PyDLL(str(path))
            self._slow = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"{path} cannot be loaded ({error}): delete it and start again") from error
        self.path = path
        self._declare()
        found = tuple(self._quick.ns_layout(index) for index in range(len(LAYOUT) + 1))
        if found != (*LAYOUT, -1):
            raise KernelBuildError(f"{path} has record layout {found}; expected {LAYOUT}: delete it and start again")
        if not self._quick.ns_isa_supported():
            raise KernelBuildError(f"{path} needs {self.isa}, which this CPU lacks: delete it and start again")

    def _declare(self) -> None:
        self._quick.ns_layout.argtypes, self._quick.ns_layout.restype = [c_int32], c_int64
        self._quick.ns_isa_name.restype = c_char_p
        self._slow.ns_pool_new.argtypes = [c_int32, ctypes.POINTER(c_void_p)]
        self._slow.ns_pool_free.argtypes = [c_void_p]
        self._slow.ns_pool_reserve.argtypes = [c_void_p, c_int64]
        self._slow.ns_pool_wait.argtypes = [c_void_p]
        self._quick.ns_pool_launch.argtypes = [c_void_p, c_void_p, c_int32, c_int32]
        self._quick.ns_pool_took.argtypes, self._quick.ns_pool_took.restype = [c_void_p], c_int64

    @property
    def isa(self) -> str:
        return str(self._quick.ns_isa_name().decode())

    def pool(self, threads: int) -> Pool:
        handle = c_void_p()
        _check(self._slow.ns_pool_new(threads, ctypes.byref(handle)), f"{threads} compute threads")
        return Pool(self, handle, threads)

    @property
    def slow(self) -> ctypes.CDLL:
        """Calls that may wait: they release the GIL."""
        return self._slow

    @property
    def quick(self) -> ctypes.PyDLL:
        """Calls that return at once: they keep it."""
        return self._quick


class Pool:
    """Compute threads of one library. One program runs at a time; `close` ends the threads."""

    def __init__(self, library: NativeLibrary, handle: c_void_p, threads: int) -> None:
        self.library = library
        self.threads = threads
        self._handle = handle
        # An engine that is dropped leaves no threads behind, whether or not anybody closed it.
        self._end = weakref.finalize(self, library.slow.ns_pool_free, handle)
        self._latest: deque[Launch] = deque(maxlen=2)

    def reserve(self, scratch_bytes: int) -> None:
        """Give every thread at least that much scratch. Not while a program runs."""
        _check(self.library.slow.ns_pool_reserve(self._handle, scratch_bytes), f"{scratch_bytes:,} bytes of scratch")

    def launch(self, launch: Launch, notify_fd: int = -1) -> None:
        """Start the programs, one after the other, once the launch before, if one runs, is over; at the end 8 bytes go
        to `notify_fd`, if there is one.

        Returns at once. Inputs must stay as they are until the end. Raises RuntimeError while two launches are open.
        """
        segments = launch.segments
        _check(self.library.quick.ns_pool_launch(self._handle, segments, len(segments), notify_fd), "a launch")
        self._latest.append(launch)

    def wait(self) -> None:
        """Return once nothing runs: at once after `close`, which garbage collection may have called first."""
        if self._end.alive:
            self.library.slow.ns_pool_wait(self._handle)

    def run(self, launch: Launch) -> None:
        self.launch(launch)
        self.wait()

    @property
    def last_seconds(self) -> float:
        """How long the last launch that is over took, on the threads' own clock: no matter when anybody noticed."""
        return int(self.library.quick.ns_pool_took(self._handle)) * 1e-9

    def close(self) -> None:
        """End the threads, once nothing runs; a second call does nothing."""
        self._end()


def _check(result: int, what: str) -> None:
    if result == 0:
        return
    if -result == errno.ENOMEM:
        raise MemoryError(f"no memory for {what}")
    raise RuntimeError(f"{what}: {os.strerror(-result)}")


def load(isa: str | None = None, folder: Path | None = None) -> NativeLibrary:
    """The library of `isa`, or of the fastest instruction set here, built first if need be. Raises KernelBuildError."""
    chosen = native_build.pick_isa(native_build.cpu_flags(), isa or os.environ.get(native_build.ISA_VARIABLE))
    with native_build.built(chosen, folder=folder) as path:
        return NativeLibrary(path)
