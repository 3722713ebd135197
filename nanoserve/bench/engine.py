"""`nanoserve bench engine`: seconds of whole steps on the engine that would serve, without network and scheduler.

A decode step has `rows` sequences with `context` tokens each, its own included; a prefill is one prompt, in chunks of
the step's budget. Beside each figure: what it has to read, and the share of the memory bandwidth that is.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from nanoserve import __version__
from nanoserve.bench.client import settled_heap
from nanoserve.bench.flags import check_flags
from nanoserve.bench.tables import Column, Record, Table, milliseconds, publish, thousands
from nanoserve.blocks import blocks_for
from nanoserve.buckets import DecodeRow
from nanoserve.build import Prepared, prepare
from nanoserve.config import EngineConfig
from nanoserve.metrics import Metrics
from nanoserve.models.config import load_config
from nanoserve.probe import cores
from nanoserve.request import SamplingParams
from nanoserve.sequence import ChunkPlan, Sequence, StepPlan
from nanoserve.source import resolve

TOKEN = 5
"""Every prompt is this token: what a step computes does not depend on which."""
BLOCK = EngineConfig().block_size
FILL = 0.01
"""What the K/V pool is filled with: pages that were never written to are no memory, and cost nothing to read."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured shape, medians and minima over the repeats. `tokens` are decoded or prefilled in `seconds`."""

    kind: str
    rows: int
    context: int
    tokens: int
    seconds: float
    least_seconds: float
    bytes_read: int

    def record(self, bandwidth: float) -> Record:
        return {
            "kind": self.kind,
            "rows": self.rows,
            "context": self.context,
            "seconds": self.seconds,
            "least_seconds": self.least_seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "megabytes": self.bytes_read / 1e6,
            "bandwidth_share": self.bytes_read / self.seconds / bandwidth,
        }


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    prepared = prepare(_config(args), Metrics(__version__), lambda progress: None)
    cache = prepared.engine.runner.cache
    cache.poison(FILL)
    bandwidth = memory_bandwidth(args.threads or cores())
    with settled_heap():
        shapes = [(rows, context) for context in args.context for rows in args.rows]
        decodes = [measure_decode(prepared, rows, context, args.repeats) for rows, context in shapes]
        prefills = [measure_prefill(prepared, tokens, args.repeats) for tokens in args.prefill]
    about = f"medians of {args.repeats}; memory reads {bandwidth / 1e9:.1f} GB/s"
    summary = {
        "model": args.model,
        "kernels": prepared.choices.kernels,
        "threads": args.threads or cores(),
        "bandwidth_bytes_per_second": bandwidth,
        "weight_bytes": prepared.weight_bytes,
        "torch": torch.__version__,
    }
    heading = f"{args.model} on {prepared.choices.kernels} kernels, {summary['threads']} threads"
    tables = [_table("decode", decodes, bandwidth, about), _table("prefill", prefills, bandwidth, about)]
    publish("engine", heading, [table for table in tables if table.records], summary, csv_folder=args.csv, picture=None)
    return 0


def measure_decode(prepared: Prepared, rows: int, context: int, repeats: int) -> Figure:
    """Steps of `rows` sequences at `context` tokens; the first, which also records what is missing, is not counted."""
    runner, size = prepared.engine.runner, prepared.pool.block_size
    blocks = blocks_for(context, size)
    slots = [tuple(range(row * blocks * size, row * blocks * size + context)) for row in range(rows)]
    sequences = tuple(_sequence(context, size, choice=row) for row in range(rows))
    for row, sequence in enumerate(sequences):
        sequence.table.blocks = list(range(row * blocks, (row + 1) * blocks))
    plan = StepPlan(
        clears=tuple(range(prepared.choices.config.sequences)),
        swaps=(),
        slot_writes=tuple((row, 0, each) for row, each in enumerate(slots)),
        decode=tuple(DecodeRow(row, context - 1, each[-1]) for row, each in enumerate(slots)),
        decode_sequences=sequences,
        chunks=(),
        chunk_sequences=(),
    )
    runner.run(plan)
    seconds = _timed(prepared, [replace(plan, clears=(), slot_writes=())], repeats)
    read = prepared.weight_bytes + rows * context * prepared.pool.bytes_per_token
    return Figure("decode", rows, context, rows, median(seconds), min(seconds), read)


def measure_prefill(prepared: Prepared, tokens: int, repeats: int) -> Figure:
    """One prompt, in chunks of the step's budget, the first token chosen at its end."""
    budget, size = prepared.choices.config.step_rows, prepared.pool.block_size
    sequence = _sequence(tokens, size)
    sequence.table.blocks = list(range(blocks_for(tokens, size)))
    plans: list[StepPlan] = []
    read = 0
    for start in range(0, tokens, budget):
        stop = min(start + budget, tokens)
        slots = tuple(range(start, stop))
        chunk = ChunkPlan(0, start, (TOKEN,) * (stop - start), slots, last=stop == tokens)
        clears = tuple(range(prepared.choices.config.sequences)) if start == 0 else ()
        plans.append(StepPlan(clears, (), ((0, start, slots),), (), (), (chunk,), (sequence,)))
        read += prepared.weight_bytes + stop * prepared.pool.bytes_per_token
    _timed(prepared, plans, 1)
    seconds = _timed(prepared, plans, repeats)
    return Figure("prefill", min(budget, tokens), tokens, tokens, median(seconds), min(seconds), read)


def memory_bandwidth(threads: int, megabytes: int = 512) -> float:
    """Bytes a second of summing a large array, the best of five: the bound that every figure is held against."""
    torch.set_num_threads(threads)
    data = torch.ones(megabytes << 18, dtype=torch.float32)
    best = float("inf")
    for _ in range(5):
        started = perf_counter()
        data.sum()
        best = min(best, perf_counter() - started)
    return data.nbytes / best


def _timed(prepared: Prepared, plans: list[StepPlan], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        started = perf_counter()
        for plan in plans:
            prepared.engine.runner.run(plan)
        seconds.append(perf_counter() - started)
    return seconds


def _sequence(tokens: int, block_size: int, *, choice: int = 0) -> Sequence:
    return Sequence(
        request_id="bench",
        choice=choice,
        prompt_ids=[TOKEN] * tokens,
        params=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=1,
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset(),
        block_size=block_size,
    )


def _config(args: argparse.Namespace) -> EngineConfig:
    """A pool of just what the widest step reads, since all of it is filled."""
    longest, rows = max([*args.context, *args.prefill]), max(args.rows)
    model = load_config(resolve(args.model))
    blocks = max(rows * blocks_for(max(args.context), BLOCK), blocks_for(longest, BLOCK)) + 1
    token_bytes = model.kv_bytes_per_token(4 if args.kernels == "reference" else 2)
    return EngineConfig(
        model=args.model,
        kernels=args.kernels,
        threads=args.threads,
        max_model_len=longest,
        max_sequences=rows,
        kv_memory_bytes=blocks * BLOCK * token_bytes,
        max_step_rows=max(args.max_step_rows, rows),
        warmup_seconds=0.0,
    )


def _table(kind: str, figures: list[Figure], bandwidth: float, about: str) -> Table:
    columns = (
        Column("kind", "step"),
        Column("rows", "rows"),
        Column("context", "tokens of context", thousands),
        Column("seconds", "step", milliseconds),
        Column("least_seconds", "least", milliseconds),
        Column("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
        Column("megabytes", "reads", lambda value: f"{value:,.0f} MB"),
        Column("bandwidth_share", "of the bandwidth", lambda value: f"{value:.0%}"),
    )
    return Table(kind, kind.capitalize(), about, columns, [figure.record(bandwidth) for figure in figures])
