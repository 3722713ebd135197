"""Every native op against its plain torch definition, on every instruction set this machine has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.kernels.native_lib import Kind
from nanoserve.kernels.native_ops import Recorder, new_kv_store
from nanoserve.kernels.native_pack import NATIVE_TYPES, PackedMatrix, pack_dense, pack_gguf, stack, unpack
from nanoserve.kernels.reference import ReferenceOps
from tests.kernels.native import Harness, plain_step
from tests.kernels.test_native_pack import SIZES, random_blocks

few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
reference = ReferenceOps()


def feed(recorder: Recorder, x: Tensor) -> Tensor:
    """x as an op's output: embedding rows 0, 1, … of a table that is x."""
    step = plain_step(x.shape[0])
    step.input_ids.copy_(torch.arange(x.shape[0]))
    return recorder.embed(x, step)


def quantised(name: str, rows: int, cols: int, seed: int = 0) -> PackedMatrix:
    raw = random_blocks(name, rows, cols // SIZES[name][0], seed)
    return pack_gguf(raw.reshape(-1), name, rows, cols)


def as_int8(x: Tensor) -> Tensor:
    """What the int8 groups of 32 stand for."""
    groups = x.view(x.shape[0], -1, 32)
    top = groups.abs().amax(-1, keepdim=True)
    scale = top / 127
    return ((groups * torch.where(top > 0, 127 / top, 0.0)).round() * scale).view_as(x)


@few
@given(rows=st.integers(1, 40), cols=st.integers(1, 200), residual=st.booleans())
def test_rms_norm_is_torchs(harness: Harness, rows: int, cols: int, residual: bool) -> None:
    x, other, weight = torch.randn(rows, cols) * 3, torch.randn(rows, cols), torch.randn(cols)
    if residual:
        out, total = harness.run(lambda r: r.add_rms_norm(feed(r, x), feed(r, other), weight, 1e-5))
        wanted, wanted_total = reference.add_rms_norm(x, other, weight, 1e-5)
        assert torch.equal(total, wanted_total)
    else:
        (out,) = harness.run(lambda r: r.rms_norm(feed(r, x), weight, 1e-5))
        wanted = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@few
@given(rows=st.integers(1, 40), vocab=st.integers(1, 50), cols=st.integers(1, 90), seed=st.integers(0, 99))
def test_embedding_reads_the_newest_token_where_the_id_is_negative(
    harness: Harness, dtype: torch.dtype, rows: int, vocab: int, cols: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table, step = torch.randn(vocab, cols).to(dtype), plain_step(rows)
    step.input_ids.copy_(torch.randint(-1, vocab, (rows,), generator=generator))
    step.table_rows.copy_(torch.randint(0, 5, (rows,), generator=generator))
    step.last_tokens.copy_(torch.randint(0, vocab, (5,), generator=generator))
    (out,) = harness.run(lambda r: r.embed(table, step))
    ids = torch.where(step.input_ids < 0, step.last_tokens[step.table_rows], step.input_ids)
    assert torch.equal(out, table[ids].float())


@pytest.mark.parametrize("name", NATIVE_TYPES)
@few
@given(rows=st.integers(1, 40), vocab=st.integers(1, 50), groups=st.integers(1, 3), seed=st.integers(0, 99))
def test_embedding_of_a_packed_table_is_its_values(
    harness: Harness, name: str, rows: int, vocab: int, groups: int, seed: int
) -> None:
    table, step = quantised(name, vocab, groups * max(SIZES[name][0], 32), seed), plain_step(rows)
    step.input_ids.copy_(torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(seed)))
    (out,) = harness.run(lambda r: r.embed(table, step))
    torch.testing.assert_close(out, unpack(table)[step.input_ids], rtol=1e-6, atol=1e-7)


@few
@given(rows=st.integers(1, 40), chosen=st.integers(1, 40), cols=st.integers(1, 200), seed=st.integers(0, 99))
def test_gather_copies_the_rows_it_is_told(harness: Harness, rows: int, chosen: int, cols: int, seed: int) -> None:
    x, index = torch.randn(rows, cols), torch.randint(0, rows, (chosen,), generator=torch.Generator().manual_seed(seed))
    (out,) = harness.run(lambda r: r.gather_rows(feed(r, x), index))
    assert torch.equal(out, x[index])


@few
@given(rows=st.integers(1, 40), read=st.sets(st.sampled_from(["x", "out", "total"])))
def test_an_output_is_kept_at_its_place_whether_or_not_another_op_reads_it(
    harness: Harness, rows: int, read: set[str]
) -> None:
    x, weight, packed = torch.randn(rows, 64), torch.randn(64), quantised("Q4_1", 32, 64)
    places = {name: torch.full((rows + 1, 64), -1.0) for name in ("x", "out", "total")}

    def record(recorder: Recorder) -> tuple[Tensor, ...]:
        made = {"x": feed(recorder, x)}
        made["out"], made["total"] = recorder.add_rms_norm(feed(recorder, x), feed(recorder, x), weight, 1e-5)
        readers = [recorder.linear(made[name], packed) for name in sorted(read)]
        for name, each in made.items():
            recorder.keep(each, places[name])
        return tuple(readers)

    harness.run(record)
    out, total = reference.add_rms_norm(x, x, weight, 1e-5)
    for name, wanted in {"x": x, "out": out, "total": total}.items():
        torch.testing.assert_close(places[name][:rows], wanted, rtol=1e-5, atol=1e-5)
        assert (places[name][rows:] == -1).all()


@pytest.mark.parametrize("name", NATIVE_TYPES)
@few
@given(rows=st.integers(1, 40), outputs=st.integers(1, 70), groups=st.integers(1, 3), bias=st.booleans())
def test_quantised_linear_is_the_product_of_int8_groups(
    harness: Harness, name: str, rows: int, outputs: int, groups: int, bias: bool
) -> None:
    cols = groups * max(SIZES[name][0], 32)
    weight, x, extra = quantised(name, outputs, cols), torch.randn(rows, cols), torch.randn(outputs) if bias else None
    (out,) = harness.run(lambda r: r.linear(feed(r, x), weight, extra))
    wanted = F.linear(as_int8(x).double(), unpack(weight).double(), None if extra is None else extra.double())
    scale = float(F.linear(x.abs().double(), unpack(weight).abs().double()).max())
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=2e-4 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@few
@given(rows=st.integers(1, 20), outputs=st.integers(1, 40), cols=st.integers(1, 90))
def test_dense_linear_is_torchs(harness: Harness, dtype: torch.dtype, rows: int, outputs: int, cols: int) -> None:
    weight, x = torch.randn(outputs, cols).to(dtype), torch.randn(rows, cols)
    (out,) = harness.run(lambda r: r.linear(feed(r, x), pack_dense(weight)))
    seen = x.bfloat16().float() if dtype is torch.bfloat16 else x
    terms = float(F.linear(seen.abs(), weight.float().abs()).max())
    torch.testing.assert_close(out, F.linear(seen, weight.float()), rtol=1e-4, atol=2e-6 * terms)


def test_stacked_matrices_of_different_kinds_fill_one_output(harness: Harness) -> None:
    parts = [quantised("Q4_K", 40, 256), quantised("Q6_K", 17, 256), pack_dense(torch.randn(5, 256).bfloat16())]
    x, bias = torch.randn(6, 256), torch.randn(62)
    stacked = stack(parts)
    (out,) = harness.run(lambda r: r.linear(r.rms_norm(feed(r, x), torch.ones(256), 1e-5), stacked, bias))
    wanted = []
    for part, extra in zip(parts, bias.split([40, 17, 5]), strict=True):
        wanted += harness.run(
            lambda r, part=part, extra=extra: r.linear(r.rms_norm(feed(r, x), torch.ones(256), 1e-5), part, extra)
        )
    assert torch.equal(out, torch.cat(wanted, dim=1))


def test_matrices_of_one_kind_are_stacked_into_one() -> None:
    parts = [quantised("Q4_1", 32, 64), quantised("Q4_1", 24, 64, seed=1)]
    made = stack(parts)
    assert isinstance(made, PackedMatrix)
    assert torch.equal(unpack(made), torch.cat([unpack(part) for part in parts]))
    assert not isinstance(stack(parts[::-1]), PackedMatrix)


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@few
@given(rows=st.integers(1, 40), inner=st.one_of(st.integers(1, 100), st.sampled_from([16, 32, 48, 64, 96])))
def test_a_gated_layer_is_the_gate_times_the_other_half(harness: Harness, gate: str, rows: int, inner: int) -> None:
    x, weight, after = torch.randn(rows, 64) * 2, quantised("Q8_0", 2 * inner, 64), pack_dense(torch.randn(16, inner))

    def record(recorder: Recorder) -> tuple[Tensor, ...]:
        both = recorder.linear(feed(recorder, x), weight)
        gated = recorder.silu_mul(both) if gate == "silu" else recorder.gelu_mul(both)
        return gated, recorder.linear(gated, after)

    out, product = harness.run(record)
    first, second = F.linear(as_int8(x), unpack(weight)).chunk(2, dim=-1)
    wanted = (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * second
    # Torch may round a tie of the int8 groups the other way: one quantum of one product.
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=2e-2 * float(wanted.abs().max()))
    terms = float(F.linear(out.abs(), unpack(after).abs()).max())  # sums that nearly cancel keep their terms' rounding
    torch.testing.assert_close(product, F.linear(out, unpack(after)), rtol=1e-4, atol=2e-6 * terms)


def test_a_gate_over_something_already_read_is_an_op_of_its_own(harness: Harness) -> None:
    x, weight = torch.randn(5, 32), quantised("Q4_0", 64, 32)

    def record(recorder: Recorder) -> tuple[Tensor, ...]:
        both = recorder.linear(feed(recorder, x), weight)
        copy = recorder.gather_rows(both, torch.arange(5))
        return recorder.silu_mul(both), both, copy

    out, both, copy = harness.run(record)
    assert torch.equal(both, copy)
    torch.testing.assert_close(out, reference.silu_mul(both), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@few
@given(
    rows=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    normed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rope_rotates_halves_and_writes_the_cache(
    harness: Harness, head_dim: int, rows: int, kv_heads: int, group: int, normed: bool, seed: int
) -> None:
    generator, heads = torch.Generator().manual_seed(seed), kv_heads * group
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim)
    cos, sin = torch.randn(40, head_dim // 2), torch.randn(40, head_dim // 2)
    norms = [torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5] if normed else [None, None]
    step = plain_step(rows)
    step.positions.copy_(torch.randint(0, 40, (rows,), generator=generator))
    step.write_slots.copy_(torch.randperm(48, generator=generator)[:rows])
    store = new_kv_store(48, kv_heads, head_dim)
    (q,) = harness.run(
        lambda r: r.record_rope(
            feed(r, qkv), step, cos, sin, store, heads=heads, q_norm=norms[0], k_norm=norms[1], eps=1e-6
        )
    )
    parts = qkv.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    wanted = []
    for x, norm in zip(parts[:2], norms, strict=True):
        normed_x = reference.rms_norm(x, norm, 1e-6) if norm is not None else x
        wanted.append(reference.rope(normed_x, step.positions, cos, sin))
    torch.testing.assert_close(q, wanted[0], rtol=1e-4, atol=1e-5)
    block, key = step.write_slots // 16, step.write_slots % 16
    keys = store[0][block, :, :, key].flatten(2).float()
    values = store[1].transpose(3, 4).flatten(2, 3)[block, :, key].float()
    torch.testing.assert_close(keys, wanted[1], rtol=1e-2, atol=1e-2)
    assert torch.equal(values, parts[2].bfloat16().float())
    assert int((store[0] != 0).any(dim=2).sum()) == rows * kv_heads * 2
    assert int((store[1].transpose(3, 4).flatten(2, 3) != 0).any(dim=-1).sum()) == rows * kv_heads


def test_pad_rows_are_neither_computed_nor_written(harness: Harness) -> None:
    x, weight = torch.randn(20, 32), quantised("Q4_1", 32, 32)
    holder: list[Tensor] = []

    def record(recorder: Recorder) -> Tensor:
        out = recorder.linear(recorder.rms_norm(feed(recorder, x), torch.ones(32), 1e-5), weight)
        out.fill_(7.0)
        holder.append(out)
        return out

    (out,) = harness.run(record, live=3)
    assert not (out[:3] == 7.0).any()
    assert (out[3:] == 7.0).all()


def test_a_nan_in_one_row_stays_in_that_row(harness: Harness) -> None:
    x, weight = torch.randn(6, 64), quantised("Q4_1", 48, 64)
    (clean,) = harness.run(lambda r: r.linear(feed(r, x), weight))
    x[2, 40], x[4, 3] = float("nan"), float("inf")
    (out,) = harness.run(lambda r: r.linear(feed(r, x), weight))
    assert out[[2, 4]].isnan().all()
    assert torch.equal(out[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.parametrize("kind", [*NATIVE_TYPES, "F32", "F16", "BF16"])
def test_a_rows_product_has_the_same_bits_in_any_batch(harness: Harness, kind: str) -> None:
    x = torch.randn(200, 256)
    dense = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    weight = pack_dense(torch.randn(50, 256).to(dense[kind])) if kind in dense else quantised(kind, 50, 256)
    (whole,) = harness.run(lambda r: r.linear(feed(r, x), weight))
    for rows in (*range(1, 34), 47, 48, 64, 100, 129):
        (part,) = harness.run(lambda r, rows=rows: r.linear(feed(r, x[200 - rows :]), weight))
        assert torch.equal(part, whole[200 - rows :])


@pytest.mark.parametrize("kind", [*NATIVE_TYPES])
def test_rows_made_int8_together_have_the_bits_of_each_alone(harness: Harness, kind: str) -> None:
    """After a norm and after a gate, with rows among them that are zero, next to nothing, or not finite."""
    x, ones = torch.randn(45, 256), torch.ones(256)
    x[3], x[30], x[7, 40], x[20, 3] = 0.0, 1e-34, float("nan"), float("inf")
    up, down = quantised(kind, 512, 256), quantised(kind, 40, 256, seed=1)

    def layer(recorder: Recorder, rows: Tensor) -> tuple[Tensor, Tensor]:
        normed = recorder.rms_norm(feed(recorder, rows), ones, 1e-5)
        return recorder.linear(normed, down), recorder.linear(recorder.silu_mul(recorder.linear(normed, up)), down)

    alone = [harness.run(lambda r, row=row: layer(r, x[row : row + 1])) for row in range(45)]
    for start, stop in ((0, 45), (0, 16), (2, 6), (4, 13), (1, 36), (5, 28)):
        together = harness.run(lambda r, start=start, stop=stop: layer(r, x[start:stop]))
        for output in range(2):
            each = torch.cat([outputs[output] for outputs in alone[start:stop]])
            torch.testing.assert_close(together[output], each, rtol=0, atol=0, equal_nan=True)
    assert alone[7][0].isnan().all()
    assert alone[3][0].eq(0).all()


def test_kinds_cover_every_packing() -> None:
    assert {quantised(name, 1, 256).kind for name in NATIVE_TYPES} == {kind for kind in Kind if not kind.is_dense}
