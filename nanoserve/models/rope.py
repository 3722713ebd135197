"""Rotary position tables (Su et al. 2021) with the context extensions of the Llama family.

Every formula is worked in the order and precision transformers 5 uses (float32 tensors, Python floats for scalars), so
that the frequencies are its frequencies to the last bit; far positions multiply any difference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoserve.models.config import RopeConfig


def rope_tables(
    config: RopeConfig, head_dim: int, max_positions: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each `[max_positions, head_dim / 2]` fp32, already times the attention scaling."""
    frequencies = inverse_frequencies(config, head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    scaling = attention_scaling(config)
    return (angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """`[head_dim / 2]` fp32, radians per position."""
    wavelengths = config.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / wavelengths
    if config.frequency_divisors is not None:
        frequencies = frequencies / torch.tensor(config.frequency_divisors, dtype=torch.float32)
        wavelengths = 1.0 / frequencies
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, frequencies)
    if config.rope_type == "yarn":
        return _yarn(config, wavelengths, head_dim)
    return frequencies


def attention_scaling(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 but for yarn, which sharpens the scores of long contexts."""
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between are blended."""
    assert config.original_max_position_embeddings is not None
    assert config.low_freq_factor is not None
    assert config.high_freq_factor is not None
    original, low, high = config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / config.factor, frequencies)
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * slowed / config.factor + share * slowed
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, slowed)


def _yarn(config: RopeConfig, wavelengths: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolate slow dimensions, keep fast ones, ramp between `beta_slow` and
    `beta_fast` rotations over the original context."""
    assert config.original_max_position_embeddings is not None
    low = _dimension_of(config.beta_fast, config, head_dim)
    high = _dimension_of(config.beta_slow, config, head_dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _dimension_of(rotations: float, config: RopeConfig, head_dim: int) -> float:
    """The dimension that turns `rotations` times over the original context."""
    original = config.original_max_position_embeddings or 0
    return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(config.rope_theta))
