"""The kernel set in plain torch: any device, and the oracle that every other kernel set is tested against.

K/V of one layer is `(keys, values)`, each `[slots, kv_heads, head_dim]`: a slot's numbers lie together, so that a
rectangle is gathered in long copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.kernels.memory import lazy_zeros
from nanoserve.kernels.sampling import adjust_row, rank, sample_rows
from nanoserve.ops import HistoryWindow, Logprobs, Rectangle, Rotation, SamplingWindow, StepWindow
from nanoserve.request import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from nanoserve.ops import KVStore


class ReferenceOps:
    """Implements `ops.Ops` and `ops.RectangleKernels`; holds no state."""

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

    def keep(self, x: Tensor, place: Tensor) -> None:
        place[: x.shape[0]].copy_(x)

    def sample(
        self, logits: Tensor, sampling: SamplingWindow, positions: Tensor, index: Tensor | None = None
    ) -> Tensor:
        return sample_rows(logits, sampling, positions if index is None else positions[index])

    def remember(self, last_tokens: Tensor, table_rows: Tensor, tokens: Tensor, index: Tensor | None = None) -> None:
        last_tokens.index_copy_(0, table_rows if index is None else table_rows[index], tokens)

    def adjust_logits(
        self, logits: Tensor, history: HistoryWindow, step: StepWindow, index: Tensor | None = None
    ) -> Tensor:
        # One row at a time, with lengths read on the host: so it is never part of a captured graph.
        table_rows, lengths = _logit_rows(step, index)
        counts, penalties = history.counts[table_rows].tolist(), history.penalties[table_rows].tolist()
        adjusted = logits.clone()
        for row, (table_row, length) in enumerate(zip(table_rows.tolist(), lengths.tolist(), strict=True)):
            prompt_tokens, biases, _ = counts[row]
            repetition, presence, frequency = penalties[row]
            adjusted[row] = adjust_row(
                logits[row],
                history.tokens[table_row, :length].long(),
                prompt_tokens=prompt_tokens,
                repetition=repetition,
                presence=presence,
                frequency=frequency,
                bias_ids=history.bias_ids[table_row, :biases].long(),
                bias_values=history.bias_values[table_row, :biases],
            )
        return adjusted

    def append_tokens(
        self, history: HistoryWindow, tokens: Tensor, step: StepWindow, index: Tensor | None = None
    ) -> None:
        history.tokens.index_put_(_logit_rows(step, index), tokens.int())

    def logprobs(
        self, logits: Tensor, tokens: Tensor, history: HistoryWindow, step: StepWindow, index: Tensor | None = None
    ) -> Logprobs:
        own = torch.log_softmax(logits, dim=-1)
        top_ids = rank(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
        return Logprobs(own.gather(1, tokens.unsqueeze(1))[:, 0], top_ids.int(), own.gather(1, top_ids))

    # --- the K/V store ----------------------------------------------------------------------------------------

    def new_kv_store(
        self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVStore:
        shape = (slots, kv_heads, head_dim)
        return lazy_zeros(shape, dtype, device), lazy_zeros(shape, dtype, device)

    def rope_and_write(self, qkv: Tensor, store: KVStore, step: StepWindow, rotation: Rotation) -> Tensor:
        rows, heads, kv_heads, head_dim = qkv.shape[0], rotation.heads, rotation.kv_heads, rotation.head_dim
        parts = qkv.view(rows, heads + 2 * kv_heads, head_dim)
        q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
        if rotation.q_norm is not None:
            q = self.rms_norm(q, rotation.q_norm, rotation.eps)
        if rotation.k_norm is not None:
            k = self.rms_norm(k, rotation.k_norm, rotation.eps)
        k = self.rope(k, step.positions, rotation.cos, rotation.sin)
        self.write_kv(store, step.write_slots, k, v)
        return self.rope(q, step.positions, rotation.cos, rotation.sin)

    def write_kv(self, store: KVStore, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = store
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def read_kv(self, store: KVStore, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = store
        return keys.index_select(0, slots), values.index_select(0, slots)

    def fill_kv(self, store: KVStore, value: float) -> None:
        for side in store:
            side.fill_(value)

    def new_rectangle(self, slots: Tensor, context_lens: Tensor) -> Rectangle:
        columns = torch.arange(slots.shape[1], device=slots.device)
        return Rectangle(torch.where(columns < context_lens.unsqueeze(1), slots, slots[:, :1]), context_lens)

    def rectangle_attention(
        self, q: Tensor, store: KVStore, rectangle: Rectangle, *, scale: float, window: int | None
    ) -> Tensor:
        rows, heads, head_dim = q.shape
        width, kv_heads = rectangle.slots.shape[1], store[0].shape[1]
        flat = rectangle.slots.reshape(-1)
        if rectangle.scratch is None:
            shape = (flat.shape[0], kv_heads, head_dim)
            rectangle.scratch = (q.new_empty(shape), q.new_empty(shape))
        k, v = (
            torch.index_select(side, 0, flat, out=out).view(rows, width, kv_heads, head_dim).transpose(1, 2)
            for side, out in zip(store, rectangle.scratch, strict=True)
        )
        # The query heads that share a K/V head stand where a longer query would: nothing is repeated for them.
        grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
        mask = _visible(width, rectangle.context_lens, window)[:, None, None, :]
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(rows, -1)
        # A row with no context has no softmax, and its slots are the sink's, whatever that holds.
        return torch.where(rectangle.context_lens.unsqueeze(1) > 0, out, 0.0)

    def chunk_attention(
        self, q: Tensor, store: KVStore, slots: Tensor, context_lens: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        keys, values = store
        rows, heads, head_dim = q.shape
        kv_heads, width = keys.shape[1], slots.shape[0]
        groups = heads // kv_heads
        k = keys.index_select(0, slots).transpose(0, 1)[None]
        v = values.index_select(0, slots).transpose(0, 1)[None]
        grouped = q.view(rows, kv_heads, groups, head_dim).transpose(0, 1).reshape(1, kv_heads, rows * groups, head_dim)
        mask = _visible(width, context_lens, window).repeat_interleave(groups, dim=0)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return out.view(kv_heads, rows, groups, head_dim).transpose(0, 1).reshape(rows, heads * head_dim)

    def paged_attention(
        self, q: Tensor, store: KVStore, step: StepWindow, table: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        # One sequence's rows at a time: the oracle's way, which reads lengths on the host and so is never captured.
        rows, heads, head_dim = q.shape
        out = q.new_zeros(rows, heads * head_dim)
        lens = step.context_lens.tolist()
        for start, stop in _runs(step.table_rows.tolist()):
            context = max(lens[start:stop])
            if context:
                out[start:stop] = self.chunk_attention(
                    q[start:stop],
                    store,
                    table[int(step.table_rows[start]), :context],
                    step.context_lens[start:stop],
                    scale=scale,
                    window=window,
                )
        return out


def _logit_rows(step: StepWindow, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """(table row, position of the token to come) of each logit row."""
    return (step.table_rows, step.context_lens) if index is None else (step.table_rows[index], step.context_lens[index])


def _runs(values: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of every stretch of equal values."""
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return list(zip(starts, [*starts[1:], len(values)], strict=True))


def _visible(width: int, context_lens: Tensor, window: int | None) -> Tensor:
    """`[rows, width]` bool: the positions below `context_lens`, of which only the last `window` where one is given."""
    columns = torch.arange(width, device=context_lens.device)
    lens = context_lens.unsqueeze(1)
    visible = columns < lens
    return visible if window is None else visible & (columns >= lens - window)
