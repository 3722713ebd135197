"""Native paged attention against a dense softmax, and what must not change its bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.kernels import native_lib
from nanoserve.kernels.native_ops import new_kv_store
from tests.kernels.native import Harness, plain_step
from tests.kernels.test_native_ops import feed

few = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEQUENCES, WIDTH = 4, 640


@dataclass(frozen=True, slots=True)
class Pool:
    """K and V of SEQUENCES × WIDTH tokens, `[tokens, kv_heads, head_dim]` bf16, stored through shuffled slots."""

    k: Tensor
    v: Tensor
    store: tuple[Tensor, Tensor]
    table: Tensor


def make_pool(kv_heads: int, head_dim: int) -> Pool:
    generator = torch.Generator().manual_seed(7)
    tokens = SEQUENCES * WIDTH
    k, v = (torch.randn(tokens, kv_heads, head_dim, generator=generator).bfloat16() for _ in range(2))
    blocks = torch.randperm(tokens // 16, generator=generator)
    table = (blocks[:, None] * 16 + torch.arange(16)).view(SEQUENCES, WIDTH).contiguous()
    store = new_kv_store(tokens, kv_heads, head_dim)
    slots = table.flatten()
    by_slot_k, by_slot_v = torch.empty_like(k), torch.empty_like(v)
    by_slot_k[slots], by_slot_v[slots] = k, v
    store[0].copy_(by_slot_k.view(-1, 16, kv_heads, head_dim // 2, 2).permute(0, 2, 3, 1, 4))
    store[1].copy_(by_slot_v.view(-1, 8, 2, kv_heads, head_dim).permute(0, 3, 1, 4, 2))
    return Pool(k, v, store, table)


shared_pool = cache(make_pool)
"""For tests that only read it."""


def attend(
    harness: Harness, pool: Pool, q: Tensor, rows: Sequence[tuple[int, int]], window: int | None = None
) -> Tensor:
    """q `[rows, heads, head_dim]`; rows are (table row, context_lens)."""
    step = plain_step(len(rows), max_sequences=SEQUENCES)
    step.table_rows.copy_(torch.tensor([table_row for table_row, _ in rows]))
    step.context_lens.copy_(torch.tensor([lens for _, lens in rows]))
    shape = q.shape
    (out,) = harness.run(
        lambda r: r.record_attention(
            feed(r, q.flatten(1)).unflatten(1, shape[1:]), step, pool.table, pool.store, scale=0.11, window=window
        )
    )
    return out


def dense(pool: Pool, q: Tensor, rows: Sequence[tuple[int, int]], window: int | None = None) -> Tensor:
    outs = []
    for each, (table_row, lens) in zip(q, rows, strict=True):
        start = max(0, lens - window) if window else 0
        keys = slice(table_row * WIDTH + start, table_row * WIDTH + lens)
        group = each.shape[0] // pool.k.shape[1]
        k = pool.k[keys].float().repeat_interleave(group, dim=1)
        v = pool.v[keys].float().repeat_interleave(group, dim=1)
        weights = (torch.einsum("hd,khd->hk", each, k) * 0.11).softmax(-1)
        out = torch.einsum("hk,khd->hd", weights, v)
        outs.append(torch.zeros_like(out) if lens == 0 else out)
    return torch.stack(outs).flatten(1)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [
    (9, 3, 64), (4, 4, 80), (8, 1, 96), (4, 2, 128), (2, 1, 256), (40, 1, 16), (3, 3, 32),
])  # fmt: skip
@few
@given(data=st.data(), window=st.sampled_from([None, 1, 37, 128, 300]))
def test_attention_is_a_softmax_over_the_rows_context(
    harness: Harness, heads: int, kv_heads: int, head_dim: int, window: int | None, data: st.DataObject
) -> None:
    pool = shared_pool(kv_heads, head_dim)
    rows = data.draw(st.lists(st.tuples(st.integers(0, SEQUENCES - 1), st.integers(0, WIDTH)), min_size=1, max_size=6))
    start = data.draw(st.integers(1, WIDTH - 20))
    rows += [(2, start + i) for i in range(data.draw(st.integers(0, 20)))]
    q = torch.randn(len(rows), heads, head_dim)
    out = attend(harness, pool, q, rows, window)
    torch.testing.assert_close(out, dense(pool, q, rows, window), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("window", [None, 100])
def test_a_rows_attention_has_the_same_bits_alone_in_a_chunk_and_on_any_number_of_threads(
    library: native_lib.NativeLibrary, window: int | None
) -> None:
    pool, harnesses = make_pool(3, 64), [Harness(library, threads=threads) for threads in (1, 2, 3)]
    rows = [(1, 300 + i) for i in range(40)] + [(0, 129), (3, 640), (2, 1), (2, 0), (3, 255)]
    q = torch.randn(len(rows), 9, 64)
    whole = attend(harnesses[0], pool, q, rows, window)
    for harness in harnesses:
        assert torch.equal(attend(harness, pool, q, rows, window), whole)
        for size in (1, 2, 7, 16):
            parts = [
                attend(harness, pool, q[at : at + size], rows[at : at + size], window)
                for at in range(0, len(rows), size)
            ]
            assert torch.equal(torch.cat(parts), whole), (harness.pool.threads, size)
        harness.pool.close()


@pytest.mark.parametrize("window", [None, 21, 130])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_lies_outside_a_rows_context_is_never_seen(harness: Harness, poison: float, window: int | None) -> None:
    rows = [(0, 1), (0, 17), (1, 200), (2, 333), (3, 129)]
    q = torch.randn(len(rows), 4, 64)
    pool = make_pool(2, 64)
    clean = attend(harness, pool, q, rows, window)
    lens = {0: 17, 1: 200, 2: 333, 3: 129}
    seen = torch.zeros(SEQUENCES * WIDTH, dtype=torch.bool)
    for table_row, length in lens.items():
        # Row (0, 1) shares its sequence with (0, 17): what only the longer one sees stays, and is its to see.
        first = max(0, (1 if table_row == 0 else length) - window) if window else 0
        seen[pool.table[table_row, first:length]] = True
    keys = pool.store[0].permute(0, 3, 1, 2, 4)
    values = pool.store[1].permute(0, 2, 4, 1, 3)
    blocks, offsets = (~seen).nonzero().flatten() // 16, (~seen).nonzero().flatten() % 16
    keys[blocks, offsets] = poison
    values[blocks, offsets // 2, offsets % 2] = poison
    assert torch.equal(attend(harness, pool, q, rows, window), clean)


def test_pad_rows_and_empty_contexts_give_zeros(harness: Harness) -> None:
    pool = make_pool(1, 64)
    q = torch.full((3, 2, 64), float("nan"))
    q[1] = 1.0
    out = attend(harness, pool, q, [(SEQUENCES, 0), (1, 5), (SEQUENCES, 0)])
    assert not out[[0, 2]].any()
    assert out[1].isfinite().all()


def test_a_context_that_ends_at_the_pools_last_slot_is_read_in_bounds(harness: Harness) -> None:
    pool = make_pool(2, 64)
    last = int((pool.table == SEQUENCES * WIDTH - 1).nonzero()[0, 0])
    q = torch.randn(1, 4, 64)
    out = attend(harness, pool, q, [(last, WIDTH)])
    torch.testing.assert_close(out, dense(pool, q, [(last, WIDTH)]), rtol=0.03, atol=0.03)


def test_growing_a_context_by_splits_keeps_earlier_rows(harness: Harness) -> None:
    pool, q = make_pool(3, 64), torch.randn(1, 9, 64)
    outs = [attend(harness, pool, q, [(0, lens)]) for lens in (127, 128, 129, 256, 257)]
    for out, lens in zip(outs, (127, 128, 129, 256, 257), strict=True):
        torch.testing.assert_close(out, dense(pool, q, [(0, lens)]), rtol=0.03, atol=0.03)
