"""From a `ModelSource` to a decoder that can run: the one entry to the loaders."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from tqdm import tqdm

from nanoserve.errors import ConfigError
from nanoserve.gguf_file import read_gguf
from nanoserve.models.assembly import Checkpoint, Progress, TorchWeights, assemble, weight_bytes
from nanoserve.models.config import DTYPES, ModelConfig
from nanoserve.models.decoder import Decoder
from nanoserve.models.gguf_config import gguf_config
from nanoserve.models.gguf_loader import GGUFCheckpoint
from nanoserve.models.hf_config import read_hf_config
from nanoserve.models.rope import rope_tables
from nanoserve.models.safetensors_loader import SafetensorsCheckpoint
from nanoserve.ops import WeightMaker
from nanoserve.source import ModelSource


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """dtype is the one activations and K/V are to have; what the weights are is the kernel set's business."""

    config: ModelConfig
    decoder: Decoder
    dtype: torch.dtype


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    maker: WeightMaker | None = None,
    max_positions: int | None = None,
    progress: Progress | None = None,
    bar: bool = True,
) -> LoadedModel:
    """Load the weights, with a progress bar on stderr if `bar`.

    dtype          auto (the checkpoint's own; float32 where it is quantised), float32, bfloat16 or float16
    maker          how the kernel set wants its weights; None: plain tensors of `dtype` on `device`
    max_positions  length of the rope tables; None: the model's max_position_embeddings
    progress       called after every tensor with bytes done and bytes in all

    Raises BadCheckpoint naming file and tensor, ConfigError for the arguments, OutOfMemory.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    target = torch.device(device)
    with ExitStack() as stack:
        checkpoint: Checkpoint
        if source.kind == "gguf":
            file = read_gguf(source.path)
            config = gguf_config(file)
            checkpoint = GGUFCheckpoint(file, config)
        else:
            config = read_hf_config(source.path)
            checkpoint = stack.enter_context(SafetensorsCheckpoint(source.path))
        maker = maker or TorchWeights(getattr(torch, config.dtype if dtype == "auto" else dtype), target)
        total = weight_bytes(config, maker.dtype.itemsize)
        report = _Report(stack.enter_context(_bar(source.name, total, bar)), progress)
        weights = assemble(config, checkpoint, maker=maker, progress=report)
    cos, sin = rope_tables(config.rope, config.head_dim, max_positions or config.max_position_embeddings, target)
    return LoadedModel(config, Decoder(config, weights, cos, sin), maker.dtype)


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
