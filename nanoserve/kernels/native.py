"""The native kernel set of one engine: ops, K/V layout and graph backend, over one thread pool and one arena.

Ops record, they do not compute: a forward made of them runs when the backend replays it. So a step without a recorded
graph is recorded and replayed at once, by the same kernels as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from nanoserve.kernels import native_lib
from nanoserve.kernels.native_head import HeadRecorder
from nanoserve.kernels.native_ops import Program, new_kv_store, segments
from nanoserve.ops import Rotation, StepWindow

if TYPE_CHECKING:
    from nanoserve.ops import KVStore

T = TypeVar("T")
BLOCK = native_lib.ROWS
"""Slots of a K/V block: the kernels' layout fixes it."""


class NativeOps(HeadRecorder):
    """Implements `ops.Ops` and `ops.KVKernels`."""

    name = "native"

    def new_kv_store(
        self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVStore:
        return new_kv_store(slots, kv_heads, head_dim)

    def write_kv(self, store: KVStore, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = store
        blocks, lanes = slots // BLOCK, slots % BLOCK
        keys[blocks, :, :, lanes] = k.unflatten(-1, (-1, 2)).to(keys.dtype)  # type: ignore[no-untyped-call]
        values[blocks, :, lanes // 2, :, lanes % 2] = v.to(values.dtype)

    def read_kv(self, store: KVStore, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = store
        blocks, lanes = slots // BLOCK, slots % BLOCK
        return keys[blocks, :, :, lanes].flatten(-2), values[blocks, :, lanes // 2, :, lanes % 2]

    def fill_kv(self, store: KVStore, value: float) -> None:
        for side in store:
            side.fill_(value)

    def rope_and_write(self, qkv: Tensor, store: KVStore, step: StepWindow, rotation: Rotation) -> Tensor:
        return self.record_rope(
            qkv,
            step,
            rotation.cos,
            rotation.sin,
            (store[0], store[1]),
            heads=rotation.heads,
            q_norm=rotation.q_norm,
            k_norm=rotation.k_norm,
            eps=rotation.eps,
        )

    def paged_attention(
        self, q: Tensor, store: KVStore, step: StepWindow, table: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        return self.record_attention(q, step, table, (store[0], store[1]), scale=scale, window=window)


class NativeReplay:
    """A recorded program and what it leaves behind. Called alone, it runs."""

    def __init__(self, backend: NativeBackend, program: Program, output: object) -> None:
        self._backend = backend
        self.program = program
        self.output = output

    def __call__(self) -> object:
        return self._backend.run([self])[0]


class NativeBackend:
    """Replays on the pool's threads: one launch for all programs of a step, without the GIL."""

    name = "native"

    def __init__(self, pool: native_lib.Pool, ops: NativeOps) -> None:
        self._pool = pool
        self._ops = ops
        self._launches: dict[tuple[int, ...], native_lib.Launch] = {}

    def record(self, program: Callable[[], T]) -> Callable[[], T]:
        output = program()
        return NativeReplay(self, self._ops.finish(), output)  # type: ignore[return-value]

    def narrow(self, replay: Callable[[], T], rows: int) -> Callable[[], T]:
        narrowed = NativeReplay(self, replay.program.narrowed(rows), replay.output)  # type: ignore[attr-defined]
        return narrowed  # type: ignore[return-value]

    def run(self, replays: Sequence[Callable[[], T]]) -> list[T]:
        self._pool.run(self._launch_of(replays))
        return self.outputs(replays)

    def start(self, replays: Sequence[Callable[[], T]], notify_fd: int) -> None:
        self._pool.launch(self._launch_of(replays), notify_fd)

    def outputs(self, replays: Sequence[Callable[[], T]]) -> list[T]:
        return [replay.output for replay in replays]  # type: ignore[attr-defined]

    def wait(self) -> None:
        self._pool.wait()

    def _launch_of(self, replays: Sequence[Callable[[], T]]) -> native_lib.Launch:
        """The programs as one launch, made once for each combination of them."""
        programs: list[Program] = [replay.program for replay in replays]  # type: ignore[attr-defined]
        key = tuple(id(program) for program in programs)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = segments(programs)
        return launch

    def arena_bytes(self) -> int | None:
        return self._ops.arena_bytes
