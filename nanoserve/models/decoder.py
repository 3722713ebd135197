"""The one decoder of the Llama family: pre-norm blocks of grouped-query attention and SwiGLU, written against `Ops`.

What a family adds is data: biases, qk-norm, windows and rope tables come from the config and the weights. The forward
touches tensors only through ops, the cache, and views of op outputs, so that a kernel set may record it for a replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from nanoserve.models.config import ModelConfig
from nanoserve.ops import CacheRows, Ops, Rotation, StepWindow

if TYPE_CHECKING:
    from nanoserve.ops import Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Matrices are `[out, in]`; q, k and v are stacked along out, and so are gate and up.

    qkv       [q_size + 2 * kv_size, hidden]        o     [hidden, q_size]
    gate_up   [2 * intermediate, hidden]            down  [hidden, intermediate]
    norms     [hidden]; q_norm and k_norm [head_dim]; biases [out]; None where the family has none
    """

    input_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """embed and head are `[vocab, hidden]` and one tensor where the model ties them; final_norm is `[hidden]`."""

    embed: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Weight

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, a tied head counted once."""
        tensors: list[Weight] = [self.embed, self.final_norm]
        if self.head is not self.embed:
            tensors.append(self.head)
        for layer in self.layers:
            tensors += [getattr(layer, name) for name in LayerWeights.__slots__]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def step_bytes(self) -> int:
        """Bytes a step reads of them: all but an embedding table that is not the head, of which it reads rows."""
        return self.nbytes - (self.embed.nbytes if self.head is not self.embed else 0)


class Hidden(NamedTuple):
    """What a body leaves of each row: `residual [rows, hidden]` and, to be joined to it, `attended [rows, q_size]`, the
    last layer's attention before its output matrix."""

    residual: Tensor
    attended: Tensor

    def rows(self, ops: Ops, index: Tensor) -> Hidden:
        """Of rows `index` alone."""
        return Hidden(ops.gather_rows(self.residual, index), ops.gather_rows(self.attended, index))


class Decoder:
    """Stateless: weights and tables in, hidden states and logits out. `cos` and `sin` are `[max_positions, head_dim/2]`
    fp32; positions must stay below max_positions."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, cos: Tensor, sin: Tensor) -> None:
        self.config = config
        self.weights = weights
        self.cos = cos
        self.sin = sin
        self._scale = config.head_dim**-0.5

    @property
    def max_positions(self) -> int:
        return int(self.cos.shape[0])

    def body(self, ops: Ops, step: StepWindow, cache: CacheRows) -> Hidden:
        """Up to the last layer's attention, for every row; K and V of every row are in the cache after it."""
        layers = self.weights.layers
        residual = ops.embed(self.weights.embed, step)
        x = ops.rms_norm(residual, layers[0].input_norm, self.config.rms_norm_eps)
        attended = self._attention(0, layers[0], x, ops, cache)
        for index, (before, layer) in enumerate(pairwise(layers), start=1):
            x, residual = self._join(before, Hidden(residual, attended), layer.input_norm, ops)
            attended = self._attention(index, layer, x, ops, cache)
        return Hidden(residual, attended)

    def head(self, ops: Ops, hidden: Hidden) -> Tensor:
        """`[rows, vocab]` fp32 logits: what is left of the last layer, the final norm and the output matrix. No row
        needs another here, so it is for the rows that choose a token alone."""
        x, _ = self._join(self.weights.layers[-1], hidden, self.weights.final_norm, ops)
        return ops.logits(x, self.weights.head)

    def _join(self, layer: LayerWeights, hidden: Hidden, next_norm: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """What a layer does after its attention: (the next norm's output, the residual)."""
        eps = self.config.rms_norm_eps
        x = ops.linear(hidden.attended, layer.o, layer.o_bias)
        x, residual = ops.add_rms_norm(x, hidden.residual, layer.post_attention_norm, eps)
        x = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
        return ops.add_rms_norm(ops.linear(x, layer.down, layer.down_bias), residual, next_norm, eps)

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, ops: Ops, cache: CacheRows) -> Tensor:
        config = self.config
        rotation = Rotation(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            cos=self.cos,
            sin=self.sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        q = cache.rope_and_write(index, ops.linear(x, layer.qkv, layer.qkv_bias), rotation)
        return cache.paged_attention(index, q, scale=self._scale, window=config.windows[index])
