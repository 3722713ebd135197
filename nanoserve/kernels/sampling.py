"""Choosing tokens from logits, in torch: the oracle for every sampler.

The randomness of a row is one uniform number, a hash of (seed, choice, position), turned into a token by inverting the
cumulative distribution in vocabulary order. So a token depends on its request alone, and a preempted or batched request
draws the numbers it would have drawn alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoserve.ops import SamplingWindow

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64: 2^64 / golden ratio
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, whose own shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser (Steele, Lea & Flood 2014) on int64, wrapping."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniforms(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """`[rows]` float64 in [0, 1), 24 bits each, from three int64 tensors: mix(mix(mix(seed) + choice) + position)."""
    x = _mix(seed + _GOLDEN)
    x = _mix(x + choice * _GOLDEN)
    x = _mix(x + position * _GOLDEN)
    return _shift_right(x, 40).double() * 2.0**-24


def sample_rows(logits: Tensor, sampling: SamplingWindow, positions: Tensor) -> Tensor:
    """`[rows]` int64 from logits `[rows, vocab]` fp32 (`ops.Ops.sample`)."""
    greedy = logits.argmax(-1)
    if logits.device.type != "cpu":
        # Inside a captured graph every row runs the same program; the greedy ones are selected at the end.
        drawn = _draw(logits, sampling, positions, filtered=True)
        return torch.where(sampling.temperature > 0, drawn, greedy)
    rows = torch.nonzero(sampling.temperature > 0).flatten()
    if rows.numel() == 0:
        return greedy
    chosen = SamplingWindow(
        sampling.temperature[rows],
        sampling.top_k[rows],
        sampling.top_p[rows],
        sampling.min_p[rows],
        sampling.seed[rows],
        sampling.choice[rows],
    )
    filtered = bool(((chosen.top_k > 0) | (chosen.top_p < 1) | (chosen.min_p > 0)).any())
    greedy[rows] = _draw(logits[rows], chosen, positions[rows], filtered=filtered)
    return greedy


def _draw(logits: Tensor, sampling: SamplingWindow, positions: Tensor, *, filtered: bool) -> Tensor:
    temperature = sampling.temperature.clamp(min=1e-4).unsqueeze(1)
    probs = torch.softmax(logits / temperature, dim=-1)
    if filtered:
        probs = _filter(probs, sampling)
    cumulative = probs.double().cumsum(-1)
    target = uniforms(sampling.seed, sampling.choice, positions) * cumulative[:, -1]
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1).clamp(max=probs.shape[1] - 1)


def _filter(probs: Tensor, sampling: SamplingWindow) -> Tensor:
    """Zero what top-k, then top-p (Holtzman et al. 2020, of what top-k left), then min-p drop. Ties keep low ids."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    keep = (sampling.top_k.unsqueeze(1) <= 0) | (ranks < sampling.top_k.unsqueeze(1))
    kept = torch.where(keep, ordered, 0.0).double()
    before = kept.cumsum(-1) - kept
    keep &= (before < sampling.top_p.unsqueeze(1) * kept.sum(-1, keepdim=True)) | (sampling.top_p.unsqueeze(1) >= 1)
    keep &= ordered >= sampling.min_p.unsqueeze(1) * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter(1, ids, torch.where(keep, ordered, 0.0))


def adjust_logits(
    logits: Tensor,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    presence_penalty: float,
    frequency_penalty: float,
    repetition_penalty: float,
    logit_bias: Sequence[tuple[int, float]],
) -> Tensor:
    """A new `[vocab]` fp32 row with penalties and bias applied, in that order.

    repetition divides positive and multiplies negative logits of every token seen in prompt or output (Keskar et al.
    2019); presence and frequency subtract `presence + frequency · count` for tokens of the output (OpenAI API).
    """
    row = logits.clone()
    if repetition_penalty != 1.0 and (prompt_ids or output_ids):
        seen = torch.tensor(sorted({*prompt_ids, *output_ids}), dtype=torch.int64, device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / repetition_penalty, values * repetition_penalty)
    if (presence_penalty or frequency_penalty) and output_ids:
        counts = torch.bincount(torch.tensor(output_ids, dtype=torch.int64, device=row.device), minlength=row.shape[0])
        row -= torch.where(counts > 0, presence_penalty + frequency_penalty * counts, 0.0)
    if logit_bias:
        index = torch.tensor([token for token, _ in logit_bias], dtype=torch.int64, device=row.device)
        row.index_add_(0, index, torch.tensor([bias for _, bias in logit_bias], dtype=row.dtype, device=row.device))
    return row
