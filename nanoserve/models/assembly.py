"""Builds `DecoderWeights` from any checkpoint: which tensors a config needs, of what shape, and where each one goes.

Tensors are named as Hugging Face's Llama names them; a checkpoint format translates to these. What becomes of a tensor
is the kernel set's business (`ops.WeightMaker`). Each is read once, when it is made into a weight, so the peak is the
model plus one weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nanoserve.errors import BadCheckpoint, OutOfMemory
from nanoserve.models.config import ModelConfig
from nanoserve.models.decoder import DecoderWeights, LayerWeights
from nanoserve.ops import QuantisedBlocks, StoredTensor, WeightMaker

if TYPE_CHECKING:
    from nanoserve.ops import Weight

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all), both of the loaded model."""


class Checkpoint(Protocol):
    """A checkpoint's tensors under Hugging Face's names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor there is, but for those the format is known to carry beside the weights."""

    @property
    def where(self) -> str:
        """The file or folder, for messages about a tensor that is missing."""

    def label(self, name: str) -> str:
        """`file: tensor 'its name in the file'`, for messages about one that is there."""

    def fetch(self, name: str) -> Tensor:
        """The tensor on the CPU, in any floating dtype. Raises BadCheckpoint."""

    def blocks(self, name: str) -> QuantisedBlocks | None:
        """The tensor's quantised blocks; None if it is stored as floats."""

    def kind(self, name: str) -> str:
        """What its numbers are, as the format names them (BF16, Q4_1), or w4 or w8 where they are quantised at load."""


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    shape: tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor the model must have, in loading order; a tied head is not among them."""
    parts = [_Part(EMBED, (config.vocab_size, config.hidden_size))]
    for layer in range(config.num_hidden_layers):
        for stack in _layer_stacks(config, layer).values():
            parts += stack
    parts.append(_Part(NORM, (config.hidden_size,)))
    if not config.tie_word_embeddings:
        parts.append(_Part(HEAD, (config.vocab_size, config.hidden_size)))
    return {part.name: part.shape for part in parts}


def weight_kinds(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """What the matrices are: of the layers (the commonest first), the embedding and the head."""
    layers = Counter(
        checkpoint.kind(part.name)
        for index in range(config.num_hidden_layers)
        for stack in _layer_stacks(config, index).values()
        for part in stack
        if len(part.shape) == 2
    )
    embed = checkpoint.kind(EMBED)
    head = checkpoint.kind(HEAD) if HEAD in checkpoint.shapes else embed
    return {"layers": " + ".join(kind for kind, _ in layers.most_common()), "embedding": embed, "head": head}


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all weights at `itemsize` bytes a number, a tied head counted once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values()) * itemsize


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare names and shapes with what the config needs, before anything is read. Raises BadCheckpoint."""
    expected, shapes = expected_tensors(config), checkpoint.shapes
    for name, shape in expected.items():
        if name not in shapes:
            missing = [each for each in expected if each not in shapes]
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise BadCheckpoint(f"{checkpoint.where}: tensor {name!r} of shape {list(shape)} is missing{more}")
    expected.setdefault(HEAD, expected[EMBED])
    for name, found in shapes.items():
        if name not in expected:
            raise BadCheckpoint(f"{checkpoint.label(name)} belongs to nothing in a {config.architecture}")
        if found != expected[name]:
            raise BadCheckpoint(
                f"{checkpoint.label(name)} has shape {list(found)}; the config needs {list(expected[name])}"
            )


class TorchWeights:
    """`ops.WeightMaker` of the kernel sets that compute with plain tensors: every weight in `dtype` on `device`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device

    def vector(self, parts: Sequence[StoredTensor]) -> Tensor:
        rows = sum(part.shape[0] for part in parts)
        stacked = torch.empty((rows, *parts[0].shape[1:]), dtype=self.dtype, device=self._device)
        start = 0
        for part in parts:
            stacked[start : start + part.shape[0]].copy_(part.fetch())
            start += part.shape[0]
        return stacked

    matrix = vector

    def table(self, part: StoredTensor) -> Tensor:
        return self.vector([part])

    def tied(self, table: Tensor, part: StoredTensor) -> Tensor:
        return table


def assemble(config: ModelConfig, checkpoint: Checkpoint, *, maker: WeightMaker, progress: Progress) -> DecoderWeights:
    """Read every tensor and make a weight of it. Raises BadCheckpoint, or OutOfMemory naming the flags to lower."""
    check_tensors(config, checkpoint)
    loader = _Loader(config, checkpoint, maker, progress)
    try:
        return loader.weights()
    except (MemoryError, RuntimeError) as error:
        # torch has a class of its own for an accelerator's memory; the CPU allocator raises a plain RuntimeError.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"{checkpoint.where}: {loader.total:,} bytes of weights do not fit; "
            "use a smaller --dtype or a smaller model"
        ) from error


@dataclass(frozen=True, slots=True)
class _Stored:
    """`ops.StoredTensor`. `seen` is told the elements of a tensor once it has been read."""

    checkpoint: Checkpoint
    part: _Part
    seen: Callable[[int], None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    def fetch(self) -> Tensor:
        tensor = self.checkpoint.fetch(self.part.name)
        self.seen(tensor.numel())
        return tensor

    def blocks(self) -> QuantisedBlocks | None:
        blocks = self.checkpoint.blocks(self.part.name)
        if blocks is not None:
            self.seen(torch.Size(self.shape).numel())
        return blocks


class _Loader:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, maker: WeightMaker, progress: Progress) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._maker = maker
        self._progress = progress
        self._done = 0
        self.total = weight_bytes(config, maker.dtype.itemsize)

    def weights(self) -> DecoderWeights:
        config = self._config
        embed = self._maker.table(self._stored(_Part(EMBED, (config.vocab_size, config.hidden_size))))
        layers = tuple(self._layer(index) for index in range(config.num_hidden_layers))
        norm = self._maker.vector([self._stored(_Part(NORM, (config.hidden_size,)))])
        return DecoderWeights(embed, layers, norm, self._head(embed))

    def _layer(self, index: int) -> LayerWeights:
        fields: dict[str, Any] = dict.fromkeys(LayerWeights.__slots__)
        for name, parts in _layer_stacks(self._config, index).items():
            stored = [self._stored(part) for part in parts]
            make = self._maker.vector if len(parts[0].shape) == 1 else self._maker.matrix
            fields[name] = make(stored)
        return LayerWeights(**fields)

    def _head(self, embed: Weight) -> Weight:
        shape = (self._config.vocab_size, self._config.hidden_size)
        tied = self._config.tie_word_embeddings
        # Some exporters write a tied head twice. A copy that differs is a head of its own, whatever the flag says.
        copied = tied and HEAD in self._checkpoint.shapes
        if copied and torch.equal(self._checkpoint.fetch(HEAD), self._checkpoint.fetch(EMBED)):
            copied = False
        if copied or not tied:
            return self._maker.matrix([self._stored(_Part(HEAD, shape), counted=not tied)])
        return self._maker.tied(embed, self._stored(_Part(EMBED, shape), counted=False))

    def _stored(self, part: _Part, *, counted: bool = True) -> _Stored:
        return _Stored(self._checkpoint, part, self._seen if counted else _ignore)

    def _seen(self, elements: int) -> None:
        self._done += elements * self._maker.dtype.itemsize
        self._progress(self._done, self.total)


def _ignore(elements: int) -> None:
    """A tensor that is read once more for another purpose does not count again."""


def _layer_stacks(config: ModelConfig, index: int) -> dict[str, list[_Part]]:
    """LayerWeights field to the tensors stacked in it, in order."""
    prefix = f"model.layers.{index}."
    hidden, q, kv, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size

    def part(name: str, *shape: int) -> _Part:
        return _Part(prefix + name, shape)

    attention, mlp = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    stacks = {
        "input_norm": [part("input_layernorm.weight", hidden)],
        "qkv": [part(f"{name}.weight", rows, hidden) for name, rows in zip(attention, (q, kv, kv), strict=True)],
        "o": [part("self_attn.o_proj.weight", hidden, q)],
        "post_attention_norm": [part("post_attention_layernorm.weight", hidden)],
        "gate_up": [part(f"{name}.weight", inner, hidden) for name in mlp],
        "down": [part("mlp.down_proj.weight", hidden, inner)],
    }
    if config.attention_bias:
        stacks["qkv_bias"] = [part(f"{name}.bias", rows) for name, rows in zip(attention, (q, kv, kv), strict=True)]
    if config.attention_output_bias:
        stacks["o_bias"] = [part("self_attn.o_proj.bias", hidden)]
    if config.qk_norm:
        stacks["q_norm"] = [part("self_attn.q_norm.weight", config.head_dim)]
        stacks["k_norm"] = [part("self_attn.k_norm.weight", config.head_dim)]
    if config.mlp_bias:
        stacks["gate_up_bias"] = [part(f"{name}.bias", inner) for name in mlp]
        stacks["down_bias"] = [part("mlp.down_proj.bias", hidden)]
    return stacks
