"""A GGUF file as a `Checkpoint`: names translated, blocks dequantised, and the converter's transforms undone.

The reference converter stores Llama's q and k with the rows of each head interleaved, for an engine that rotates
neighbouring pairs. Ours rotates halves, as Hugging Face's does, so the interleaving is undone here (Qwen's is none).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoserve.errors import BadCheckpoint
from nanoserve.gguf_file import GGUFFile
from nanoserve.models.assembly import EMBED, HEAD, NORM
from nanoserve.models.config import ModelConfig
from nanoserve.ops import QuantisedBlocks

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SUPPORTED = ("F32", "F16", "BF16", *QUANTISED)
_CARRIED = ("rope_freqs.weight",)  # read with the config
_GLOBAL = {"token_embd.weight": EMBED, "output_norm.weight": NORM, "output.weight": HEAD}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """The tensors of an open file under Hugging Face's names. Raises BadCheckpoint for a type it cannot read."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._stored = {_standard_name(name): name for name in file.tensors if name not in _CARRIED}
        self._shapes = {name: file.tensors[stored].shape for name, stored in self._stored.items()}
        for name in self._stored.values():
            kind = file.tensors[name].type_name
            if kind not in SUPPORTED:
                raise BadCheckpoint(f"{file.path}: tensor {name!r} is {kind}; supported are {', '.join(SUPPORTED)}")
        self._interleaved_heads: dict[str, int] = {}
        if config.architecture == "LlamaForCausalLM":
            self._interleaved_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def where(self) -> str:
        return str(self._file.path)

    def label(self, name: str) -> str:
        return f"{self._file.path}: tensor {self._stored[name]!r}"

    def fetch(self, name: str) -> Tensor:
        stored = self._stored[name]
        tensor = self._file.tensors[stored]
        values = read_tensor(self._file.raw(stored), tensor.type_name, tensor.shape)
        heads = self._heads_of(stored)
        return values if heads is None else undo_interleave(values, heads)

    def blocks(self, name: str) -> QuantisedBlocks | None:
        if self.kind(name) not in QUANTISED or len(self._shapes[name]) != 2:
            return None
        stored = self._stored[name]
        tensor = self._file.tensors[stored]
        heads = self._heads_of(stored)
        order = None if heads is None else undo_interleave(torch.arange(tensor.shape[0]), heads).numpy()
        return QuantisedBlocks(self._file.raw(stored), tensor.type_name, order)

    def kind(self, name: str) -> str:
        return self._file.tensors[self._stored[name]].type_name

    def _heads_of(self, stored: str) -> int | None:
        """How many heads the rows of a tensor are interleaved in; None if they are in order."""
        block = _BLOCK.fullmatch(stored)
        return self._interleaved_heads.get(block[2]) if block else None


def read_tensor(raw: npt.NDArray[np.uint8], type_name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor's bytes as torch: float types in their own dtype, quantised ones as fp32. Always a copy."""
    if type_name == "F32":
        return torch.from_numpy(raw.view(np.float32).reshape(shape).copy())
    if type_name == "F16":
        return torch.from_numpy(raw.view(np.float16).reshape(shape).copy())
    if type_name == "BF16":
        return torch.from_numpy(raw.view(np.int16).reshape(shape).copy()).view(torch.bfloat16)
    # gguf takes a tenth of a second to import, which a safetensors model need not pay.
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = math.prod(shape[:-1])
    # The library works through 16 rows a call, which for short rows is all overhead. Blocks know nothing of rows, so
    # neighbouring rows may go as one.
    joined = next(size for size in (16, 8, 4, 2, 1) if rows % size == 0 and (size * shape[-1] <= 8192 or size == 1))
    values = dequantize(raw.reshape(rows // joined, -1), GGMLQuantizationType[type_name])
    return torch.from_numpy(values.reshape(shape))


def undo_interleave(values: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, h, 1, h + 1, …), with h = head_dim / 2, back to (0, 1, 2, …)."""
    rows, *rest = values.shape
    return values.view(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)


def _standard_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor; an unknown one keeps its own and is refused as an extra."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _MODULES:
        return name
    return f"model.layers.{block[1]}.{_MODULES[block[2]]}.{block[3]}"
