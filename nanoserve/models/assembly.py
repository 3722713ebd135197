"""Builds `DecoderWeights` from any checkpoint: which tensors a config needs, of what shape, and where each one goes.

Tensors are named as Hugging Face's Llama names them; a checkpoint format translates to these. Each tensor is read once
and copied straight into its place in a stacked weight, so the peak is the model plus one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoserve.errors import BadCheckpoint, OutOfMemory
from nanoserve.models.config import ModelConfig
from nanoserve.models.decoder import DecoderWeights, LayerWeights

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


def assemble(
    config: ModelConfig, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, progress: Progress
) -> DecoderWeights:
    """Read every tensor into `dtype` on `device`. Raises BadCheckpoint, or OutOfMemory naming the flags to lower."""
    check_tensors(config, checkpoint)
    loader = _Loader(config, checkpoint, dtype, device, progress)
    try:
        return loader.weights()
    except (MemoryError, RuntimeError) as error:
        # torch has a class of its own for an accelerator's memory; the CPU allocator raises a plain RuntimeError.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"{checkpoint.where}: {loader.total:,} bytes of weights do not fit on {device}; "
            "use a smaller --dtype or a smaller model"
        ) from error


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._done = 0
        self.total = weight_bytes(config, dtype.itemsize)

    def weights(self) -> DecoderWeights:
        config = self._config
        embed = self._stacked([_Part(EMBED, (config.vocab_size, config.hidden_size))])
        layers = tuple(self._layer(index) for index in range(config.num_hidden_layers))
        norm = self._stacked([_Part(NORM, (config.hidden_size,))])
        return DecoderWeights(embed, layers, norm, self._head(embed))

    def _layer(self, index: int) -> LayerWeights:
        stacks = _layer_stacks(self._config, index)
        fields: dict[str, Any] = dict.fromkeys(LayerWeights.__slots__)
        for name, parts in stacks.items():
            fields[name] = self._stacked(parts)
        return LayerWeights(**fields)

    def _head(self, embed: Tensor) -> Tensor:
        part = _Part(HEAD, (self._config.vocab_size, self._config.hidden_size))
        if HEAD not in self._checkpoint.shapes:
            return embed
        head = self._stacked([part], counted=not self._config.tie_word_embeddings)
        # Some exporters write a tied head twice. A copy that differs is a head of its own, whatever the flag says.
        return embed if self._config.tie_word_embeddings and torch.equal(head, embed) else head

    def _stacked(self, parts: list[_Part], *, counted: bool = True) -> Tensor:
        rows = sum(part.shape[0] for part in parts)
        stacked = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        start = 0
        for part in parts:
            target = stacked[start : start + part.shape[0]]
            target.copy_(self._checkpoint.fetch(part.name))
            start += part.shape[0]
            if counted:
                self._done += target.nbytes
                self._progress(self._done, self.total)
        return stacked


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
