"""The runner of each read and kernel set, wired from the same parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from nanoserve.buckets import PagedShapes, ShapeSet
from nanoserve.cache import BatchedPagedKVCache
from nanoserve.choices import Choices, pick_backend
from nanoserve.graphs import GraphBackend, GraphSet
from nanoserve.history import HistoryTable
from nanoserve.inputs import StepInputs
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.memory import KVPoolPlan
from nanoserve.models.decoder import Hidden
from nanoserve.models.load import LoadedModel
from nanoserve.ops import KVKernels, Ops, WeightMaker
from nanoserve.paged_runner import PagedRunner
from nanoserve.probe import cores
from nanoserve.relay import Relay
from nanoserve.runner import Runner
from nanoserve.slots import SlotTable

if TYPE_CHECKING:
    import torch

    from nanoserve.kernels.native_lib import NativeLibrary

NEVER_REAL = 1
"""Room for one step row past the largest body, which no step writes: the row that pad logit rows name."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What every runner is made of. `last_tokens` is `[max_sequences + 1]` int64."""

    choices: Choices
    loaded: LoadedModel
    pool: KVPoolPlan
    last_tokens: Tensor

    def cache(self, kernels: KVKernels) -> BatchedPagedKVCache:
        model = self.loaded.config
        return BatchedPagedKVCache(
            kernels,
            num_layers=model.num_hidden_layers,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            dtype=self.loaded.dtype,
            device=self.choices.device,
        )

    def history(self) -> HistoryTable:
        return HistoryTable(self.choices.config.sequences, self.pool.max_model_len, self.choices.device)


def rectangle_runner(parts: Parts, ops: ReferenceOps, backend: GraphBackend | None) -> Runner:
    config, device = parts.choices.config, parts.choices.device
    shapes = ShapeSet.build(
        max_rows=config.sequences, max_width=parts.pool.max_model_len, width_multiple=config.width_multiple
    )
    cache = parts.cache(ops)
    return Runner(
        parts.loaded.decoder,
        ops,
        cache,
        SlotTable(config.sequences, shapes.width_ladder[-1], cache.sink_slot, device),
        parts.history(),
        parts.last_tokens,
        inputs=StepInputs(config.sequences, parts.last_tokens) if config.persist_inputs else None,
        shapes=shapes if config.bucket_decode else None,
        graphs=GraphSet(backend or pick_backend(config, device), read="rectangle") if config.capture_decode else None,
        strict=config.strict_shapes,
        paranoid=config.paranoid,
    )


def paged_runner(parts: Parts, ops: ReferenceOps, backend: GraphBackend) -> PagedRunner:
    inputs = StepInputs(parts.choices.config.step_rows + NEVER_REAL, parts.last_tokens)
    return _paged(parts, ops, ops, inputs, backend, parts.loaded.dtype)


def native_runner(parts: Parts, library: NativeLibrary) -> PagedRunner:
    """The paged read on the native kernels: threads, arena and ops of its own."""
    import torch

    from nanoserve.kernels.native import NativeBackend, NativeOps
    from nanoserve.kernels.native_arena import Arena

    model = parts.loaded.config
    inputs = StepInputs(parts.choices.config.step_rows + NEVER_REAL, parts.last_tokens)
    pool = library.pool(parts.choices.config.threads or cores())
    ops = NativeOps(
        pool,
        Arena(_arena_bytes(parts)),
        max_rows=parts.choices.config.step_rows,
        live_rows=inputs.real_rows,
        live_logit_rows=inputs.real_logit_rows,
        head_dim=model.head_dim,
    )
    backend = NativeBackend(pool, ops)
    return _paged(parts, ops, ops, inputs, backend, torch.float32, Relay(ops.copy, backend, inputs))


def native_weights() -> WeightMaker:
    from nanoserve.kernels.native_weights import NativeWeights

    return NativeWeights()


def _paged(
    parts: Parts,
    ops: Ops,
    kernels: KVKernels,
    inputs: StepInputs,
    backend: GraphBackend,
    activations: torch.dtype,
    relay: Relay | None = None,
) -> PagedRunner:
    config = parts.choices.config
    cache = parts.cache(kernels)
    model, rows = parts.loaded.config, config.step_rows + NEVER_REAL
    return PagedRunner(
        parts.loaded.decoder,
        ops,
        cache,
        SlotTable(config.sequences, parts.pool.max_model_len, cache.sink_slot, parts.choices.device),
        parts.history(),
        inputs,
        Hidden(
            residual=parts.last_tokens.new_zeros((rows, model.hidden_size), dtype=activations),
            attended=parts.last_tokens.new_zeros((rows, model.q_size), dtype=activations),
        ),
        shapes=PagedShapes.build(max_step_rows=config.step_rows, max_logit_rows=config.sequences),
        graphs=GraphSet(backend, read="paged"),
        relay=relay,
        strict=config.strict_shapes,
        paranoid=config.paranoid,
    )


def _arena_bytes(parts: Parts) -> int:
    """Address space for the widest body or head and, beside it, the logits of every head of either kind and one that
    adjusts them; touched only where it is used."""
    model, config = parts.loaded.config, parts.choices.config
    rows = max(config.step_rows, config.sequences)
    widest = 8 * model.hidden_size + 2 * model.qkv_size + 6 * model.intermediate_size
    logits = 7 * config.sequences * (model.vocab_size + 2 * model.hidden_size)
    return 4 * (2 * rows * widest + logits) + (64 << 20)
