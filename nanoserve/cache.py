"""BatchedPagedKVCache: sole owner of the K/V tensors. Which slot a token has is the SlotTable's business.

A forward sees the cache through its rows, which say where they write and what they read. Two kinds exist: a decode
rectangle (`BatchedCacheRows`: one query a row, slots from a window on the slot table) and chunks (`ChunkCacheRows`:
many queries of one sequence, as in prefill). The layout of a layer's store belongs to the kernel set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanoserve.ops import KVKernels, RectangleKernels, Rotation, StepWindow

if TYPE_CHECKING:
    from nanoserve.ops import KVStore


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows start … stop - 1 of a forward are consecutive positions of one sequence; `slots` `[context]` are its slots
    from position 0 to the last of them."""

    start: int
    stop: int
    slots: Tensor


class BatchedPagedKVCache:
    """K/V of all layers: `num_blocks * block_size` slots and one sink block behind them."""

    def __init__(
        self,
        kernels: KVKernels,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kernels = kernels
        self.num_slots = num_blocks * block_size
        self.sink_slot = self.num_slots
        self._all_slots = (num_blocks + 1) * block_size
        self.num_layers = num_layers
        self.dtype = dtype
        self._shape = (num_kv_heads, head_dim)
        self._device = device
        self._stores: list[KVStore | None] = [None] * num_layers

    @property
    def gathering_kernels(self) -> RectangleKernels:
        """The kernels, where they can read a rectangle. Raises TypeError where they read pages only."""
        if not isinstance(self.kernels, RectangleKernels):
            raise TypeError(f"{type(self.kernels).__name__} read pages only; a rectangle needs the reference kernels")
        return self.kernels

    def _ensure_pool(self, layer: int) -> KVStore:
        """The layer's store, allocated at its first use: a warm-up makes the whole pool resident before any client."""
        store = self._stores[layer]
        if store is None:
            store = self.kernels.new_kv_store(self._all_slots, *self._shape, self.dtype, self._device)
            self._stores[layer] = store
        return store

    def prefault(self) -> None:
        """Write every page of the pool, which is zero and must be empty still: memory that is lacking shows at boot."""
        self.poison(0.0)

    @property
    def resident_layers(self) -> int:
        return sum(store is not None for store in self._stores)

    def view(self, rows: Sequence[int], step: StepWindow, slots: Tensor) -> BatchedCacheRows:
        """The rectangle `slots` `[len(rows) + pads, width]` of a scheduled forward.

        Raises ValueError for an empty row selection: a scheduled forward over no rows has nothing in it. A warm-up,
        which means exactly that, builds its BatchedCacheRows itself.
        """
        if not rows:
            raise ValueError("a cache view over no rows; a scheduled forward has at least one")
        return BatchedCacheRows(self, step, slots)

    def view_chunks(self, chunks: Sequence[Chunk], step: StepWindow) -> ChunkCacheRows:
        """The rows of a prefill forward. Raises ValueError if there is no chunk."""
        if not chunks:
            raise ValueError("a cache view over no chunks; a prefill forward has at least one")
        return ChunkCacheRows(self, step, chunks)

    def write(self, layer: int, write_slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v `[rows, kv_heads, head_dim]`; a pad row's goes to the sink."""
        self.kernels.write_kv(self._ensure_pool(layer), write_slots, k, v)

    def store(self, layer: int) -> KVStore:
        return self._ensure_pool(layer)

    def read(self, layer: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(k, v) copies at `slots`, each `[len(slots), kv_heads, head_dim]`: self-tests and tests."""
        index = torch.tensor(slots, dtype=torch.int64, device=self._device)
        return self.kernels.read_kv(self._ensure_pool(layer), index)

    def snapshot(self, layer: int) -> tuple[Tensor, Tensor]:
        """(k, v) copies of every slot of a layer, the sink block included: `[slots, kv_heads, head_dim]` each."""
        return self.kernels.read_kv(self._ensure_pool(layer), torch.arange(self._all_slots, device=self._device))

    def poison(self, value: float) -> None:
        """Fill every slot of every layer, the sink included: what a test of masking wants to see not matter."""
        for layer in range(len(self._stores)):
            self.kernels.fill_kv(self._ensure_pool(layer), value)


class BatchedCacheRows:
    """A decode rectangle. Pad rows (and on a warm-up all rows are) have `context_lens` 0 and write to the sink."""

    def __init__(self, cache: BatchedPagedKVCache, step: StepWindow, slots: Tensor) -> None:
        self._cache = cache
        self._step = step
        self._kernels = cache.gathering_kernels
        self._rectangle = self._kernels.new_rectangle(slots, step.context_lens)

    def rope_and_write(self, layer: int, qkv: Tensor, rotation: Rotation) -> Tensor:
        return self._cache.kernels.rope_and_write(qkv, self._cache.store(layer), self._step, rotation)

    def paged_attention(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        return self._kernels.rectangle_attention(
            q, self._cache.store(layer), self._rectangle, scale=scale, window=window
        )


class ChunkCacheRows:
    """The chunks of a prefill forward, each attending within its own sequence."""

    def __init__(self, cache: BatchedPagedKVCache, step: StepWindow, chunks: Sequence[Chunk]) -> None:
        self._cache = cache
        self._step = step
        self._kernels = cache.gathering_kernels
        self._chunks = tuple(chunks)

    def rope_and_write(self, layer: int, qkv: Tensor, rotation: Rotation) -> Tensor:
        return self._cache.kernels.rope_and_write(qkv, self._cache.store(layer), self._step, rotation)

    def paged_attention(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        kernels, store, lens = self._kernels, self._cache.store(layer), self._step.context_lens
        outs = [
            kernels.chunk_attention(
                q[c.start : c.stop], store, c.slots, lens[c.start : c.stop], scale=scale, window=window
            )
            for c in self._chunks
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class PagedCacheRows:
    """Any rows of a step: each walks the slot table `[max_sequences, width]` to its own length."""

    def __init__(self, cache: BatchedPagedKVCache, step: StepWindow, table: Tensor) -> None:
        self._cache = cache
        self._step = step
        self._table = table

    def rope_and_write(self, layer: int, qkv: Tensor, rotation: Rotation) -> Tensor:
        return self._cache.kernels.rope_and_write(qkv, self._cache.store(layer), self._step, rotation)

    def paged_attention(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        store = self._cache.store(layer)
        return self._cache.kernels.paged_attention(q, store, self._step, self._table, scale=scale, window=window)
