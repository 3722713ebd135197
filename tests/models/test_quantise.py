"""Quantising at load: how near the blocks come, what is quantised, and that both kernel sets get the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.errors import BadCheckpoint
from nanoserve.kernels.native_lib import Kind
from nanoserve.kernels.native_pack import PackedMatrix, unpack
from nanoserve.kernels.native_weights import NativeWeights
from nanoserve.models.load import LoadedModel, load_model
from nanoserve.models.quantise import Quantise, quantise_q4_1, quantise_q8_0
from nanoserve.source import ModelSource
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import source_of, write_model

Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
W4, W8 = Quantise("w4"), Quantise("w8")


def weights(rows: int, groups: int, seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(rows, groups * 32, generator=torch.Generator().manual_seed(seed)) * spread


def load(folder: Path, quantise: Quantise, *, native: bool = False) -> LoadedModel:
    return load_model(source_of(folder), quantise=quantise, maker=NativeWeights() if native else None, bar=False)


# --- the arithmetic --------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    rows=st.integers(1, 40), groups=st.integers(1, 5), seed=st.integers(0, 99), spread=st.sampled_from([1e-3, 0.05, 30])
)
def test_eight_bits_are_the_nearest_codes_of_the_format(rows: int, groups: int, seed: int, spread: float) -> None:
    weight = weights(rows, groups, seed, spread)
    values = dequantize(quantise_q8_0(weight), Q8_0)
    step = weight.view(rows, groups, 32).abs().amax(-1, keepdim=True) / 127
    # Half a step, and what rounding the scale to fp16 does to the largest code.
    limit = step * (0.5 + 127 * 2**-11) + 1e-9
    assert bool(
        ((torch.from_numpy(values).view(rows, groups, 32) - weight.view(rows, groups, 32)).abs() <= limit).all()
    )


@settings(max_examples=30)
@given(rows=st.integers(8, 40), groups=st.integers(1, 5), seed=st.integers(0, 99), shift=st.sampled_from([0.0, 0.1]))
def test_four_bits_beat_the_librarys_minimum_and_maximum_in_squared_error(
    rows: int, groups: int, seed: int, shift: float
) -> None:
    weight = weights(rows, groups, seed, 0.05) + shift
    ours = torch.from_numpy(dequantize(quantise_q4_1(weight), Q4_1))
    theirs = torch.from_numpy(dequantize(quantize(weight.numpy(), Q4_1), Q4_1))
    # Of a whole matrix: the best fit is chosen before scale and minimum are rounded to fp16, so one group may lose.
    assert float((ours - weight).square().sum()) <= 1.02 * float((theirs - weight).square().sum())


def test_four_bits_take_a_fifth_off_the_squared_error_of_normal_weights() -> None:
    weight = weights(512, 18, 0, 0.03)
    ours = torch.from_numpy(dequantize(quantise_q4_1(weight), Q4_1))
    theirs = torch.from_numpy(dequantize(quantize(weight.numpy(), Q4_1), Q4_1))
    ratio = float((ours - weight).square().sum() / (theirs - weight).square().sum())
    assert 0.78 < ratio < 0.84


@pytest.mark.parametrize("quantise", [quantise_q4_1, quantise_q8_0])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.25, 1e-9])
def test_groups_of_one_value_stay_that_value(quantise: object, value: float) -> None:
    kind = Q4_1 if quantise is quantise_q4_1 else Q8_0
    values = dequantize(quantise(torch.full((3, 64), value)), kind)  # type: ignore[operator]
    np.testing.assert_allclose(values, value, rtol=2**-10, atol=1e-7)


def test_blocks_do_not_depend_on_how_the_work_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(33, 5, 1)
    whole = quantise_q4_1(weight), quantise_q8_0(weight)
    monkeypatch.setattr("nanoserve.models.quantise.CHUNK", 7)
    for before, after in zip(whole, (quantise_q4_1(weight), quantise_q8_0(weight)), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_is_taken(dtype: torch.dtype) -> None:
    weight = weights(5, 3, 2).to(dtype)
    np.testing.assert_array_equal(quantise_q4_1(weight), quantise_q4_1(weight.float()))


# --- what a model's matrices become ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantise", [W4, W8, Quantise("w4", "w4"), Quantise(None, "w4"), Quantise("w8", "w4")])
@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_native_weights_hold_exactly_the_reference_kernels_values(
    variant: str, quantise: Quantise, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, variant)
    ours, theirs = load(folder, quantise, native=True), load(folder, quantise)
    assert ours.kinds == theirs.kinds
    for name in ("qkv", "o", "gate_up", "down"):
        packed = getattr(ours.decoder.weights.layers[1], name)
        parts = packed.parts if hasattr(packed, "parts") else (packed,)
        values = torch.cat([unpack(part) for part in parts])
        assert torch.equal(values, getattr(theirs.decoder.weights.layers[1], name)), name
    assert torch.equal(unpack(ours.decoder.weights.head), theirs.decoder.weights.head)
    embed = ours.decoder.weights.embed
    assert torch.equal(unpack(embed) if isinstance(embed, PackedMatrix) else embed, theirs.decoder.weights.embed)


@pytest.mark.parametrize(
    ("variant", "quantise", "layers", "embedding", "head", "shared"),
    [
        ("llama-tied", W4, "w4", "w8", "w8", True),
        ("llama-tied", W8, "w8", "w8", "w8", True),
        ("llama-tied", Quantise("w4", "w4"), "w4", "w8", "w4", False),
        ("llama-tied", Quantise(None, "w4"), "F32", "F32", "w4", False),
        ("llama", W4, "w4", "w8", "w8", False),
        ("llama", Quantise("w8", "w4"), "w8", "w8", "w4", False),
    ],
)
def test_kinds_say_what_became_of_which_matrix(
    variant: str, quantise: Quantise, layers: str, embedding: str, head: str, shared: bool, tmp_path: Path
) -> None:
    loaded = load(write_model(tmp_path, variant), quantise, native=True)
    assert loaded.kinds == {"layers": layers, "embedding": embedding, "head": head}
    weights = loaded.decoder.weights
    kind = {"w4": Kind.Q4M, "w8": Kind.Q8Z, "F32": Kind.F32}
    assert (weights.layers[0].down.kind, weights.head.kind) == (kind[layers], kind[head])
    assert (weights.head is weights.embed) is shared
    assert loaded.summary()["bytes"] == weights.nbytes
    assert f"layers {layers}, embedding {embedding}, head {head}; " in loaded.describe()


def test_stored_blocks_stay_and_only_a_head_that_is_asked_for_is_requantised(tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "hf", "llama-tied"), tmp_path / "m.gguf", "Q8_0")
    plain = load_model(ModelSource("gguf", path, "m"), bar=False)
    again = load_model(ModelSource("gguf", path, "m"), quantise=Quantise("w4", "w4"), bar=False)
    assert again.kinds == {"layers": "Q8_0", "embedding": "Q8_0", "head": "w4"}
    assert torch.equal(again.decoder.weights.embed, plain.decoder.weights.embed)
    assert torch.equal(again.decoder.weights.layers[0].qkv, plain.decoder.weights.layers[0].qkv)
    expected = dequantize(quantise_q4_1(plain.decoder.weights.embed), Q4_1)
    np.testing.assert_array_equal(again.decoder.weights.head.numpy(), expected)


def test_matrices_without_whole_groups_stay_floats(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama", intermediate_size=80)
    loaded = load(folder, W4, native=True)
    assert loaded.kinds["layers"] == "w4 + F32"
    assert loaded.decoder.weights.layers[0].down.kind is Kind.F32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_a_value_no_format_holds_is_named_with_file_and_tensor(value: float, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_model(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 40] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"down_proj.weight' has values that are not finite .*; drop --quantize"):
        load(folder, W4)
