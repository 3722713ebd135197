"""The ops a decoder is written in, and how its weights and its attention state reach them.

`Ops` is implemented by a kernel set: `kernels.reference` (torch, any device, the oracle) and others beside it. A kernel set
allocates every output, so the model code is the same whether an op runs at once or is recorded for a later replay.
All activations are row-major `[rows, features]`; a row is one token of one sequence. Nothing here runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One forward's inputs: windows on storage that keeps its address, in the first `rows` rows of StepInputs.

    input_ids     [rows] int64; below 0 the row's token is `last_tokens[table_rows]`
    positions     [rows] int64
    write_slots   [rows] int64; a pad row's is the sink
    context_lens  [rows] int64; tokens the row may attend to, its own included; 0 for a pad row
    table_rows    [rows] int64; the SlotTable row the row's sequence has; `max_sequences` for a pad row
    last_tokens   [max_sequences + 1] int64; the newest token of each table row, the last entry for pad rows
    """

    input_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    context_lens: Tensor
    table_rows: Tensor
    last_tokens: Tensor

    @property
    def rows(self) -> int:
        return int(self.input_ids.shape[0])


class CacheRows(Protocol):
    """The K/V cache as one forward sees it: which slots its rows write and which they read.

    Implemented by `cache.BatchedCacheRows`. q is `[rows, heads, head_dim]`, k and v `[rows, kv_heads, head_dim]`.
    """

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store this step's K and V of one layer at `write_slots`. Precedes every read of the same layer."""

    def paged_attention(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        """`[rows, heads * head_dim]`: softmax(q·K·scale)·V over each row's first `context_lens` positions, of which
        only the last `window` where one is given (sliding-window attention). `context_lens` 0 gives zeros."""


class Ops(Protocol):
    """The vocabulary of the forward. `weight` arguments are whatever the kernel set's `prepare_*` returned."""

    def embed(self, table: Tensor, step: StepWindow) -> Tensor:
        """`[rows, hidden]`: the table's rows for `input_ids`, or for `last_tokens` where an id is negative."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019), in fp32 inside."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[rows, out]`: x · weightᵀ + bias; weight is `[out, in]`."""

    def rope(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the halves of `[rows, heads, head_dim]` by position (Su et al. 2021, half-split layout);
        cos and sin are `[max_positions, head_dim / 2]` fp32 tables."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`[rows, n]` from `[rows, 2n]`: silu(first half) · second half (SwiGLU, Shazeer 2020)."""

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """`[len(rows), features]`: the rows of x that need logits."""

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """`[rows, vocab]` fp32, whatever the dtype of x and weight."""
