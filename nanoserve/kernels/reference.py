"""The kernel set in plain torch: any device, and the oracle that every other kernel set is tested against.

K/V of one layer is `(keys, values)`, each `[kv_heads, slots, head_dim]`, so that gathering a rectangle yields operands
of one batched matrix product without a copy. Attention scores and the softmax are fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.kernels.sampling import sample_rows
from nanoserve.ops import SamplingWindow, StepWindow

if TYPE_CHECKING:
    from nanoserve.ops import KVStore


class ReferenceOps:
    """Implements `ops.Ops` and `ops.KVKernels`; holds no state."""

    name = "reference"

    # --- the decoder's vocabulary -----------------------------------------------------------------------------

    def embed(self, table: Tensor, step: StepWindow) -> Tensor:
        ids = torch.where(step.input_ids < 0, step.last_tokens[step.table_rows], step.input_ids)
        return F.embedding(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = cos[positions].unsqueeze(1).to(x.dtype)
        s = sin[positions].unsqueeze(1).to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).float()

    def sample(self, logits: Tensor, sampling: SamplingWindow, positions: Tensor) -> Tensor:
        return sample_rows(logits, sampling, positions)

    def remember(self, last_tokens: Tensor, table_rows: Tensor, tokens: Tensor) -> None:
        last_tokens.index_copy_(0, table_rows, tokens)

    # --- the K/V store ----------------------------------------------------------------------------------------

    def new_kv_store(
        self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVStore:
        shape = (kv_heads, slots, head_dim)
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def write_kv(self, store: KVStore, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = store
        keys.index_copy_(1, slots, k.transpose(0, 1))
        values.index_copy_(1, slots, v.transpose(0, 1))

    def read_kv(self, store: KVStore, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = store
        return keys.index_select(1, slots).transpose(0, 1), values.index_select(1, slots).transpose(0, 1)

    def fill_kv(self, store: KVStore, value: float) -> None:
        for side in store:
            side.fill_(value)

    def masked_slots(self, slots: Tensor, context_lens: Tensor) -> Tensor:
        columns = torch.arange(slots.shape[1], device=slots.device)
        return torch.where(columns < context_lens.unsqueeze(1), slots, slots[:, :1])

    def rectangle_attention(
        self, q: Tensor, store: KVStore, slots: Tensor, context_lens: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        keys, values = store
        rows, heads, head_dim = q.shape
        kv_heads, width = keys.shape[0], slots.shape[1]
        flat = slots.reshape(-1)
        k = keys.index_select(1, flat).view(kv_heads, rows, width, head_dim)
        v = values.index_select(1, flat).view(kv_heads, rows, width, head_dim)
        grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
        scores = torch.matmul(grouped, k.transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~_visible(width, context_lens, window)[None, :, None, :], float("-inf"))
        out = torch.matmul(scores.softmax(-1).to(v.dtype), v).transpose(0, 1).reshape(rows, heads * head_dim)
        # A row with no context has no softmax: its scores are all -inf and its slots are the sink's, whatever it holds.
        return torch.where(context_lens.unsqueeze(1) > 0, out, torch.zeros((), dtype=out.dtype, device=out.device))

    def chunk_attention(
        self, q: Tensor, store: KVStore, slots: Tensor, context_lens: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        keys, values = store
        rows, heads, head_dim = q.shape
        groups = heads // keys.shape[0]
        k = keys.index_select(1, slots).repeat_interleave(groups, dim=0)
        v = values.index_select(1, slots).repeat_interleave(groups, dim=0)
        mask = _visible(slots.shape[0], context_lens, window)
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale)
        return out[0].transpose(0, 1).reshape(rows, heads * head_dim)


def _visible(width: int, context_lens: Tensor, window: int | None) -> Tensor:
    """`[rows, width]` bool: the positions below `context_lens`, of which only the last `window` where one is given."""
    columns = torch.arange(width, device=context_lens.device)
    lens = context_lens.unsqueeze(1)
    visible = columns < lens
    return visible if window is None else visible & (columns >= lens - window)
