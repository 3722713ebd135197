"""Tiny random models of every family, written as Hugging Face folders. Nothing here imports transformers.

Weights are scaled so that activations and logits are of order one: an error in any part of the forward shows.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanoserve.models.assembly import expected_tensors
from nanoserve.models.hf_config import read_hf_config
from nanoserve.source import ModelSource

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

# One entry for each thing a family adds; the key names it in test ids.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 100_000.0},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 16, "head_dim": 24},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "qwen3-yarn-biases": {
        "model_type": "qwen3",
        "head_dim": 32,
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
    },
    "qwen3-layer-types": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def write_model(
    folder: Path, variant: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write config.json and model.safetensors into `folder` and return it. `overrides` replace config fields."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = COMMON | VARIANTS[variant] | {"dtype": str(dtype).removeprefix("torch.")} | overrides
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(random_tensors(folder, seed, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_tensors(folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor the folder's config.json asks for."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(read_hf_config(folder)).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        else:
            values = values * (1.5 / math.sqrt(shape[-1]))
        tensors[name] = values.to(dtype)
    return tensors


def source_of(folder: Path) -> ModelSource:
    return ModelSource("safetensors", folder, folder.name)


def token_ids(count: int, *, vocab_size: int = 96, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()
