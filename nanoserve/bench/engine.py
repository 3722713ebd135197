"""`nanoserve bench engine`: seconds of whole steps on the engine that would serve, without network and scheduler.

A decode step has `rows` sequences with `context` tokens each, its own included; a prefill is one prompt, in chunks of
the step's budget. Beside each figure: what it has to read, and the share of the memory bandwidth that is.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch

from nanoserve import __version__
from nanoserve.bench.client import NO_GAP_BOUND, new_sequence, settled_heap
from nanoserve.bench.flags import check_flags
from nanoserve.bench.sampled_steps import decoded_tokens, measure_sampling, sampling_table
from nanoserve.bench.subject import kv_token_bytes
from nanoserve.bench.tables import Column, Record, Table, milliseconds, percent, publish, thousands, whole
from nanoserve.blocks import blocks_for
from nanoserve.buckets import DecodeRow
from nanoserve.build import Prepared, prepare
from nanoserve.config import EngineConfig
from nanoserve.errors import ConfigError
from nanoserve.kernels.memory import WeightMemory
from nanoserve.metrics import Metrics
from nanoserve.probe import cores, free_host_bytes
from nanoserve.sequence import ChunkPlan, Sequence, StepPlan
from nanoserve.stepper import StepEnds

TOKEN = 5
"""Every prompt is this token: what a step computes does not depend on which."""
BLOCK = EngineConfig().block_size
MEMORY_SHARE = 0.75
"""Of the free memory that K/V may take here: all of it is written to, and the weights need some too."""
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


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is measured: (rows, context) of decode steps, tokens of prompts, rows that sample. `left_out` does not fit
    into memory."""

    decode: tuple[tuple[int, int], ...]
    prefill: tuple[int, ...]
    sampling: tuple[int, ...]
    left_out: tuple[tuple[int, int], ...]
    blocks: int
    longest: int

    @classmethod
    def choose(cls, args: argparse.Namespace, *, step_rows: int, block_bytes: int, free_bytes: int) -> Shapes:
        """Raises ConfigError if nothing is left to measure."""
        wanted = [(rows, context) for context in args.context for rows in args.rows]
        most = int(free_bytes * MEMORY_SHARE) // block_bytes - 1
        fits = [(rows, context) for rows, context in wanted if rows * blocks_for(context, BLOCK) <= most]
        sampled = 0
        if args.sampling and args.context:
            context = args.context[0]
            sampled = context + decoded_tokens(max(args.sampling), context, args.repeats, step_rows)
        needs = [rows * blocks_for(context, BLOCK) for rows, context in fits]
        needs += [blocks_for(tokens, BLOCK) for tokens in args.prefill]
        needs += [rows * blocks_for(sampled, BLOCK) for rows in args.sampling]
        if not fits and not args.prefill:
            raise ConfigError(
                f"{free_bytes / 1e9:.1f} GB are free, too little for the K/V of any --rows at any --context, and "
                "--prefill names nothing; lower the first two"
            )
        return cls(
            decode=tuple(fits),
            prefill=tuple(args.prefill),
            sampling=tuple(args.sampling) if sampled else (),
            left_out=tuple(shape for shape in wanted if shape not in fits),
            blocks=max(needs),
            longest=max([context for _, context in fits] + list(args.prefill) + [sampled]),
        )


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    config = EngineConfig(
        model=args.model,
        kernels=args.kernels,
        threads=args.threads,
        prefill_gap_seconds=NO_GAP_BOUND,
        warmup_seconds=0.0,
    )
    token_bytes = kv_token_bytes(config)
    sequences = max([*args.rows, *args.sampling])
    step_rows = max(args.max_step_rows, sequences)
    shapes = Shapes.choose(args, step_rows=step_rows, block_bytes=BLOCK * token_bytes, free_bytes=free_host_bytes())
    config = replace(
        config,
        max_model_len=shapes.longest,
        max_sequences=sequences,
        max_step_rows=step_rows,
        # Just what the widest step reads, since all of it is filled.
        kv_memory_bytes=(shapes.blocks + 1) * BLOCK * token_bytes,
    )
    prepared = prepare(config, Metrics(__version__), lambda progress: None)
    prepared.engine.runner.cache.poison(FILL)
    threads = args.threads or cores()
    bandwidth = memory_bandwidth(threads)
    with settled_heap():
        pairs = [measure_sampling(prepared, rows, args.context[0], args.repeats) for rows in shapes.sampling]
        decodes = [measure_decode(prepared, rows, context, args.repeats) for rows, context in shapes.decode]
        prefills = [measure_prefill(prepared, tokens, args.repeats) for tokens in shapes.prefill]
    about = f"medians of {args.repeats}; memory reads {bandwidth / 1e9:.1f} GB/s"
    summary = {
        "model": args.model,
        "kernels": prepared.choices.kernels,
        "threads": threads,
        "bandwidth_bytes_per_second": bandwidth,
        "weight_bytes": prepared.weight_bytes,
        "left_out": shapes.left_out,
        "torch": torch.__version__,
    }
    heading = f"{args.model} on {prepared.choices.kernels} kernels, {threads} threads"
    notes = tuple(
        f"{rows} rows at {context:,} left out: {rows * context * token_bytes / 1e9:.1f} GB of K/V do not fit"
        for rows, context in shapes.left_out
    )
    tables = [_table("decode", decodes, bandwidth, about, notes), _table("prefill", prefills, bandwidth, about)]
    tables.append(sampling_table(pairs))
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
    seconds = _timed_decode(prepared, replace(plan, clears=(), slot_writes=()), repeats)
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
    """Bytes a second of summing a large array that lies as weights do, the best of five: the bound that every figure is
    held against."""
    torch.set_num_threads(threads)
    data = WeightMemory().take(1, megabytes << 20).view(torch.float32).fill_(1)
    best = float("inf")
    for _ in range(5):
        started = perf_counter()
        data.sum()
        best = min(best, perf_counter() - started)
    return data.nbytes / best


def _timed_decode(prepared: Prepared, plan: StepPlan, repeats: int) -> list[float]:
    """From the end of one step to the end of the next, which was planned beside it where a server would do that."""
    runner = prepared.engine.runner
    if not runner.starts:
        return _timed(prepared, [plan], repeats)
    ends = StepEnds(prepared.engine.settle)
    ended = []
    running = runner.start(plan, ends.write_fd)
    for step in range(repeats + 1):
        following = runner.start(plan, ends.write_fd, ahead=True) if step < repeats else None
        ends.wait()
        runner.finish(running)
        ended.append(perf_counter())
        running = following
    ends.close()
    return [after - before for before, after in pairwise(ended)]


def _timed(prepared: Prepared, plans: list[StepPlan], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        started = perf_counter()
        for plan in plans:
            prepared.engine.runner.run(plan)
        seconds.append(perf_counter() - started)
    return seconds


def _sequence(tokens: int, block_size: int, *, choice: int = 0) -> Sequence:
    return new_sequence([TOKEN] * tokens, row=choice, max_tokens=1, block_size=block_size)


def _table(kind: str, figures: list[Figure], bandwidth: float, about: str, notes: tuple[str, ...] = ()) -> Table:
    columns = (
        Column("kind", "step"),
        Column("rows", "rows"),
        Column("context", "tokens of context", thousands),
        Column("seconds", "step", milliseconds),
        Column("least_seconds", "least", milliseconds),
        Column("tokens_per_second", "tokens/s", whole),
        Column("megabytes", "reads", lambda value: f"{value:,.0f} MB"),
        Column("bandwidth_share", "of the bandwidth", percent),
    )
    return Table(kind, kind.capitalize(), about, columns, [figure.record(bandwidth) for figure in figures], notes)
