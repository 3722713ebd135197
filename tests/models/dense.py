"""An independent oracle for the decoder: ops in plain torch, and a cache that is one contiguous K/V list a sequence.

Deliberately shares nothing with `nanoserve.kernels` or `nanoserve.cache`, and reads as the definitions do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoserve.models.decoder import Decoder
from nanoserve.ops import Rotation, StepWindow


class DenseOps:
    """`ops.Ops` by definition."""

    def embed(self, table: Tensor, step: StepWindow) -> Tensor:
        ids = torch.where(step.input_ids < 0, step.last_tokens[step.table_rows], step.input_ids)
        return table[ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.rms_norm(x + residual, weight, eps), x + residual

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x @ weight.T
        return out if bias is None else out + bias

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half].float(), x[..., half:].float())
        turned = turned * torch.complex(cos[positions], sin[positions])[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.split(gate_up.shape[-1] // 2, dim=-1)
        return gate * torch.sigmoid(gate) * up

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight.T).float()


class DenseCache:
    """`ops.CacheRows` over whole sequences; a table row is a sequence and positions must come in order."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, int], list[Tensor]] = {}
        self._values: dict[tuple[int, int], list[Tensor]] = {}
        self.step: StepWindow | None = None

    def rope_and_write(self, layer: int, qkv: Tensor, rotation: Rotation) -> Tensor:
        assert self.step is not None
        ops, heads, kv_heads = DenseOps(), rotation.heads, rotation.kv_heads
        parts = qkv.reshape(qkv.shape[0], -1, rotation.head_dim)
        q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
        if rotation.q_norm is not None and rotation.k_norm is not None:
            q, k = ops.rms_norm(q, rotation.q_norm, rotation.eps), ops.rms_norm(k, rotation.k_norm, rotation.eps)
        self.write(layer, ops.rope(k, self.step.positions, rotation.cos, rotation.sin), v)
        return ops.rope(q, self.step.positions, rotation.cos, rotation.sin)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        assert self.step is not None
        for row, (sequence, position) in enumerate(zip(self.step.table_rows, self.step.positions, strict=True)):
            keys = self._keys.setdefault((layer, int(sequence)), [])
            assert len(keys) == int(position)
            keys.append(k[row])
            self._values.setdefault((layer, int(sequence)), []).append(v[row])

    def paged_attention(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        assert self.step is not None
        out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        for sequence in self.step.table_rows.unique().tolist():
            rows = (self.step.table_rows == sequence).nonzero()[:, 0]
            keys = torch.stack(self._keys[layer, sequence])
            values = torch.stack(self._values[layer, sequence])
            groups = q.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            lengths, seen = self.step.context_lens[rows, None], torch.arange(keys.shape[0])
            visible = (seen < lengths) & (seen >= lengths - (window or keys.shape[0]))
            scores = torch.einsum("rhd,thd->rht", q[rows], keys) * scale
            weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
            out[rows] = torch.einsum("rht,thd->rhd", weights, values).flatten(1)
        return out


def step_of(ids: list[int], start: int, sequence: int = 0) -> StepWindow:
    """A chunk of one sequence: consecutive positions from `start`, each attending to itself and all before it."""
    positions = torch.arange(start, start + len(ids))
    rows = torch.full((len(ids),), sequence)
    return StepWindow(torch.tensor(ids), positions, positions, positions + 1, rows, torch.zeros(8, dtype=torch.int64))


@torch.no_grad()
def dense_logits(decoder: Decoder, ids: list[int], *, chunks: tuple[int, ...] = ()) -> Tensor:
    """`[len(ids), vocab]`: chunks of the given sizes, then the rest one token at a time; no chunks: all at once."""
    ops, cache, outputs, start = DenseOps(), DenseCache(), [], 0
    sizes = [*chunks, *([1] * (len(ids) - sum(chunks)))] if chunks else [len(ids)]
    for size in sizes:
        cache.step = step_of(ids[start : start + size], start)
        outputs.append(decoder.head(ops, decoder.body(ops, cache.step, cache)))
        start += size
    return torch.cat(outputs)
