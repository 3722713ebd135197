"""From a `ModelSource` to a decoder that can run: the one entry to the loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from nanoserve.errors import ConfigError
from nanoserve.models.assembly import Checkpoint, Progress, TorchWeights, assemble, weight_bytes, weight_kinds
from nanoserve.models.config import DTYPES, ModelConfig
from nanoserve.models.decoder import Decoder
from nanoserve.models.gguf_config import gguf_config
from nanoserve.models.gguf_loader import GGUFCheckpoint
from nanoserve.models.hf_config import read_hf_config
from nanoserve.models.quantise import Quantise, QuantisedCheckpoint
from nanoserve.models.rope import rope_tables
from nanoserve.models.safetensors_loader import SafetensorsCheckpoint
from nanoserve.ops import WeightMaker
from nanoserve.probe import give_back_freed_memory
from nanoserve.source import ModelSource


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """dtype is the one activations and K/V are to have; what the weights are is the kernel set's business. `kinds` is
    what they stand for (`assembly.weight_kinds`)."""

    config: ModelConfig
    decoder: Decoder
    dtype: torch.dtype
    kinds: Mapping[str, str]

    def summary(self) -> dict[str, Any]:
        """JSON-ready, for /health."""
        return {**self.kinds, "bytes": self.decoder.weights.nbytes}

    def describe(self) -> str:
        kinds, size = self.kinds, self.decoder.weights.nbytes / 1e6
        return (
            f"weights: layers {kinds['layers']}, embedding {kinds['embedding']}, head {kinds['head']}; {size:,.0f} MB"
        )


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    maker: WeightMaker | None = None,
    quantise: Quantise | None = None,
    max_positions: int | None = None,
    progress: Progress | None = None,
    bar: bool = True,
) -> LoadedModel:
    """Load the weights, with a progress bar on stderr if `bar`.

    dtype          auto (the checkpoint's own; float32 where it is quantised), float32, bfloat16 or float16
    maker          how the kernel set wants its weights; None: plain tensors of `dtype` on `device`
    quantise       which matrices to quantise on the way
    max_positions  length of the rope tables; None: the model's max_position_embeddings
    progress       called after every tensor with bytes done and bytes in all

    Raises BadCheckpoint naming file and tensor, ConfigError for the arguments, OutOfMemory.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    target = torch.device(device)
    config, checkpoint = _open(source)
    if quantise:
        checkpoint = QuantisedCheckpoint(checkpoint, quantise)
        if quantise.head:
            config = replace(config, tie_word_embeddings=False)
    maker = maker or TorchWeights(getattr(torch, config.dtype if dtype == "auto" else dtype), target)
    with _bar(source.name, weight_bytes(config, maker.dtype.itemsize), bar) as shown:
        weights = assemble(config, checkpoint, maker=maker, progress=_Report(shown, progress))
    if source.kind == "gguf":
        source.gguf.release()
    give_back_freed_memory()
    cos, sin = rope_tables(config.rope, config.head_dim, max_positions or config.max_position_embeddings, target)
    return LoadedModel(config, Decoder(config, weights, cos, sin), maker.dtype, weight_kinds(config, checkpoint))


def _open(source: ModelSource) -> tuple[ModelConfig, Checkpoint]:
    if source.kind == "gguf":
        config = gguf_config(source.gguf)
        return config, GGUFCheckpoint(source.gguf, config)
    return read_hf_config(source.path), SafetensorsCheckpoint(source.path)


def _bar(name: str, total: int, shown: bool) -> tqdm:
    return tqdm(desc=f"loading {name}", total=total, unit="B", unit_scale=True, mininterval=0.5, disable=not shown)


class _Report:
    """Feeds the bar and the caller's callback."""

    def __init__(self, bar: tqdm, progress: Progress | None) -> None:
        self._bar = bar
        self._progress = progress

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(done - self._bar.n)
        if self._progress is not None:
            self._progress(done, total)
