"""`nanoserve simulate --calibrate`: time steps of the real engine on this machine, fit, write a cost file.

Two parts. The steps themselves, by hand, over a grid of shapes. Then what the event loop adds to each: what steps
of the real AsyncEngine take while it serves, less what the fit says they take alone, and how far they scatter.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from nanoserve import __version__
from nanoserve.bench.client import settled_heap
from nanoserve.bench.tables import Column, Record, Table, milliseconds, publish, thousands
from nanoserve.boot import Booted
from nanoserve.buckets import GraphKey, row_buckets
from nanoserve.build import Prepared, prepare
from nanoserve.config import EngineConfig, choose_step_rows
from nanoserve.metrics import Metrics
from nanoserve.models.config import load_config
from nanoserve.probe import cores
from nanoserve.sequence import StepPlan
from nanoserve.simulate.costs import Costs, Curve, Read, Scatter, save_costs
from nanoserve.simulate.fit import Fit, Sample, Served, fit_costs, fit_host
from nanoserve.simulate.forms import Former, PagedFormer, RectangleFormer
from nanoserve.simulate.live import serve_live
from nanoserve.simulate.steps import HandMadeStep, chunk_sizes, grid, time_steps
from nanoserve.simulate.trace import Lengths, Mix
from nanoserve.source import resolve
from nanoserve.step import StepOutcome

CONTEXTS = (64, 256, 1024)
FILL = 0.01
"""What the K/V pool is filled with: pages that were never written to are no memory, and cost nothing to read."""
HOST_TOKENS, HOST_ROUNDS, HOST_REQUESTS = 96, 6, 48
"""Of a request at most, half of them its prompt's, where steps are to show what the event loop adds; requests of each
stream, and of all at least: what happens once in a hundred steps is to be among them."""
NEAR = 8
"""Rows by which steps of the same graphs may differ and be alike."""
SCATTERS = 3
FEWEST_ALIKE = 3
"""Steps of a kind, whose median counts: single ones met whatever else the machine did."""


@dataclass(frozen=True, slots=True)
class Ladders:
    """The grid's sizes. `body` and `head` are where the curves get their knots."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    max_step_rows: int

    @property
    def body(self) -> list[int]:
        return sorted({*self.rows, *chunk_sizes(self.max_step_rows)})

    def steps(self, *, rectangle: bool) -> list[HandMadeStep]:
        return grid(
            row_ladder=self.rows,
            contexts=self.contexts,
            max_step_rows=self.max_step_rows,
            rectangle=rectangle,
        )


def calibrate(args: argparse.Namespace) -> int:
    """Measure, write `--costs`, print how well the fit says what was measured. Raises StartupError."""
    longest = args.max_model_len or CONTEXTS[-1]
    contexts = tuple(sorted({min(context, longest) for context in CONTEXTS}))
    sequences = max(args.max_sequences)
    step_rows = choose_step_rows(max(args.max_step_rows or [0]), sequences)
    ladders = Ladders(row_buckets(sequences), contexts, step_rows)
    config = _config(args, ladders)
    metrics = Metrics(__version__)
    prepared = prepare(config, metrics, lambda progress: None)
    prepared.engine.runner.cache.poison(FILL)
    read: Read = "rectangle" if prepared.choices.config.attention_read == "rectangle" else "paged"
    with settled_heap():
        steps, samples = measure_steps(prepared, ladders, read, args.calibrate_seconds)
        fit = fit_costs(samples, body_rows=ladders.body, head_rows=ladders.rows)
        costs = _costs(args, prepared, read, fit)
        alike = measure_served(prepared, metrics, costs, _former(prepared, read), ladders.rows)
    served = [_median_of(steps) for steps in alike]
    costs = replace(fit_host(costs, served), scatter=scatter_of(alike))
    save_costs(args.costs, costs)
    tables = [_steps_table(steps, samples, fit), _served_table(served, costs)]
    errors = [abs(error) for error in fit.errors]
    summary: Record = {"costs": str(args.costs), **costs.measured, "fit_error_max": max(errors)}
    heading = f"Costs of {costs.describe()}, written to {args.costs}"
    publish("calibrate", heading, tables, summary, csv_folder=args.csv, picture=None)
    return 0


def measure_steps(
    prepared: Prepared, ladders: Ladders, read: Read, seconds: float
) -> tuple[list[HandMadeStep], list[Sample]]:
    """Every step of the grid, and what it comes to as forwards, in about `seconds`."""
    config, former = prepared.choices.config, _former(prepared, read)
    steps = ladders.steps(rectangle=read == "rectangle")
    sizes = {"block_size": config.block_size, "max_sequences": config.sequences}
    print(f"measuring {len(steps)} steps for about {seconds:g} s …", file=sys.stderr)
    medians = time_steps(prepared.engine, steps, **sizes, budget_seconds=seconds)
    works = [former.form(step.plan(**sizes)[1]).works for step in steps]
    return steps, [Sample(each, taken) for each, taken in zip(works, medians, strict=True)]


def measure_served(
    prepared: Prepared, metrics: Metrics, costs: Costs, former: Former, rows: tuple[int, ...]
) -> list[list[Served]]:
    """Steps that are alike, together, from closed loops of a few sizes whose prompts and answers differ in length, so
    that steps have prompts beside decoding."""
    booted = Booted(prepared.engine, prepared.intake, prepared.choices.kernels, {})
    tokens = min(HOST_TOKENS, prepared.pool.max_model_len)
    lengths = Lengths.parse(f"uniform:{max(1, tokens // 8)}:{max(1, tokens // 2)}")
    alike: dict[tuple[int, tuple[GraphKey, ...]], list[Served]] = {}

    def note(plan: StepPlan, outcome: StepOutcome) -> None:
        form = former.form(plan)
        tokens = len(outcome.tokens)
        step = Served(tokens, tokens - len(plan.decode), costs.alone_seconds(form.works), outcome.seconds)
        alike.setdefault((form.real_rows // NEAR, form.keys), []).append(step)

    prepared.engine.observer = note
    for streams in sorted({1, rows[len(rows) // 2], rows[-1]}):
        load = Mix(max(HOST_REQUESTS, streams * HOST_ROUNDS), lengths, lengths).closed(streams)
        serve_live(lambda report: booted, metrics, load, vocab_size=prepared.model.vocab_size)
    prepared.engine.observer = None
    return [steps for steps in alike.values() if len(steps) >= FEWEST_ALIKE]


def scatter_of(alike: list[list[Served]]) -> tuple[Scatter, ...]:
    """Of the shorter, the middle and the longer steps, about as many each: 0, 1, … 100 % of their times, for what each
    computes, over the median of its like."""
    by_length = sorted(((_median_of(steps).seconds, steps) for steps in alike), key=lambda pair: pair[0])
    enough = sum(len(steps) for steps in alike) / SCATTERS
    found: list[Scatter] = []
    ratios: list[float] = []
    for seconds, steps in by_length:
        each = [step.seconds / step.compute for step in steps]
        ratios += [ratio / median(each) for ratio in each]
        if len(ratios) >= enough or steps is by_length[-1][1]:
            quantiles = np.quantile(ratios, np.linspace(0.0, 1.0, 101))
            found.append(Scatter(seconds, tuple(float(quantile) for quantile in quantiles)))
            ratios = []
    return tuple(found)


def _median_of(steps: list[Served]) -> Served:
    return Served(
        tokens=median(step.tokens for step in steps),
        requests=median(step.requests for step in steps),
        compute=median(step.compute for step in steps),
        seconds=median(step.seconds for step in steps),
    )


def _former(prepared: Prepared, read: Read) -> Former:
    config = prepared.choices.config
    if read == "paged":
        return PagedFormer(
            max_sequences=config.sequences,
            max_step_rows=config.step_rows,
            pads_compute=prepared.choices.library is None,
        )
    return RectangleFormer(
        max_sequences=config.sequences,
        max_model_len=prepared.pool.max_model_len,
        width_multiple=config.width_multiple,
    )


def _config(args: argparse.Namespace, ladders: Ladders) -> EngineConfig:
    """A pool of just what the largest step of the grid reads, since all of it is filled."""
    longest = max(ladders.contexts[-1], ladders.contexts[-1] // 2 + ladders.max_step_rows)
    blocks = max(step.blocks(args.block_size) for step in ladders.steps(rectangle=False)) + 1
    token_bytes = load_config(resolve(args.model)).kv_bytes_per_token(4 if args.kernels == "reference" else 2)
    return EngineConfig(
        model=args.model,
        kernels=args.kernels,
        threads=args.threads,
        attention_read=args.attention_read or "auto",
        max_model_len=longest,
        max_sequences=ladders.rows[-1],
        block_size=args.block_size,
        max_step_rows=ladders.max_step_rows,
        prefill_gap_seconds=args.prefill_gap_seconds,
        prefix_cache=args.prefix_cache,
        width_multiple=args.width_multiple,
        kv_memory_bytes=blocks * args.block_size * token_bytes,
        warmup_seconds=0.0,
    )


def _costs(args: argparse.Namespace, prepared: Prepared, read: Read, fit: Fit) -> Costs:
    kernels, threads = prepared.choices.kernels, args.threads or cores()
    errors = [abs(error) for error in fit.errors]
    return Costs(
        read=read,
        pads_compute=prepared.choices.library is None,
        body=fit.body,
        head=fit.head if fit.head.knots[-1][1] > 0 else Curve(),
        decode_context=fit.decode_context,
        chunk_context=fit.chunk_context,
        measured={
            "model": args.model,
            "kernels": f"{kernels} kernels",
            "threads": threads,
            "nanoserve": f"nanoserve {__version__}",
            "fit_error_median": median(errors),
        },
    )


def _steps_table(steps: list[HandMadeStep], samples: list[Sample], fit: Fit) -> Table:
    records: list[Record] = [
        {
            "decode_rows": len(step.decode),
            "context": step.decode[0] if step.decode else None,
            "chunks": len(step.chunks),
            "chunk_tokens": step.chunks[0].tokens if step.chunks else None,
            "chunk_start": step.chunks[0].start if step.chunks else None,
            "logit_rows": sum(work.logit_rows for work in sample.works),
            "seconds": sample.seconds,
            "error": error,
        }
        for step, sample, error in zip(steps, samples, fit.errors, strict=True)
    ]
    columns = (
        Column("decode_rows", "decode rows"),
        Column("context", "context", thousands),
        Column("chunks", "chunks"),
        Column("chunk_tokens", "of tokens", thousands),
        Column("chunk_start", "from", thousands),
        Column("logit_rows", "heads"),
        Column("seconds", "step", milliseconds),
        Column("error", "fit off by", lambda value: f"{value:+.1%}"),
    )
    return Table("steps", "Steps", "medians of passes over all of them; errors of the fit", columns, records)


def _served_table(served: list[Served], costs: Costs) -> Table:
    records: list[Record] = [
        {
            "tokens": step.tokens,
            "requests": step.requests,
            "compute_seconds": step.compute,
            "seconds": step.seconds,
            "error": costs.served_seconds(step.tokens, step.requests, step.compute) / step.seconds - 1,
        }
        for step in sorted(served, key=lambda step: step.compute)
    ]
    columns = (
        Column("tokens", "tokens"),
        Column("requests", "first ones"),
        Column("compute_seconds", "alone", milliseconds),
        Column("seconds", "served", milliseconds),
        Column("error", "fit off by", lambda value: f"{value:+.1%}"),
    )
    about = "medians of steps alike, and what they take alone by the fit above"
    return Table("served", "Steps while the engine in this process serves", about, columns, records)
