"""Packed weights stand for exactly what the checkpoint says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.errors import BadCheckpoint
from nanoserve.gguf_file import TENSOR_TYPES
from nanoserve.kernels.native_pack import NATIVE_TYPES, pack_dense, pack_gguf, unpack

SIZES = {name: (elements, nbytes) for name, elements, nbytes in TENSOR_TYPES.values()}
SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """`[rows, bytes]`: random bits, with scales that are ordinary numbers."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, SIZES[name][1]), dtype=np.uint8)
    for at in SCALES_AT[name]:
        raw[..., at : at + 2] = rng.normal(0, 0.1, (rows, blocks)).astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", NATIVE_TYPES)
@settings(max_examples=15)
@given(rows=st.integers(1, 50), blocks=st.integers(1, 5), seed=st.integers(0, 99))
def test_packing_keeps_every_value_of_a_gguf_tensor(name: str, rows: int, blocks: int, seed: int) -> None:
    raw = random_blocks(name, rows, blocks, seed)
    packed = pack_gguf(raw.reshape(-1), name, rows, blocks * SIZES[name][0])
    expected = dequantize(raw, GGMLQuantizationType[name])
    np.testing.assert_array_equal(unpack(packed).numpy(), expected)


def test_rows_are_taken_in_the_order_asked_for() -> None:
    raw = random_blocks("Q4_1", 20, 2)
    order = np.random.default_rng(0).permutation(20)
    expected = dequantize(raw, GGMLQuantizationType.Q4_1)[order]
    np.testing.assert_array_equal(unpack(pack_gguf(raw.reshape(-1), "Q4_1", 20, 64, order)).numpy(), expected)


@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_rows_packed_part_by_part_are_those_packed_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(name, 50, 3).reshape(-1)
    order = np.random.default_rng(0).permutation(50)
    whole = pack_gguf(raw, name, 50, 3 * SIZES[name][0], order)
    monkeypatch.setattr("nanoserve.kernels.native_pack.PART", 1)
    assert torch.equal(pack_gguf(raw, name, 50, 3 * SIZES[name][0], order).data, whole.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(rows=st.integers(1, 40), cols=st.integers(1, 40))
@settings(max_examples=15)
def test_packing_keeps_every_value_of_a_dense_tensor(dtype: torch.dtype, rows: int, cols: int) -> None:
    weight = torch.randn(rows, cols).to(dtype)
    assert torch.equal(unpack(pack_dense(weight)), weight.float())


def test_a_type_without_a_layout_is_refused_by_name() -> None:
    with pytest.raises(BadCheckpoint, match=r"Q3_K has no native layout; supported are Q4_0"):
        pack_gguf(np.zeros(110, dtype=np.uint8), "Q3_K", 1, 256)


def test_rows_past_the_last_are_zero_in_their_tile() -> None:
    packed = pack_gguf(random_blocks("Q8_0", 17, 1).reshape(-1), "Q8_0", 17, 32)
    assert packed.data.shape[0] == 2
    assert not packed.data[1, :512].view(8, 16, 4)[:, 1:].any()
