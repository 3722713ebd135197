"""Rotary frequencies and scaling are transformers' own, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.models.config import RopeConfig
from nanoserve.models.rope import attention_scaling, inverse_frequencies, rope_tables

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "attention_factor": 0.9,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn-one-correction-dimension": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 1.0,
        "original_max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", sorted(CASES))
def test_frequencies_and_tables_equal_transformers_when_computed(name: str, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = CASES[name]
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=131_072, rope_parameters=dict(fields)
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = RopeConfig(**fields)
    assert torch.equal(inverse_frequencies(ours, head_dim), theirs.inv_freq)
    assert attention_scaling(ours) == theirs.attention_scaling
    cos, sin = rope_tables(ours, head_dim, 9000)
    assert cos.shape == sin.shape == (9000, head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(9000)[None])
    assert torch.equal(cos, their_cos[0, :, : head_dim // 2])
    assert torch.equal(sin, their_sin[0, :, : head_dim // 2])


@settings(max_examples=50, deadline=None)
@given(
    factor=st.floats(1, 64),
    low=st.floats(0.5, 4),
    gap=st.floats(0.1, 8),
    original=st.integers(64, 131_072),
    theta=st.floats(1e3, 1e7),
)
def test_llama3_frequencies_lie_between_kept_and_slowed_when_blended(
    factor: float, low: float, gap: float, original: int, theta: float
) -> None:
    plain = RopeConfig(rope_theta=theta)
    scaled = RopeConfig("llama3", theta, factor, original, low, low + gap)
    kept, blended = inverse_frequencies(plain, 64), inverse_frequencies(scaled, 64)
    assert torch.all(blended <= kept * (1 + 1e-5))
    assert torch.all(blended >= kept / factor * (1 - 1e-5))


def test_divisors_give_llama3_frequencies_when_taken_from_gguf() -> None:
    llama3 = RopeConfig(**CASES["llama3"])
    plain = RopeConfig(rope_theta=llama3.rope_theta)
    divisors = inverse_frequencies(plain, 64) / inverse_frequencies(llama3, 64)
    again = replace(plain, frequency_divisors=tuple(divisors.tolist()))
    torch.testing.assert_close(inverse_frequencies(again, 64), inverse_frequencies(llama3, 64), rtol=1e-6, atol=0)
