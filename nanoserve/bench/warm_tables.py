"""The three tables of `bench warm`: measured on engines, and two of arithmetic over a deployment's sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tqdm import tqdm

from nanoserve.bench.client import Run, generate, settled_heap
from nanoserve.bench.subject import Subject
from nanoserve.bench.tables import Column, Record, Table, milliseconds, thousands, two_decimals
from nanoserve.buckets import ShapeSet
from nanoserve.engine import Engine
from nanoserve.warmup import lazy_captures, score_bytes, stall_seconds, warm_shapes, warmup_seconds, width_ceiling


@dataclass(frozen=True, slots=True)
class Serving:
    """The deployment that the arithmetic is about."""

    rows: int
    width: int
    multiple: int
    seconds_per_graph: float
    trim_rows: int
    trim_width: int

    @property
    def shapes(self) -> ShapeSet:
        return ShapeSet.build(max_rows=self.rows, max_width=self.width, width_multiple=self.multiple)

    def start_seconds(self, *, max_rows: int | None = None, max_width: int | None = None) -> float:
        graphs = len(warm_shapes(self.shapes, max_rows=max_rows, max_width=max_width))
        return warmup_seconds(graphs=graphs, seconds_per_graph=self.seconds_per_graph)


# --- measured ------------------------------------------------------------------------------------------------------


def cold_table(subject: Subject, *, rows: int, prompt_tokens: int, lengths: list[int]) -> Table:
    """Each length on an engine that found no graphs and on one that was warmed, both new."""
    progress = tqdm(lengths, desc="measuring", unit="length", file=sys.stderr, disable=not sys.stderr.isatty())
    with settled_heap():
        records = [_measure(subject, rows, prompt_tokens, generated) for generated in progress]
    graphs, seconds = sum(r["warm_graphs"] for r in records), sum(r["warm_seconds"] for r in records)
    notes = [f"one recording takes {milliseconds(seconds / graphs)} here, the mean of {graphs}"] if graphs else []
    agreed = all(record["tokens_equal"] for record in records)
    notes.append(f"the warmed engine's tokens are {'' if agreed else 'NOT '}the unwarmed engine's tokens")
    about = f"{rows} rows off a {prompt_tokens}-token prompt, width multiple {subject.config.width_multiple}"
    columns = (
        Column("generated", "generated", thousands),
        Column("lazy", "cold: lazy"),
        Column("predicted", "predicted"),
        Column("warmed", "cold: warmed"),
        Column("warm_graphs", "warm list", lambda graphs: f"{graphs} graphs"),
        Column("warm_seconds", "recorded in", milliseconds),
        Column("tokens_equal", "same tokens", lambda same: "yes" if same else "NO"),
    )
    return Table("cold", "Recordings in front of a client", about, columns, records, tuple(notes))


def _measure(subject: Subject, rows: int, prompt_tokens: int, generated: int) -> Record:
    lazy, _, _ = subject.engine(rows=rows, tokens=prompt_tokens + generated)
    cold_run = _drive(subject, lazy, rows, prompt_tokens, generated)
    warmed, config, pool = subject.engine(rows=rows, tokens=prompt_tokens + generated)
    report = subject.warm(warmed, config, pool).report
    warm_run = _drive(subject, warmed, rows, prompt_tokens, generated)
    return {
        "generated": generated,
        "lazy": _cold(lazy),
        # The prefill chooses the first token, so the rest are decode steps.
        "predicted": lazy_captures(
            steps=generated - 1, start_width=prompt_tokens, width_multiple=subject.config.width_multiple
        ),
        "warmed": _cold(warmed),
        "warm_graphs": report.graphs,
        "warm_seconds": report.seconds,
        "tokens_equal": cold_run.tokens == warm_run.tokens,
    }


def _drive(subject: Subject, engine: Engine, rows: int, prompt_tokens: int, generated: int) -> Run:
    return generate(
        engine,
        rows=rows,
        prompt_tokens=prompt_tokens,
        generated=generated,
        vocab_size=subject.loaded.config.vocab_size,
        block_size=subject.config.block_size,
    )


def _cold(engine: Engine) -> int:
    assert engine.runner.graphs is not None, "a measurement of recordings without a graph set"
    return engine.runner.graphs.count("cold")


# --- arithmetic ----------------------------------------------------------------------------------------------------


def paid_table(serving: Serving, lengths: list[int]) -> Table:
    """The stall that one request meets, from an empty context on, beside what the start-up takes instead."""
    full = serving.start_seconds()
    by_rows = serving.start_seconds(max_rows=serving.trim_rows)
    by_both = serving.start_seconds(max_rows=serving.trim_rows, max_width=serving.trim_width)
    records: list[Record] = []
    for steps in lengths:
        captures = lazy_captures(steps=steps, start_width=0, width_multiple=serving.multiple)
        stall = stall_seconds(captures=captures, seconds_per_graph=serving.seconds_per_graph)
        records.append(
            {
                "generated": steps,
                "lazy_graphs": captures,
                "latency_seconds": stall,
                "full_seconds": full,
                "rows_seconds": by_rows,
                "rows_width_seconds": by_both,
            }
        )
    columns = (
        Column("generated", "generated", thousands),
        Column("lazy_graphs", "lazy: graphs", thousands),
        Column("latency_seconds", "in a client's latency", two_decimals),
        Column("full_seconds", "at the start: full", two_decimals),
        Column("rows_seconds", f"rows<={serving.trim_rows}", two_decimals),
        Column("rows_width_seconds", f"rows<={serving.trim_rows},ctx<={serving.trim_width}", two_decimals),
    )
    price = f"{serving.seconds_per_graph * 1e3:g} ms a graph"
    about = f"{serving.rows:,} rows, {serving.width:,} tokens, width multiple {serving.multiple}, {price}"
    notes = _weigh(records[-1], len(serving.shapes.shapes()))
    return Table("paid", "Where recordings are paid for", about, columns, records, notes)


def _weigh(longest: Record, graphs: int) -> tuple[str, ...]:
    stall = longest["latency_seconds"]
    if not stall:
        return ()
    ratio = longest["full_seconds"] / stall
    return (
        f"the full list is {graphs:,} graphs: {ratio:,.1f} times what it saves a request of "
        f"{longest['generated']:,} tokens",
    )


def budget_table(serving: Serving, *, heads: int, budgets_mb: list[int]) -> Table:
    """The widest capture and the number of shapes whose fp32 scores fit, at the deployment's most rows."""
    shapes = serving.shapes
    records: list[Record] = []
    for megabytes in budgets_mb:
        ceiling = width_ceiling(rows=serving.rows, num_heads=heads, budget_bytes=megabytes * 10**6)
        fitting = warm_shapes(shapes, max_width=ceiling)
        records.append(
            {
                "budget_mb": megabytes,
                "width_ceiling": ceiling,
                "shapes": len(fitting),
                "shapes_in_all": len(shapes.shapes()),
                "arena_bytes": max((score_bytes(shape, num_heads=heads) for shape in fitting), default=0),
            }
        )
    columns = (
        Column("budget_mb", "free", lambda value: f"{value:,} MB"),
        Column("width_ceiling", "widest capture", lambda value: f"{value:,} tokens"),
        Column("shapes", "shapes that fit", thousands),
        Column("shapes_in_all", "of", thousands),
        Column("arena_bytes", "largest", lambda value: f"{value / 1e6:,.1f} MB"),
    )
    about = f"{serving.rows:,} rows, {heads} heads, fp32 scores"
    fits = [f"{r['budget_mb']:,} MB" for r in records if r["shapes"] == r["shapes_in_all"]]
    notes = (f"the whole list fits in {', '.join(fits)}",) if fits else ()
    return Table("budgets", "What a memory budget holds", about, columns, records, notes)
