"""The ops a decoder is written in, and how its weights and its attention state reach them.

`Ops` is implemented by a kernel set: `kernels.reference` (torch, any device, the oracle) and others beside it. A kernel
set allocates every output, so the model code is the same whether an op runs at once or is recorded for a later replay.
All activations are row-major `[rows, features]`; a row is one token of one sequence. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    KVStore = tuple[Tensor, ...]
    Weight = Any


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


@dataclass(frozen=True, slots=True)
class SamplingWindow:
    """How the token of each logit row is chosen, `[rows]` each: windows on StepInputs.

    temperature fp32, 0 is greedy; top_k int64, 0 is off; top_p fp32, 1 is off; min_p fp32, 0 is off; seed and choice
    int64. The randomness of a row is a function of (seed, choice, position of the token) alone.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """What the full head knows of each table row, `max_sequences` and one for pad rows: windows on a HistoryTable.

    tokens                 [table rows, max_model_len] int32; the ids of prompt and answer by position
    counts                 [table rows, 3] int64; tokens of the prompt, entries of the bias, likeliest tokens to report
                           (-1: no log-probability at all)
    penalties              [table rows, 3] fp32; repetition (1 is off), presence and frequency (0 is off)
    bias_ids, bias_values  [table rows, MAX_BIASES] int32 and fp32
    """

    tokens: Tensor
    counts: Tensor
    penalties: Tensor
    bias_ids: Tensor
    bias_values: Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities under the model's own distribution; a row that asked for none holds anything.

    chosen   [rows] fp32; the chosen tokens'
    top_ids  [rows, min(MAX_TOP_LOGPROBS, vocab)] int32; the likeliest tokens, the lowest id first among equals. Only as
             many as the row asked for are written
    top      as wide, fp32; theirs
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """How one layer's q and k become position-dependent.

    cos, sin        [max_positions, head_dim / 2] fp32 (Su et al. 2021; the halves of a head are rotated by each other)
    q_norm, k_norm  [head_dim]: an RMS norm over each head before the rotation (Qwen3), or None
    """

    heads: int
    kv_heads: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


class StoredTensor(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def fetch(self) -> Tensor:
        """The values, on the CPU, in any floating dtype. Raises BadCheckpoint."""

    def blocks(self) -> QuantisedBlocks | None:
        """The stored blocks of a quantised matrix; None if the tensor is stored as floats."""


@dataclass(frozen=True, slots=True)
class QuantisedBlocks:
    """A matrix as GGUF stores it.

    raw        uint8, all rows' blocks one after the other
    type_name  Q4_0, Q8_0, Q4_K …
    order      [rows]: which stored row each row is; None if they are in order
    """

    raw: Any
    type_name: str
    order: Any | None


class WeightMaker(Protocol):
    """How a kernel set wants its weights. What it makes of a matrix, only its own ops can read."""

    dtype: torch.dtype
    """Of vectors' values as they were rounded, and of K/V."""

    def vector(self, parts: Sequence[StoredTensor]) -> Tensor:
        """Norms and biases, concatenated."""

    def matrix(self, parts: Sequence[StoredTensor]) -> Weight:
        """`[out, in]` for `linear` and `logits`; parts are stacked along out."""

    def table(self, part: StoredTensor) -> Weight:
        """`[vocab, hidden]` for `embed`."""

    def tied(self, table: Weight, part: StoredTensor) -> Weight:
        """The head that shares its values with an embedding table."""


class CacheRows(Protocol):
    """The K/V cache as one forward sees it: which slots its rows write and which they read. Implemented in `cache`."""

    def rope_and_write(self, layer: int, qkv: Tensor, rotation: Rotation) -> Tensor:
        """q `[rows, heads, head_dim]`, rotated, of qkv `[rows, (heads + 2 kv_heads) · head_dim]`; the rotated k and the
        v are stored at the rows' `write_slots`. Precedes every read of the same layer."""

    def paged_attention(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        """`[rows, heads * head_dim]`: softmax(q·K·scale)·V over each row's first `context_lens` positions, of which
        only the last `window` where one is given (sliding-window attention). `context_lens` 0 gives zeros."""


@dataclass(slots=True)
class Rectangle:
    """One forward's rectangle read.

    slots         [rows, width] int64; a position the row may not attend to holds the row's first slot instead
    context_lens  [rows] int64
    scratch       the gathered K and V, one layer's at a time: made by the first layer, used again by the others, since
                  the rectangle is the largest thing a forward allocates
    """

    slots: Tensor
    context_lens: Tensor
    scratch: tuple[Tensor, Tensor] | None = None


class KVKernels(Protocol):
    """The K/V side of a kernel set: the layout of one layer's store belongs to it, and only `cache` calls it."""

    def new_kv_store(
        self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVStore:
        """Zeroed storage for `slots` slots of one layer."""

    def rope_and_write(self, qkv: Tensor, store: KVStore, step: StepWindow, rotation: Rotation) -> Tensor:
        """See CacheRows.rope_and_write."""

    def write_kv(self, store: KVStore, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, `[rows, kv_heads, head_dim]`, at `slots` `[rows]`. Duplicates are legal for the sink only."""

    def read_kv(self, store: KVStore, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(k, v) at `slots`, each `[rows, kv_heads, head_dim]`: for tests and self-tests, in no kernel's own layout."""

    def fill_kv(self, store: KVStore, value: float) -> None:
        """Set every slot to `value`: the poison tests."""

    def paged_attention(
        self, q: Tensor, store: KVStore, step: StepWindow, table: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Each row walks the slots of its table row, `table[table_rows[row]]` with table `[max_sequences, width]`
        int64, up to its context. q `[rows, heads, head_dim]`. See CacheRows.paged_attention for the result."""


@runtime_checkable
class RectangleKernels(KVKernels, Protocol):
    """A kernel set that can also gather: a rectangle for decode steps, one sequence's slots for chunks of a prompt."""

    def new_rectangle(self, slots: Tensor, context_lens: Tensor) -> Rectangle:
        """What the layers of one forward over `slots` `[rows, width]` share.

        A masked position must not be loaded at all, since 0 · NaN is NaN and the memory behind it may hold anything.
        """

    def rectangle_attention(
        self, q: Tensor, store: KVStore, rectangle: Rectangle, *, scale: float, window: int | None
    ) -> Tensor:
        """One query a row, q `[rows, heads, head_dim]`. See CacheRows.paged_attention for the result."""

    def chunk_attention(
        self, q: Tensor, store: KVStore, slots: Tensor, context_lens: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Many queries of one sequence. q `[n, heads, head_dim]`, slots `[width]`, context_lens `[n]`."""


class Ops(Protocol):
    """The vocabulary of the forward. `Weight` arguments are what the kernel set's WeightMaker made."""

    def embed(self, table: Weight, step: StepWindow) -> Tensor:
        """`[rows, hidden]`: the table's rows for `input_ids`, or for `last_tokens` where an id is negative."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019), in fp32 inside."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """`[rows, out]`: x · weightᵀ + bias; weight is `[out, in]`."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`[rows, n]` from `[rows, 2n]`: silu(first half) · second half (SwiGLU, Shazeer 2020)."""

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """`[len(rows), features]`: the rows of x that need logits."""

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """`[rows, vocab]` fp32, whatever the dtype of x and weight."""

    def keep(self, x: Tensor, place: Tensor) -> None:
        """Leave x `[rows, features]` in the first rows of `place`, whose address another program reads."""

    def sample(
        self, logits: Tensor, sampling: SamplingWindow, positions: Tensor, index: Tensor | None = None
    ) -> Tensor:
        """`[rows]` int64 token ids. Greedy ties take the lowest id. Otherwise: temperature, then top-k, top-p and
        min-p, then one draw keyed by (seed, choice, position of the token to come), which is `positions[index]`, or
        `positions` where no index is given."""

    def remember(self, last_tokens: Tensor, table_rows: Tensor, tokens: Tensor, index: Tensor | None = None) -> None:
        """last_tokens[table_rows[index]] = tokens: the next step may read its ids from there."""

    # The full head: `step.table_rows[index]` are the rows' table rows and `step.context_lens[index]` the positions of
    # the tokens to come, which is how many tokens their histories hold; without an index, row for row.

    def adjust_logits(
        self, logits: Tensor, history: HistoryWindow, step: StepWindow, index: Tensor | None = None
    ) -> Tensor:
        """`[rows, vocab]`: logits with the penalties and the bias of each row's table row (`sampling.adjust_row`). A
        row without any comes out as it went in, to the bit; `logits` stay the model's own."""

    def append_tokens(
        self, history: HistoryWindow, tokens: Tensor, step: StepWindow, index: Tensor | None = None
    ) -> None:
        """Each row's token joins the history of its table row, at its position."""

    def logprobs(
        self, logits: Tensor, tokens: Tensor, history: HistoryWindow, step: StepWindow, index: Tensor | None = None
    ) -> Logprobs:
        """Of softmax(logits): the chosen tokens' log-probabilities, and the likeliest tokens with theirs."""
