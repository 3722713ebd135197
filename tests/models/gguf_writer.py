"""A Hugging Face folder as a GGUF file, with the transforms the reference converter (llama.cpp's) applies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from nanoserve.models.config import ModelConfig
from nanoserve.models.hf_config import read_hf_config

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
ARCHITECTURES |= {"Qwen3ForCausalLM": "qwen3"}
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")  # the library reads these and cannot write them
_RENAMED = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers", "blk"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write the folder's model as `path`: matrices as `kind` (random blocks for K-quants), vectors as F32; then put the
    values the file stands for back into the folder's model.safetensors, so that both are the same model.

    `extra` replaces tensors by GGUF name and None drops one.
    """
    config = read_hf_config(folder)
    arch = ARCHITECTURES[config.architecture]
    writer = GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if arch == "llama" else {}
    rng = np.random.default_rng(0)
    blocks: dict[str, tuple[npt.NDArray[Any], GGMLQuantizationType]] = {}
    stands_for: dict[str, npt.NDArray[np.float32]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        type_ = GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        raw = random_blocks(values.shape, kind, rng) if type_.name in K_QUANTS else quantize(values, type_)
        stands_for[name] = dequantize(raw, type_).astype(np.float32).reshape(values.shape)
        for theirs, ours in _RENAMED:
            name = name.replace(theirs, ours)
        module = name.split(".")[-2]
        # Blocks lie within rows, so permuting rows permutes their bytes.
        blocks[name] = (interleaved(raw, heads[module]) if module in heads else raw, type_)
    if config.rope.rope_type == "llama3":
        blocks["rope_freqs.weight"] = (llama3_divisors(config), GGMLQuantizationType.F32)
    for name, values in (extra or {}).items():
        blocks[name] = (values, GGMLQuantizationType.F32)
    for name, (raw, type_) in blocks.items():
        if raw is not None:
            writer.add_tensor(name, raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(stands_for, folder / "model.safetensors", metadata={"format": "pt"})
    return path


def interleaved(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """The converter's permutation of the rows of q and k (weights and biases)."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def llama3_divisors(config: ModelConfig) -> npt.NDArray[np.float32]:
    """`rope_freqs.weight`: 1 for short waves, the factor for long ones, a blend between."""
    rope = config.rope
    divisors = []
    for index in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope.rope_theta ** (index / config.head_dim)
        if wavelength < rope.original_max_position_embeddings / rope.high_freq_factor:
            divisors.append(1.0)
        elif wavelength > rope.original_max_position_embeddings / rope.low_freq_factor:
            divisors.append(rope.factor)
        else:
            turns = rope.original_max_position_embeddings / wavelength
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(divisors, dtype=np.float32)


def random_blocks(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Bytes of a quantised tensor whose every block is valid: random, with small finite fp16 scales."""
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (math.prod(shape) // block, nbytes), dtype=np.uint8)
    scales = rng.uniform(0.5e-4, 2e-4, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    elif kind in ("Q4_K", "Q5_K", "Q4_1", "Q5_1"):
        blocks[:, :4] = scales
    else:
        blocks[:, :2] = scales[:, :2]
    return blocks.reshape(*shape[:-1], -1)


def _write_metadata(writer: GGUFWriter, config: ModelConfig, arch: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch == "llama" and config.windows[0]:
        writer.add_sliding_window(config.windows[0])
    if config.rope.rope_type in ("linear", "yarn"):
        writer.add_string(f"{arch}.rope.scaling.type", config.rope.rope_type)
        writer.add_rope_scaling_factor(config.rope.factor)
    if config.rope.rope_type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_position_embeddings)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
