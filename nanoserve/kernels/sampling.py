"""Choosing tokens from logits, in torch: the oracle for every sampler.

The randomness of a row is one uniform number, a hash of (seed, choice, position), turned into a token by inverting the
cumulative distribution in vocabulary order. So a token depends on its request alone, and a preempted or batched request
draws the numbers it would have drawn alone.
"""

from __future__ import annotations

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


def adjust_row(
    logits: Tensor,
    tokens: Tensor,
    *,
    prompt_tokens: int,
    repetition: float,
    presence: float,
    frequency: float,
    bias_ids: Tensor,
    bias_values: Tensor,
) -> Tensor:
    """A new `[vocab]` fp32 row with penalties and bias applied, in that order. `tokens` `[length]` int64 are the ids of
    the prompt and of what was generated so far.

    repetition divides positive and multiplies other logits of every token in `tokens` (Keskar et al. 2019); presence
    and frequency subtract `presence + frequency * count` for tokens past the prompt (OpenAI API); a bias is added.
    """
    row = logits.clone()
    if repetition != 1.0:
        seen = torch.unique(tokens)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if presence or frequency:
        counts = torch.bincount(tokens[prompt_tokens:], minlength=row.shape[0])
        row -= torch.where(counts > 0, presence + frequency * counts, 0.0)
    return row.index_add_(0, bias_ids, bias_values)


def rank(logits: Tensor, count: int) -> Tensor:
    """`[rows, count]` int64: the ids of each row's largest logits, the lowest id first among equals, which topk itself
    leaves open. Orders integers that hold both the logit's order and the id."""
    bits = (logits + 0.0).view(torch.int32).long()  # adding zero makes -0.0 the 0.0 it equals
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order << 32) - torch.arange(logits.shape[1], device=logits.device)
    return keys.topk(count, dim=-1).indices
