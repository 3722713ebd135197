"""The composition root: from an EngineConfig to an engine that serves. The only place that knows every part.

Order matters: weights first, because the pool is sized from what they leave free; the pool before any recording,
because recordings are bound to its addresses; ready last.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch

from nanoserve.blocks import BlockPool
from nanoserve.boot import Booted, BootProgress, Report, Timeline
from nanoserve.budget import StepBudget
from nanoserve.choices import Choices, check_config, choose, pick_backend, pick_dtype, pick_quantise
from nanoserve.config import EngineConfig
from nanoserve.engine import Engine
from nanoserve.errors import ConfigError
from nanoserve.graphs import GraphBackend
from nanoserve.inputs import new_last_tokens
from nanoserve.intake import Intake
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.memory import KVPoolPlan, plan_kv_pool
from nanoserve.metrics import Metrics
from nanoserve.models.config import ModelConfig, load_config
from nanoserve.models.load import LoadedModel, load_model
from nanoserve.prefix import PrefixCache
from nanoserve.probe import cores, free_host_bytes
from nanoserve.readiness import ModelFacts, check_covered, describe_shapes, make_ready, memory_is_enough, price_plan
from nanoserve.runners import Parts, native_runner, native_weights, paged_runner, rectangle_runner
from nanoserve.scheduler import Scheduler
from nanoserve.source import ModelSource, resolve
from nanoserve.step import StepRunner
from nanoserve.tokens import load_tokenizer

log = logging.getLogger("nanoserve")
RECTANGLE_MODEL_LEN = 2048
"""The rectangle read's cost grows with the widest shape; a longer context is a decision, not a default."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything but warm. `weights` is what they are, JSON-ready; `weight_bytes` what a step reads of them."""

    engine: Engine
    intake: Intake
    model: ModelConfig
    pool: KVPoolPlan
    choices: Choices
    weights: dict[str, Any]
    weight_bytes: int

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(self.model.num_attention_heads, self.model.vocab_size)


def build_engine(
    config: EngineConfig,
    metrics: Metrics,
    report: Report,
    *,
    bar: bool = True,
    source: ModelSource | None = None,
    timeline: Timeline | None = None,
    ops: ReferenceOps | None = None,
    backend: GraphBackend | None = None,
) -> Booted:
    """Load, plan, allocate, warm. Raises StartupError for what the operator has to change.

    source        what the model argument was resolved to; None: resolve it
    timeline      what the boot has taken so far; None: it begins here
    ops, backend  another kernel set, another way to record; None: what config and device ask for
    """
    timeline = timeline or Timeline()
    prepared = prepare(config, metrics, report, bar=bar, source=source, timeline=timeline, ops=ops, backend=backend)
    defaults = {name: value for name, value in asdict(prepared.model.sampling).items() if value is not None}
    booted = Booted(
        engine=prepared.engine,
        intake=prepared.intake,
        kernels=prepared.choices.kernels,
        weights=prepared.weights,
        boot_seconds=timeline.seconds,
        kv_pool=asdict(prepared.pool),
        sampling_defaults=defaults,
    )
    if not config.capture_decode:
        return booted
    free = _left_free(prepared)
    ready = make_ready(prepared.engine, config, prepared.facts, free, report, bar=bar)
    timeline.end("warm-up")
    log.info(timeline.describe())
    return replace(booted, warmup=ready.summary, degraded=ready.degraded, close=ready.close)


def describe_plan(config: EngineConfig, metrics: Metrics, report: Report) -> list[str]:
    """What a start with this config would decide and cost, without recording the list: the lines of `--dry-run`."""
    prepared = prepare(config, metrics, report)
    lines = [prepared.pool.describe()]
    if config.capture_decode:
        plan, _ = price_plan(prepared.engine, config, prepared.facts, _left_free(prepared))
        check_covered(config, plan)
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
    source: ModelSource | None = None,
    timeline: Timeline | None = None,
    ops: ReferenceOps | None = None,
    backend: GraphBackend | None = None,
) -> Prepared:
    """Load the model, size the pool, wire the parts."""
    timeline = timeline or Timeline()
    if ops is not None or backend is not None:
        config = replace(config, kernels="reference")
    check_config(config)
    source = source or resolve(config.model)
    model = load_config(source)
    choices = choose(config, model)
    torch.set_num_threads(config.threads or cores())
    timeline.end("kernels")
    report(BootProgress("loading"))
    started = perf_counter()
    loaded = load_model(
        source,
        dtype=pick_dtype(config, choices.device),
        device=choices.device,
        maker=native_weights() if choices.library is not None else None,
        quantise=pick_quantise(config),
        max_positions=wanted_model_len(choices.config, model),
        progress=lambda done, total: report(_loading(done, total, perf_counter() - started)),
        bar=bar,
    )
    timeline.end("weights")
    tokenizer = load_tokenizer(source)
    timeline.end("tokenizer")
    pool_plan = plan_pool(choices, loaded.config, loaded.dtype)
    log.info("%s kernels; %s", choices.kernels, loaded.describe())
    log.info(pool_plan.describe())
    with memory_is_enough("the step buffers", "--max-sequences, --max-model-len, --max-step-rows or --width-multiple"):
        engine = assemble(choices, loaded, pool_plan, metrics, ops=ops, backend=backend)
        if config.prefault:
            engine.runner.cache.prefault()
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
    timeline.end("engine")
    step_bytes = loaded.decoder.weights.step_bytes
    return Prepared(engine, intake, loaded.config, pool_plan, choices, loaded.summary(), step_bytes)


def _left_free(prepared: Prepared) -> int:
    """Bytes left once the K/V pool, which is allocated at its first use, is resident too."""
    return max(0, _free_bytes(prepared.choices.device) - prepared.pool.pool_bytes)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_bytes()


def wanted_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of prompt and answer, before memory has its say. Raises ConfigError beyond the model's own limit."""
    limit = model.max_position_embeddings
    default = limit if config.attention_read == "paged" else min(limit, RECTANGLE_MODEL_LEN)
    wanted = config.max_model_len or default
    if wanted > limit:
        raise ConfigError(f"--max-model-len is {wanted:,}; the model was made for {limit:,}; lower it")
    return wanted


def plan_pool(choices: Choices, model: ModelConfig, dtype: torch.dtype) -> KVPoolPlan:
    """Size the K/V pool from what is free now, after the weights."""
    config = choices.config
    return plan_kv_pool(
        bytes_per_token=model.kv_bytes_per_token(dtype.itemsize),
        block_size=config.block_size,
        max_model_len=wanted_model_len(config, model),
        max_sequences=config.sequences,
        free_bytes=_free_bytes(choices.device),
        share=config.kv_memory_share,
        requested_bytes=config.kv_memory_bytes,
    )


def assemble(
    choices: Choices,
    loaded: LoadedModel,
    pool_plan: KVPoolPlan,
    metrics: Metrics,
    *,
    ops: ReferenceOps | None = None,
    backend: GraphBackend | None = None,
) -> Engine:
    """Wire the parts of one engine; allocates the step buffers and the slot table, the K/V pool at its first write."""
    config = choices.config
    pool = BlockPool(pool_plan.num_blocks, config.block_size)
    parts = Parts(choices, loaded, pool_plan, new_last_tokens(config.sequences, choices.device))
    runner: StepRunner
    if choices.library is not None:
        runner = native_runner(parts, choices.library)
    elif config.attention_read == "paged":
        runner = paged_runner(parts, ops or ReferenceOps(), backend or pick_backend(config, choices.device))
    else:
        runner = rectangle_runner(parts, ops or ReferenceOps(), backend)
    budget = StepBudget(config.step_rows, gap_seconds=config.prefill_gap_seconds)
    prefix = PrefixCache(pool) if config.prefix_cache else None
    scheduler = Scheduler(pool, max_sequences=config.sequences, budget=budget, prefix=prefix)
    return Engine(scheduler, pool, runner, metrics, paranoid=config.paranoid)


def _loading(done: int, total: int, elapsed: float) -> BootProgress:
    eta = elapsed * (total - done) / done if done else None
    return BootProgress("loading", done, total, eta)
