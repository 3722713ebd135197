"""GGUF files, written with the converter's transforms, give the safetensors model's logits and transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from nanoserve.errors import BadCheckpoint
from nanoserve.models.config import load_config
from nanoserve.models.decoder import Decoder
from nanoserve.models.gguf_loader import QUANTISED, SUPPORTED, read_tensor
from nanoserve.models.load import load_model
from nanoserve.source import ModelSource
from tests.models.dense import dense_logits
from tests.models.gguf_writer import K_QUANTS, random_blocks, write_gguf
from tests.models.oracle import transformers_from_gguf
from tests.models.tiny import source_of, token_ids, write_model

IDS = token_ids(201)
POSITIONS = [1, 33, 200]
VARIANTS = ["llama", "llama-tied", "llama-biases", "llama-linear", "llama-llama3", "llama-yarn", "mistral-window"]
VARIANTS += ["qwen2", "qwen3"]


def load_gguf(path: Path, dtype: str = "auto") -> Decoder:
    return load_model(ModelSource("gguf", path, path.stem), dtype=dtype, bar=False).decoder


@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_safetensors_models_when_written_as_gguf(variant: str, kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", variant)
    path = write_gguf(folder, tmp_path / "model.gguf", kind)
    expected = dense_logits(load_model(source_of(folder), bar=False).decoder, IDS)[POSITIONS]
    logits = dense_logits(load_gguf(path, "float32"), IDS)[POSITIONS]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_weights_equal_the_safetensors_models_when_stored_in_any_type(kind: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1} if kind in K_QUANTS else {}
    folder = write_model(tmp_path / "hf", "llama", **wide)
    path = write_gguf(folder, tmp_path / "model.gguf", kind)
    ours = load_gguf(path, "float32").weights
    theirs = load_model(source_of(folder), bar=False).decoder.weights
    assert torch.equal(ours.embed, theirs.embed)
    assert torch.equal(ours.head, theirs.head)
    for field in ("input_norm", "qkv", "o", "post_attention_norm", "gate_up", "down"):
        assert torch.equal(getattr(ours.layers[0], field), getattr(theirs.layers[0], field)), field


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q6_K"])
def test_logits_equal_transformers_when_it_loads_the_same_file(kind: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2} if kind in K_QUANTS else {}
    path = write_gguf(write_model(tmp_path / "hf", "llama", **wide), tmp_path / "model.gguf", kind)
    with torch.no_grad():
        expected = transformers_from_gguf(path)(torch.tensor([IDS[:40]])).logits[0]
    logits = dense_logits(load_gguf(path, "float32"), IDS[:40])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_equal_the_librarys_when_dequantised(kind: str) -> None:
    raw = random_blocks((6, 512), kind, np.random.default_rng(3))
    expected = dequantize(raw, GGMLQuantizationType[kind])
    values = read_tensor(raw.reshape(-1), kind, (6, 512))
    assert values.dtype == torch.float32
    assert np.isfinite(expected).all()
    assert expected.std() > 0
    assert np.array_equal(values.numpy(), expected)


@pytest.mark.parametrize("shape", [(1, 256), (7, 256), (48, 256), (64, 12288), (512,)])
def test_blocks_are_the_same_when_rows_are_joined(shape: tuple[int, ...]) -> None:
    raw = random_blocks(shape, "Q5_1", np.random.default_rng(4))
    expected = dequantize(raw, GGMLQuantizationType.Q5_1)
    assert np.array_equal(read_tensor(raw.reshape(-1), "Q5_1", shape).numpy(), expected)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_auto_dtype_is_the_files_own_when_it_is_a_float_type(kind: str, dtype: str, tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "hf"), tmp_path / "model.gguf", kind)
    assert load_gguf(path).weights.layers[0].qkv.dtype == getattr(torch, dtype)


def test_auto_dtype_is_float32_when_the_file_is_quantised(tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "hf"), tmp_path / "model.gguf", "Q4_0")
    assert load_gguf(path).weights.embed.dtype == torch.float32
    assert load_gguf(path, "bfloat16").weights.embed.dtype == torch.bfloat16


def test_config_equals_the_folders_when_read_from_gguf(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", "qwen3")
    ours = load_config(ModelSource("gguf", write_gguf(folder, tmp_path / "m.gguf"), "m"))
    theirs = load_config(source_of(folder))
    for name in ("architecture", "head_dim", "windows", "tie_word_embeddings", "qk_norm", "attention_bias", "dtype"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.eos_token_ids == (2, 3)


def test_window_is_every_layers_when_a_llama_gguf_names_one(tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "hf", "mistral-window"), tmp_path / "window.gguf")
    assert load_config(ModelSource("gguf", path, "window")).windows == (16, 16, 16)


@pytest.mark.parametrize(
    ("extra", "naming"),
    [
        ({"blk.1.attn_q.weight": None}, ("model.layers.1.self_attn.q_proj.weight", "missing")),
        ({"token_embd.weight": None}, ("token_embd.weight", "missing")),
        ({"blk.0.attn_gate.weight": np.zeros((4, 32), np.float32)}, ("blk.0.attn_gate.weight", "belongs to nothing")),
        ({"blk.9.attn_norm.weight": np.zeros(64, np.float32)}, ("blk.9.attn_norm.weight", "belongs to nothing")),
        ({"blk.2.ffn_up.weight": np.zeros((64, 64), np.float32)}, ("blk.2.ffn_up.weight", "[64, 64]", "[96, 64]")),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, ("rope_freqs.weight", "3 long", "8")),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, ("rope_freqs.weight", "above 0")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tensor_is_named_when_missing_extra_or_misshaped(
    extra: dict[str, Any], naming: tuple[str, ...], tmp_path: Path
) -> None:
    path = write_gguf(write_model(tmp_path / "hf"), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(BadCheckpoint) as caught:
        load_gguf(path)
    for text in (str(path), *naming):
        assert text in str(caught.value)


def test_tensor_type_is_named_when_unsupported(tmp_path: Path) -> None:
    path = write_gguf(write_model(tmp_path / "hf"), tmp_path / "model.gguf", "MXFP4")
    with pytest.raises(BadCheckpoint, match=r"tensor .* is MXFP4; supported are F32"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("key", "value", "naming"),
    [
        ("general.architecture", "gemma3", "supported are llama, qwen2, qwen3"),
        ("llama.expert_count", 8, "llama.expert_count is 8"),
        ("llama.rope.scaling.type", "longrope", "llama.rope.scaling.type is 'longrope'"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count is 8"),
        ("llama.attention.head_count", [4, 4, 2], "llama.attention.head_count is [4, 4, 2]"),
        ("llama.attention.layer_norm_rms_epsilon", None, "rms_norm_eps is 0.0"),
        ("llama.context_length", None, "llama.context_length is missing"),
        ("split.count", 3, "one part of a split model"),
        ("tokenizer.ggml.eos_token_id", 4000, "eos_token_id is 4000"),
    ],
)
def test_key_is_named_when_it_cannot_be_honoured(key: str, value: Any, naming: str, tmp_path: Path) -> None:
    from dataclasses import replace

    from nanoserve.gguf_file import read_gguf
    from nanoserve.models.gguf_config import gguf_config

    file = read_gguf(write_gguf(write_model(tmp_path / "hf"), tmp_path / "model.gguf"))
    with pytest.raises(BadCheckpoint) as caught:
        gguf_config(replace(file, metadata=file.metadata | {key: value}))
    assert str(file.path) in str(caught.value)
    assert naming in str(caught.value)
