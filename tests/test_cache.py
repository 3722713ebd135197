"""BatchedPagedKVCache: the pool and its sink, what a view refuses, and that reads are of the slots asked for."""

from __future__ import annotations

import math

import pytest
import torch

from nanoserve.buckets import DecodeRow, DecodeShape, ShapeSet, pad_plan, plan_decode
from nanoserve.cache import BatchedCacheRows, BatchedPagedKVCache, Chunk
from nanoserve.inputs import StepInputs, new_last_tokens
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.ops import StepWindow
from nanoserve.slots import SlotTable

BLOCKS, BLOCK_SIZE = 4, 4
SINK = BLOCKS * BLOCK_SIZE


@pytest.fixture
def cache() -> BatchedPagedKVCache:
    return BatchedPagedKVCache(
        ReferenceOps(),
        num_layers=2,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def step_of(write_slots: tuple[int, ...], context_lens: tuple[int, ...]) -> StepWindow:
    rows = len(write_slots)
    inputs = StepInputs(rows, new_last_tokens(8, "cpu"))
    inputs.write_rows((0,) * rows, (0,) * rows, write_slots, context_lens, (0,) * rows)
    return inputs.window(rows)


def kv(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, 2, 4), generator=generator), torch.randn((rows, 2, 4), generator=generator)


def test_pool_has_one_block_more_than_the_allocator_when_it_is_made(cache: BatchedPagedKVCache) -> None:
    assert (cache.num_slots, cache.sink_slot) == (SINK, SINK)
    everything = range(SINK + BLOCK_SIZE)
    assert cache.read(0, everything)[0].shape == (SINK + BLOCK_SIZE, 2, 4)
    with pytest.raises(IndexError):
        cache.read(0, [SINK + BLOCK_SIZE])


def test_layers_become_resident_at_their_first_use(cache: BatchedPagedKVCache) -> None:
    assert cache.resident_layers == 0
    cache.write(1, torch.tensor([3]), *kv(1))
    assert cache.resident_layers == 1
    cache.poison(1.0)
    assert cache.resident_layers == 2


def test_layers_do_not_share_storage_when_one_is_written(cache: BatchedPagedKVCache) -> None:
    k, v = kv(2)
    cache.write(0, torch.tensor([1, 9]), k, v)
    read_k, read_v = cache.read(0, [9, 1])
    assert torch.equal(read_k, k.flip(0))
    assert torch.equal(read_v, v.flip(0))
    assert not cache.read(1, range(SINK))[0].any()


def test_view_is_refused_when_no_rows_are_scheduled(cache: BatchedPagedKVCache) -> None:
    step = step_of((SINK,), (0,))
    with pytest.raises(ValueError, match="over no rows"):
        cache.view((), step, torch.full((1, 4), SINK))
    with pytest.raises(ValueError, match="over no chunks"):
        cache.view_chunks([], step)


def test_warm_rows_write_the_sink_alone_when_a_shape_is_all_padding(cache: BatchedPagedKVCache) -> None:
    cache.poison(0.5)
    before = cache.read(0, range(SINK))
    plan = pad_plan(DecodeShape(4, 8), SINK)
    step = step_of(plan.write_slots, plan.context_lens)
    rows = BatchedCacheRows(cache, step, SlotTable(4, 8, SINK).read((), pad_rows=4, width=8))
    cache.write(0, step.write_slots, *kv(4))
    out = rows.paged_attention(0, torch.randn(4, 2, 4), scale=1.0, window=None)
    assert torch.equal(out, torch.zeros(4, 8))
    after = cache.read(0, range(SINK))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(cache.read(0, [SINK])[0], torch.full((1, 2, 4), 0.5))


@pytest.mark.parametrize("real", [3, 5, 6, 7])
@pytest.mark.parametrize("poison", [math.nan, 3.0])
def test_padding_touches_no_slot_but_the_sink_when_the_pool_is_full(
    cache: BatchedPagedKVCache, real: int, poison: float
) -> None:
    """Rows hold every block of the pool, the first and the last among them; the step writes one slot a row."""
    cache.poison(poison)
    table = SlotTable(8, 8, SINK)
    rows = []
    for row in range(real):
        slot = SINK - 1 - row if row % 2 else row
        table.write(row, 0, [slot])
        rows.append(DecodeRow(row, 0, slot))
    plan = plan_decode(rows, ShapeSet((1, 2, 4, 8), (8,)), SINK)
    assert plan.pad_rows == plan.shape.rows - real > 0
    before = cache.read(0, range(SINK))
    step = step_of(plan.write_slots, plan.context_lens)
    view = cache.view(plan.rows, step, table.read(plan.rows, pad_rows=plan.pad_rows, width=8))
    k, v = kv(plan.shape.rows)
    cache.write(0, step.write_slots, k, v)
    out = view.paged_attention(0, torch.randn(plan.shape.rows, 2, 4), scale=1.0, window=None)
    assert torch.allclose(out[:real], v[:real].flatten(1)), "one position attends to itself alone"
    assert torch.equal(out[real:], torch.zeros(plan.pad_rows, 8))
    after = cache.read(0, range(SINK))
    written = {row.write_slot for row in rows}
    for side in range(2):
        for slot in range(SINK):
            kept = torch.equal(before[side][slot].nan_to_num(7.0), after[side][slot].nan_to_num(7.0))
            assert kept is (slot not in written)


def test_chunks_attend_within_their_own_sequence_when_two_share_a_forward(cache: BatchedPagedKVCache) -> None:
    cache.poison(math.nan)
    k, v = kv(5)
    q = torch.randn(5, 2, 4)
    slots = torch.tensor([8, 9, 0, 1, 2])
    step = step_of(tuple(slots.tolist()), (1, 2, 1, 2, 3))
    both = cache.view_chunks([Chunk(0, 2, slots[:2]), Chunk(2, 5, slots[2:])], step)
    cache.write(0, step.write_slots, k, v)
    out = both.paged_attention(0, q, scale=1.0, window=None)
    first = cache.view_chunks([Chunk(0, 2, slots[:2])], step_of((8, 9), (1, 2)))
    second = cache.view_chunks([Chunk(0, 3, slots[2:])], step_of((0, 1, 2), (1, 2, 3)))
    assert torch.equal(out[:2], first.paged_attention(0, q[:2], scale=1.0, window=None))
    assert torch.equal(out[2:], second.paged_attention(0, q[2:], scale=1.0, window=None))
    assert out.isfinite().all()
