"""The model under test, loaded once, and the engines made from it: one for each run, so that no run finds a graph of
another's.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanoserve import __version__
from nanoserve.boot import BootProgress
from nanoserve.build import assemble, plan_pool
from nanoserve.choices import choose, pick_backend, pick_device, pick_dtype
from nanoserve.config import EngineConfig
from nanoserve.engine import Engine
from nanoserve.errors import ConfigError
from nanoserve.graphs import GraphBackend
from nanoserve.memory import KVPoolPlan
from nanoserve.metrics import Metrics
from nanoserve.models.assembly import TorchWeights, expected_tensors, weight_kinds
from nanoserve.models.assembly import assemble as assemble_weights
from nanoserve.models.config import ModelConfig, RopeConfig, SamplingDefaults, load_config
from nanoserve.models.decoder import Decoder
from nanoserve.models.load import LoadedModel, load_model
from nanoserve.models.rope import rope_tables
from nanoserve.probe import cores
from nanoserve.readiness import ModelFacts, Readiness, make_ready
from nanoserve.source import resolve

TINY = "tiny random decoder"
TINY_POSITIONS = 8192
T = TypeVar("T")


class SleepingBackend:
    """Records as another backend does, and takes `seconds` longer: stands for a device whose recordings cost that."""

    def __init__(self, backend: GraphBackend, seconds: float) -> None:
        self.name = f"{backend.name}, each recording made {seconds:g} s longer"
        self._backend = backend
        self._seconds = seconds

    def record(self, program: Callable[[], T]) -> Callable[[], T]:
        time.sleep(self._seconds)
        return self._backend.record(program)

    def run(self, replays: Sequence[Callable[[], T]]) -> list[T]:
        return self._backend.run(replays)

    def arena_bytes(self) -> int | None:
        return self._backend.arena_bytes()


def kv_token_bytes(config: EngineConfig) -> int:
    """Bytes of K and V that a token takes in the engine that `config` makes here, or more: what a measurement that has
    to hold a given number of tokens sizes its pool by."""
    model = load_config(resolve(config.model))
    return model.kv_bytes_per_token(2 if choose(config, model).library is not None else 4)


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model and where it runs. `config` holds what all of its engines share."""

    name: str
    loaded: LoadedModel
    device: torch.device
    config: EngineConfig
    backend: GraphBackend

    @classmethod
    def load(cls, args: argparse.Namespace) -> Subject:
        """What `--model` and its neighbours ask for. Raises StartupError."""
        config = EngineConfig(
            model=args.model or TINY,
            dtype=args.dtype,
            device=args.device,
            threads=args.threads,
            graph_backend=args.graph_backend,
            attention_read="rectangle",
            kernels="reference",
            width_multiple=args.width_multiple,
            self_test_seconds=0.0,
        )
        device = pick_device(config.device)
        backend = pick_backend(config, device)
        if args.record_seconds is not None:
            backend = SleepingBackend(backend, args.record_seconds)
        dtype = pick_dtype(config, device)
        # The tiny decoder's products are too small to share: handing them over would cost more than computing them.
        torch.set_num_threads(config.threads or (cores() if args.model else 1))
        if args.model is None:
            return cls(TINY, tiny_model(device, dtype), device, config, backend)
        source = resolve(args.model)
        return cls(source.name, load_model(source, dtype=dtype, device=device), device, config, backend)

    def engine(self, *, rows: int, tokens: int) -> tuple[Engine, EngineConfig, KVPoolPlan]:
        """An engine with nothing recorded, for `rows` sequences of `tokens` tokens, prompts prefilled in one step.

        Raises ConfigError if the model or the memory is too small for them.
        """
        limit = self.loaded.config.max_position_embeddings
        if tokens > limit:
            raise ConfigError(
                f"prompt and answer are {tokens:,} tokens; {self.name} was made for {limit:,}; "
                "lower --prompt-tokens or --generated"
            )
        config = replace(self.config, max_sequences=rows, max_model_len=tokens, max_step_rows=rows * tokens)
        choices = choose(config)
        pool = plan_pool(choices, self.loaded.config, self.loaded.dtype)
        if pool.capacity_tokens < rows * tokens:
            raise ConfigError(
                f"the K/V pool holds {pool.capacity_tokens:,} tokens; the measurement needs {rows * tokens:,}; "
                "lower --rows, --prompt-tokens or --generated"
            )
        engine = assemble(choices, self.loaded, pool, Metrics(__version__), backend=self.backend)
        return engine, choices.config, pool

    def warm(self, engine: Engine, config: EngineConfig, pool: KVPoolPlan) -> Readiness:
        """Warm an engine as a server's start does: priced, recorded, proved."""
        facts = ModelFacts(self.loaded.config.num_attention_heads, self.loaded.config.vocab_size)
        free_bytes = max(0, pool.free_bytes - pool.pool_bytes)
        return make_ready(engine, config, facts, free_bytes, _ignore, bar=False)

    def describe(self) -> str:
        """One line for the head of a table: the model, and what it runs on."""
        dtype = str(self.loaded.dtype).removeprefix("torch.")
        return f"{self.name}, {dtype} on {self.device}, graph backend {self.backend.name}"

    def summary(self) -> dict[str, Any]:
        """The same, and the versions, for the JSON line."""
        return {
            "model": self.name,
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "device": str(self.device),
            "graph_backend": self.backend.name,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "nanoserve": __version__,
        }


def tiny_model(device: torch.device, dtype: str = "float32") -> LoadedModel:
    """A two-layer decoder with seeded random weights: enough to record, replay and count; its text means nothing."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=TINY_POSITIONS,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        windows=(None, None),
        tie_word_embeddings=True,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(),
        bos_token_id=None,
        dtype="float32",
        sampling=SamplingDefaults(),
    )
    kind: torch.dtype = getattr(torch, config.dtype if dtype == "auto" else dtype)
    maker = TorchWeights(kind, device)
    checkpoint = _RandomCheckpoint(config)
    weights = assemble_weights(config, checkpoint, maker=maker, progress=lambda done, total: None)
    cos, sin = rope_tables(config.rope, config.head_dim, config.max_position_embeddings, device)
    return LoadedModel(config, Decoder(config, weights, cos, sin), kind, weight_kinds(config, checkpoint))


class _RandomCheckpoint:
    """Every tensor a config needs, drawn from a generator of its own (`models.assembly.Checkpoint`)."""

    where = TINY

    def __init__(self, config: ModelConfig) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = expected_tensors(config)
        self._generator = torch.Generator().manual_seed(0)

    def label(self, name: str) -> str:
        return f"{self.where}: tensor {name!r}"

    def fetch(self, name: str) -> Tensor:
        """Norms are ones; matrices keep the variance of what passes through them."""
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=self._generator) / math.sqrt(shape[1])

    def blocks(self, name: str) -> None:
        """They are floats."""

    def kind(self, name: str) -> str:
        return "F32"


def _ignore(progress: BootProgress) -> None:
    """A measurement shows its own progress."""
