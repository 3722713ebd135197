"""The torch kernels, each against a formula written out, and attention against a loop over one position at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.inputs import StepInputs, new_last_tokens
from nanoserve.kernels.reference import ReferenceOps

OPS = ReferenceOps()
KV_HEADS, HEAD_DIM, SLOTS = 2, 8, 96
NAN = math.nan


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def store_of(fill: float = 0.0) -> tuple[Tensor, ...]:
    store = OPS.new_kv_store(SLOTS, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    OPS.fill_kv(store, fill)
    return store


def attention_by_loops(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One query `[heads, head_dim]` over its context `[length, kv_heads, head_dim]`, in float64, head by head."""
    heads, length = q.shape[0], k.shape[0]
    out = []
    for head in range(heads):
        shared = head // (heads // KV_HEADS)
        first = max(0, length - window) if window is not None else 0
        scores = torch.tensor([float(q[head].double() @ k[p, shared].double()) * scale for p in range(first, length)])
        weights = torch.softmax(scores.double(), 0)
        out.append(sum(w * v[p, shared].double() for w, p in zip(weights, range(first, length), strict=True)))
    return torch.cat(out).float()  # type: ignore[arg-type]


# --- the decoder's vocabulary -----------------------------------------------------------------------------------


def test_embed_reads_the_newest_token_of_the_table_row_when_an_id_is_negative() -> None:
    last = new_last_tokens(3, "cpu")
    last.copy_(torch.tensor([7, 5, 6, 0]))
    inputs = StepInputs(4, last)
    inputs.write_rows((2, -1, -1, 0), (0,) * 4, (0,) * 4, (0,) * 4, (0, 2, 0, 3))
    table = random(9, 4)
    assert torch.equal(OPS.embed(table, inputs.window(4)), table[torch.tensor([2, 6, 7, 0])])


def test_rms_norm_is_its_formula_when_values_are_tiny_and_large() -> None:
    x = torch.stack([random(16), random(16, seed=1) * 1e-4, random(16, seed=2) * 1e4])
    weight = random(16, seed=3)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.allclose(OPS.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)
    residual = random(3, 16, seed=4)
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, OPS.rms_norm(total, weight, 1e-5))


def test_rope_turns_pairs_of_halves_by_the_angle_of_the_position() -> None:
    angles = torch.outer(torch.arange(20).double(), torch.tensor([1.0, 0.1, 0.01, 0.001]).double())
    x, positions = random(5, 3, 8), torch.tensor([0, 1, 7, 19, 7])
    out = OPS.rope(x, positions, angles.cos().float(), angles.sin().float())
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    turned = pairs * torch.polar(torch.ones(5, 1, 4).double(), angles[positions].unsqueeze(1))
    assert torch.allclose(out, torch.cat((turned.real, turned.imag), -1).float(), atol=1e-5)
    assert torch.equal(out[0], x[0])


def test_silu_mul_gates_the_second_half_with_the_first() -> None:
    x = random(3, 10)
    gate, up = x[:, :5].double(), x[:, 5:].double()
    assert torch.allclose(OPS.silu_mul(x).double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-6)


def test_logits_are_fp32_when_weights_are_half_precision() -> None:
    x, weight = random(2, 8).bfloat16(), random(5, 8, seed=1).bfloat16()
    assert OPS.logits(x, weight).dtype == torch.float32


def test_gather_and_remember_move_whole_rows() -> None:
    x = random(4, 3)
    assert torch.equal(OPS.gather_rows(x, torch.tensor([3, 1])), x[[3, 1]])
    last = new_last_tokens(3, "cpu")
    OPS.remember(last, torch.tensor([2, 0, 3]), torch.tensor([8, 9, 1]))
    assert last.tolist() == [9, 0, 8, 1]


# --- the K/V store ------------------------------------------------------------------------------------------------


def test_only_the_slots_named_change_when_rows_are_written() -> None:
    store = store_of(0.25)
    slots = torch.tensor([5, 95, 0])
    k, v = random(3, KV_HEADS, HEAD_DIM), random(3, KV_HEADS, HEAD_DIM, seed=1)
    OPS.write_kv(store, slots, k, v)
    read_k, read_v = OPS.read_kv(store, slots)
    assert torch.equal(read_k, k)
    assert torch.equal(read_v, v)
    others = torch.tensor([slot for slot in range(SLOTS) if slot not in (0, 5, 95)])
    for side in OPS.read_kv(store, others):
        assert torch.equal(side, torch.full_like(side, 0.25))


def test_rectangle_names_nothing_beyond_the_context_when_lengths_differ() -> None:
    slots = torch.tensor([[4, 5, 6], [7, 8, 9], [1, 2, 3]])
    rectangle = OPS.new_rectangle(slots, torch.tensor([2, 3, 0]))
    assert rectangle.slots.tolist() == [[4, 5, 4], [7, 8, 9], [1, 1, 1]]


@st.composite
def contexts(draw: st.DrawFn) -> tuple[list[list[int]], int | None, int]:
    """Slots of each row's context (no slot twice), a sliding window, and query heads per K/V head."""
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    order = draw(st.permutations(range(SLOTS - 1)))
    rows, at = [], 0
    for length in lengths:
        rows.append(list(order[at : at + length]))
        at += length
    return rows, draw(st.sampled_from([None, 1, 3, 50])), draw(st.sampled_from([1, 3]))


@given(contexts(), st.integers(0, 1000))
@settings(max_examples=30)
def test_rectangle_attention_equals_loops_when_everything_else_is_nan(
    case: tuple[list[list[int]], int | None, int], seed: int
) -> None:
    """Slots no row may attend to, the sink among them, hold NaN; the columns past a context name them."""
    rows, window, groups = case
    store = store_of(NAN)
    used = torch.tensor([slot for row in rows for slot in row], dtype=torch.int64)
    k = random(len(used), KV_HEADS, HEAD_DIM, seed=seed)
    v = random(len(used), KV_HEADS, HEAD_DIM, seed=seed + 1)
    OPS.write_kv(store, used, k, v)
    width, sink = 24, SLOTS - 1
    slots = torch.tensor([row + [sink] * (width - len(row)) for row in rows])
    lens = torch.tensor([len(row) for row in rows])
    q = random(len(rows), KV_HEADS * groups, HEAD_DIM, seed=seed + 2)
    out = OPS.rectangle_attention(q, store, OPS.new_rectangle(slots, lens), scale=0.3, window=window)
    at = 0
    for row, context in enumerate(rows):
        span = slice(at, at + len(context))
        at += len(context)
        wanted = attention_by_loops(q[row], k[span], v[span], 0.3, window) if context else torch.zeros_like(out[row])
        assert torch.allclose(out[row], wanted, atol=1e-5)


@given(st.integers(1, 12), st.integers(0, 12), st.sampled_from([None, 1, 4]), st.integers(0, 1000))
@settings(max_examples=25)
def test_chunk_attention_equals_one_query_at_a_time_when_the_rest_of_the_pool_is_nan(
    count: int, before: int, window: int | None, seed: int
) -> None:
    store = store_of(NAN)
    length = before + count
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:length]
    k, v = random(length, KV_HEADS, HEAD_DIM, seed=seed), random(length, KV_HEADS, HEAD_DIM, seed=seed + 1)
    OPS.write_kv(store, slots, k, v)
    q = random(count, 4, HEAD_DIM, seed=seed + 2)
    lens = torch.arange(before + 1, length + 1)
    out = OPS.chunk_attention(q, store, slots, lens, scale=0.5, window=window)
    for row in range(count):
        stop = before + row + 1
        assert torch.allclose(out[row], attention_by_loops(q[row], k[:stop], v[:stop], 0.5, window), atol=1e-5)


def test_row_is_the_same_when_its_batch_grows_and_its_rectangle_widens() -> None:
    store = store_of()
    OPS.write_kv(
        store, torch.arange(SLOTS), random(SLOTS, KV_HEADS, HEAD_DIM), random(SLOTS, KV_HEADS, HEAD_DIM, seed=1)
    )
    q, slots = random(8, 4, HEAD_DIM, seed=2), torch.arange(SLOTS).view(8, 12)
    lens = torch.tensor([12, 3, 7, 1, 9, 0, 5, 12])
    whole = OPS.rectangle_attention(q, store, OPS.new_rectangle(slots, lens), scale=1.0, window=None)
    for row in range(8):
        length = max(1, int(lens[row]))
        narrow = OPS.new_rectangle(slots[row : row + 1, :length], lens[row : row + 1])
        alone = OPS.rectangle_attention(q[row : row + 1], store, narrow, scale=1.0, window=None)
        assert torch.allclose(alone[0], whole[row], atol=1e-6)


def test_layers_do_not_mix_when_they_share_the_rectangles_scratch() -> None:
    slots, lens, q = torch.arange(24).view(2, 12), torch.tensor([12, 5]), random(2, 4, HEAD_DIM)
    stores = [store_of(), store_of()]
    for seed, store in enumerate(stores):
        OPS.write_kv(store, torch.arange(24), random(24, KV_HEADS, HEAD_DIM, seed=seed), random(24, KV_HEADS, HEAD_DIM))
    shared = OPS.new_rectangle(slots, lens)
    outs = [OPS.rectangle_attention(q, store, shared, scale=1.0, window=None) for store in stores]
    for store, out in zip(stores, outs, strict=True):
        own = OPS.new_rectangle(slots, lens)
        assert torch.equal(out, OPS.rectangle_attention(q, store, own, scale=1.0, window=None))


@pytest.mark.parametrize("fill", [NAN, math.inf, 1e30])
def test_pad_row_is_zero_when_the_sink_holds_anything(fill: float) -> None:
    rectangle = OPS.new_rectangle(torch.full((2, 16), SLOTS - 1), torch.zeros(2, dtype=torch.int64))
    out = OPS.rectangle_attention(random(2, 4, HEAD_DIM), store_of(fill), rectangle, scale=1.0, window=None)
    assert torch.equal(out, torch.zeros(2, 4 * HEAD_DIM))
