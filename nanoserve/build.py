"""The composition root: from an EngineConfig to an engine that serves. The only place that knows every part.

Order matters: weights first, because the pool is sized from what they leave free; the pool before any recording,
because recordings are bound to its addresses; ready last.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict, dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from nanoserve.backends import CudaBackend, EagerBackend
from nanoserve.blocks import BlockPool
from nanoserve.boot import Booted, BootProgress, Report
from nanoserve.buckets import PagedShapes, ShapeSet
from nanoserve.cache import BatchedPagedKVCache
from nanoserve.config import EngineConfig
from nanoserve.engine import Engine
from nanoserve.errors import ConfigError
from nanoserve.graphs import GraphBackend, GraphSet
from nanoserve.inputs import StepInputs, new_last_tokens
from nanoserve.intake import Intake
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.memory import KVPoolPlan, plan_kv_pool
from nanoserve.metrics import Metrics
from nanoserve.models.config import ModelConfig
from nanoserve.models.decoder import Decoder
from nanoserve.models.load import LoadedModel, load_model
from nanoserve.paged_runner import PagedRunner
from nanoserve.probe import cores, free_host_bytes
from nanoserve.readiness import ModelFacts, describe_shapes, make_ready, price_plan
from nanoserve.runner import DecodeOutput, Runner
from nanoserve.scheduler import Scheduler
from nanoserve.slots import SlotTable
from nanoserve.source import resolve
from nanoserve.step import StepRunner
from nanoserve.tokens import load_tokenizer

log = logging.getLogger("nanoserve")
COUNTS = (
    "max_sequences",
    "block_size",
    "width_multiple",
    "prefill_tokens",
    "max_queued",
    "warm_rows",
    "warm_width",
    "threads",
)
MAX_COUNT = 2**31 - 1  # what torch takes for a number of threads; no other count comes near it
DEFAULT_MAX_MODEL_LEN = 2048
"""The rectangle read's cost grows with the widest shape; a longer context is a decision, not a default."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything but warm."""

    engine: Engine
    intake: Intake
    model: ModelConfig
    pool: KVPoolPlan
    device: torch.device

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(self.model.num_attention_heads, self.model.vocab_size)


def build_engine(
    config: EngineConfig,
    metrics: Metrics,
    report: Report,
    *,
    bar: bool = True,
    ops: ReferenceOps | None = None,
    backend: GraphBackend | None = None,
) -> Booted:
    """Load, plan, allocate, warm. Raises StartupError for what the operator has to change.

    ops, backend  another kernel set, another way to record; None: what config and device ask for
    """
    prepared = prepare(config, metrics, report, bar=bar, ops=ops, backend=backend)
    defaults = {name: value for name, value in asdict(prepared.model.sampling).items() if value is not None}
    booted = Booted(
        engine=prepared.engine,
        intake=prepared.intake,
        kernels=ReferenceOps.name,
        kv_pool=asdict(prepared.pool),
        sampling_defaults=defaults,
    )
    if not config.capture_decode:
        return booted
    free = _left_free(prepared)
    ready = make_ready(prepared.engine, config, prepared.facts, free, report, bar=bar)
    return replace(booted, warmup=ready.summary, degraded=ready.degraded, close=ready.close)


def describe_plan(config: EngineConfig, metrics: Metrics, report: Report) -> list[str]:
    """What a start with this config would decide and cost, without recording the list: the lines of `--dry-run`."""
    prepared = prepare(config, metrics, report)
    lines = [prepared.pool.describe()]
    if config.capture_decode:
        plan, _ = price_plan(prepared.engine, config, prepared.facts, _left_free(prepared))
        lines.append(plan.describe())
        if plan.uncovered:
            lines.append(f"without a graph when the door opens: {describe_shapes(plan.uncovered)}")
    return lines


def prepare(
    config: EngineConfig,
    metrics: Metrics,
    report: Report,
    *,
    bar: bool = True,
    ops: ReferenceOps | None = None,
    backend: GraphBackend | None = None,
) -> Prepared:
    """Load the model, size the pool, wire the parts."""
    started = perf_counter()
    check_config(config)
    source = resolve(config.model)
    device = pick_device(config.device)
    torch.set_num_threads(config.threads or cores())
    report(BootProgress("loading"))
    loaded = load_model(
        source,
        dtype=pick_dtype(config, device),
        device=device,
        progress=lambda done, total: report(_loading(done, total, perf_counter() - started)),
        bar=bar,
    )
    tokenizer = load_tokenizer(source)
    pool_plan = plan_pool(config, loaded.config, loaded.decoder.weights.embed.dtype, device)
    log.info(pool_plan.describe())
    engine = assemble(config, loaded, pool_plan, metrics, device, ops=ops, backend=backend)
    eos = frozenset(loaded.config.eos_token_ids) | tokenizer.eos_token_ids
    intake = Intake(
        tokenizer,
        vocab_size=loaded.config.vocab_size,
        max_model_len=pool_plan.max_model_len,
        eos_token_ids=eos,
        block_size=config.block_size,
    )
    # A full collection walks every object that torch and its like brought: 80 ms in the middle of somebody's stream.
    gc.collect()
    gc.freeze()
    return Prepared(engine, intake, loaded.config, pool_plan, device)


def _left_free(prepared: Prepared) -> int:
    """Bytes left once the K/V pool, which is allocated at its first use, is resident too."""
    return max(0, _free_bytes(prepared.device) - prepared.pool.pool_bytes)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_bytes()


def check_config(config: EngineConfig) -> None:
    """Raises ConfigError for flags outside their range or that contradict each other."""
    for name in COUNTS:
        value = getattr(config, name)
        if value is not None and not 1 <= value <= MAX_COUNT:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be from 1 to {MAX_COUNT:,}")
    for name in ("warmup_seconds", "self_test_seconds"):
        value = getattr(config, name)
        if value is not None and not value >= 0.0:  # NaN is refused too
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a number of seconds, at least 0")
    if config.max_model_len is not None and config.max_model_len < 2:
        raise ConfigError(f"--max-model-len is {config.max_model_len}; a prompt and an answer need at least 2 tokens")
    if config.capture_decode and not (config.bucket_decode and config.persist_inputs):
        raise ConfigError(
            "recording decode graphs needs a closed set of shapes and buffers that keep their address; "
            "add --no-capture-decode, or drop --no-bucket-decode and --no-persist-inputs"
        )
    if config.attention_read == "paged" and not config.capture_decode:
        raise ConfigError("--attention-read paged replays every step; drop --no-capture-decode, or read the rectangle")


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: no CUDA device here, or none that torch can use; use --device cpu")
    return device


def pick_backend(config: EngineConfig, device: torch.device) -> GraphBackend:
    """Raises ConfigError for a backend that this device or build has not."""
    name = config.graph_backend
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "eager"
    if name == "eager":
        return EagerBackend()
    if name == "cuda" and device.type == "cuda":
        return CudaBackend(device)
    raise ConfigError(f"--graph-backend {name} does not run on {device.type}; use auto")


def pick_dtype(config: EngineConfig, device: torch.device) -> str:
    """On the CPU the reference kernels run in fp32: the oracle's precision, and faster there than emulated bf16."""
    return "float32" if config.dtype == "auto" and device.type == "cpu" else config.dtype


def plan_pool(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> KVPoolPlan:
    """Size the K/V pool from what is free now, after the weights."""
    limit = model.max_position_embeddings
    wanted = config.max_model_len or min(limit, DEFAULT_MAX_MODEL_LEN)
    if wanted > limit:
        raise ConfigError(f"--max-model-len is {wanted:,}; the model was made for {limit:,}; lower it")
    return plan_kv_pool(
        bytes_per_token=model.kv_bytes_per_token(dtype.itemsize),
        block_size=config.block_size,
        max_model_len=wanted,
        max_sequences=config.max_sequences,
        free_bytes=_free_bytes(device),
        share=config.kv_memory_share,
        requested_bytes=config.kv_memory_bytes,
    )


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    pool_plan: KVPoolPlan,
    metrics: Metrics,
    device: torch.device,
    *,
    ops: ReferenceOps | None = None,
    backend: GraphBackend | None = None,
) -> Engine:
    """Wire the parts of one engine; allocates the step buffers and the slot table, the K/V pool at its first write."""
    model, ops = loaded.config, ops or ReferenceOps()
    pool = BlockPool(pool_plan.num_blocks, config.block_size)
    last_tokens = new_last_tokens(config.max_sequences, device)
    cache = BatchedPagedKVCache(
        ops,
        num_layers=model.num_hidden_layers,
        num_blocks=pool_plan.num_blocks,
        block_size=config.block_size,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        dtype=loaded.decoder.weights.embed.dtype,
        device=device,
    )
    graphs: GraphSet[DecodeOutput] | None = None
    if config.capture_decode:
        graphs = GraphSet(backend or pick_backend(config, device), read=config.attention_read)
    scheduler = Scheduler(pool, max_sequences=config.max_sequences, prefill_tokens=config.prefill_tokens)
    make = _paged_runner if config.attention_read == "paged" else _rectangle_runner
    runner = make(config, loaded.decoder, ops, cache, pool_plan, last_tokens, graphs)
    return Engine(scheduler, pool, runner, metrics, paranoid=config.paranoid)


def _rectangle_runner(
    config: EngineConfig,
    decoder: Decoder,
    ops: ReferenceOps,
    cache: BatchedPagedKVCache,
    pool_plan: KVPoolPlan,
    last_tokens: Tensor,
    graphs: GraphSet[DecodeOutput] | None,
) -> StepRunner:
    shapes = ShapeSet.build(
        max_rows=config.max_sequences, max_width=pool_plan.max_model_len, width_multiple=config.width_multiple
    )
    return Runner(
        decoder,
        ops,
        cache,
        SlotTable(config.max_sequences, shapes.width_ladder[-1], cache.sink_slot, last_tokens.device),
        last_tokens,
        inputs=StepInputs(config.max_sequences, last_tokens) if config.persist_inputs else None,
        shapes=shapes if config.bucket_decode else None,
        graphs=graphs,
        strict=config.strict_shapes,
        paranoid=config.paranoid,
    )


def _paged_runner(
    config: EngineConfig,
    decoder: Decoder,
    ops: ReferenceOps,
    cache: BatchedPagedKVCache,
    pool_plan: KVPoolPlan,
    last_tokens: Tensor,
    graphs: GraphSet[DecodeOutput] | None,
) -> StepRunner:
    assert graphs is not None, "the paged read replays every step"  # check_config
    max_step_rows = config.max_sequences + config.prefill_tokens
    hidden = last_tokens.new_zeros((max_step_rows, decoder.config.hidden_size), dtype=cache.dtype)
    return PagedRunner(
        decoder,
        ops,
        cache,
        SlotTable(config.max_sequences, pool_plan.max_model_len, cache.sink_slot, last_tokens.device),
        StepInputs(max_step_rows, last_tokens),
        hidden,
        shapes=PagedShapes.build(max_step_rows=max_step_rows, max_logit_rows=config.max_sequences),
        graphs=graphs,
        strict=config.strict_shapes,
        paranoid=config.paranoid,
    )


def _loading(done: int, total: int, elapsed: float) -> BootProgress:
    eta = elapsed * (total - done) / done if done else None
    return BootProgress("loading", done, total, eta)
