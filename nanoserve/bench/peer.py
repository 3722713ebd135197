"""`nanoserve bench peer`: the same work through this engine and through others, in one run, in turn.

Work is decode steps of some rows around a context, and whole prompts. Every engine starts from prompts of the same
length and goes on from its own tokens; each round gives each of them one stretch of steps, so that what else the
machine does falls on all of them. A running server is compared over HTTP with the load of `bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import sleep

from tqdm import tqdm

from nanoserve.bench.client import settled_heap
from nanoserve.bench.contenders import (
    MODEL_FLAG,
    Contender,
    Missing,
    Ours,
    Peer,
    engine_config,
    gguf_of,
    q4_0_file,
)
from nanoserve.bench.flags import check_flags
from nanoserve.bench.load import Load, Server, Work, measure, name_of
from nanoserve.bench.tables import Column, Record, Table, milliseconds, percent, publish, thousands, times, whole
from nanoserve.errors import ConfigError
from nanoserve.probe import cores
from nanoserve.source import resolve

REST_SECONDS = 0.05
"""Before a turn: compute threads of the engine before may spin for milliseconds once its work is done."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One engine at one piece of work: tokens a second, one sample for each round."""

    kind: str
    rows: int
    tokens: int
    engine: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    def record(self, ours: Figure) -> Record:
        """`ratio` is of the medians; `ratio_low` and `ratio_high` are the least and the greatest of one round."""
        rounds = [mine / its for mine, its in zip(ours.samples, self.samples, strict=True)]
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "engine": self.engine,
            "tokens_per_second": self.median,
            "low": min(self.samples),
            "high": max(self.samples),
            "ratio": ours.median / self.median,
            "ratio_low": min(rounds),
            "ratio_high": max(rounds),
        }


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    server = Server.at(args.server_url, "--server-url", model=args.server_model) if args.server_url else None
    mine = Server.at(args.url)
    tables: list[Table] = []
    figures: list[Figure] = []
    with ExitStack() as stack:
        if args.peers:
            contenders, missing = _enter(args, stack, needed=server is None)
            if len(contenders) > 1:
                with settled_heap():
                    figures += compare_engines(contenders, args)
            tables.append(_engine_table(contenders, missing))
        if server is not None:
            work = Work.of(args)
            loads = compare_servers(mine, server, work, args.streams, args.repeats)
            figures += _server_figures(loads)
            tables.append(_load_table(loads, work, args.repeats))
    if not figures:
        raise ConfigError("there is nothing to compare; name --peers and --context or --prefill, or a --server-url")
    tables += [*_figure_tables(figures, args.repeats), *_best_table(figures)]
    summary = {"model": args.model, "threads": args.threads or cores(), "repeats": args.repeats, "steps": args.steps}
    heading = f"{args.model} and its peers, {summary['threads']} threads, in turn"
    publish("peer", heading, tables, summary, csv_folder=args.csv, picture=None)
    return 0


# --- engines -------------------------------------------------------------------------------------------------------


def compare_engines(contenders: Sequence[Contender], args: argparse.Namespace) -> list[Figure]:
    shapes = [(rows, context) for context in args.context for rows in args.rows]
    total = len(shapes) + len(args.prefill)
    with tqdm(total=total, desc="measuring", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        figures = []
        for rows, context in shapes:
            figures += compare_decode(contenders, rows, context, steps=args.steps, repeats=args.repeats)
            bar.update()
        for tokens in args.prefill:
            figures += compare_prefill(contenders, tokens, args.repeats)
            bar.update()
    return figures


def compare_decode(
    contenders: Sequence[Contender], rows: int, context: int, *, steps: int, repeats: int
) -> list[Figure]:
    """Stretches of `steps` steps, `repeats` of each engine, such that `context` is the mean over them all; a stretch
    before them is not counted."""
    for contender in contenders:
        contender.open(rows=rows, prompt_tokens=first_context(context, steps, repeats), steps=steps * (repeats + 1))
    samples = _in_turn(contenders, repeats, lambda contender: rows * steps / sum(contender.decode(steps)))
    for contender in contenders:
        contender.close()
    return [Figure("decode", rows, context, *each) for each in samples]


def compare_prefill(contenders: Sequence[Contender], tokens: int, repeats: int) -> list[Figure]:
    samples = _in_turn(contenders, repeats, lambda contender: tokens / contender.prefill(tokens))
    return [Figure("prefill", 1, tokens, *each) for each in samples]


def first_context(context: int, steps: int, repeats: int) -> int:
    """Tokens of the prompts. Raises ConfigError if none are left."""
    tokens = context - steps - steps * repeats // 2
    if tokens < 1:
        raise ConfigError(
            f"--context is {context}; {repeats + 1} stretches of {steps} steps around it take at least "
            f"{context - tokens + 1}; raise it, or lower --steps or --repeats"
        )
    return tokens


def _in_turn(
    contenders: Sequence[Contender], repeats: int, sample: Callable[[Contender], float]
) -> list[tuple[str, tuple[float, ...]]]:
    """(name, samples) of each. Every round begins with another one; the first round only warms."""
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(repeats + 1):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            sleep(REST_SECONDS)
            value = sample(contender)
            if turn:
                samples[contender.name].append(value)
    return [(name, tuple(values)) for name, values in samples.items()]


def _enter(args: argparse.Namespace, stack: ExitStack, *, needed: bool) -> tuple[list[Contender], list[str]]:
    """This engine and the peers that are there, with a line for each that is not. Raises ConfigError if none is and
    one is `needed`."""
    contexts = [first_context(context, args.steps, args.repeats) for context in args.context]
    longest = max([context + args.steps * (args.repeats + 1) + 1 for context in contexts] + args.prefill) + 1
    sequences = max(args.rows)
    source = resolve(args.model)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nanoserve-peer-"))
    peers: list[Contender] = []
    missing: list[str] = []
    models = {name: getattr(args, MODEL_FLAG[name].removeprefix("--").replace("-", "_")) for name in args.peers}
    made: Path | None = None
    if source.kind == "gguf" and None in models.values():
        try:
            made = q4_0_file(args.peer_python, source.path, Path(folder))
        except Missing as error:
            missing.append(str(error))
    for name, named in models.items():
        try:
            model = named or made or gguf_of(source, MODEL_FLAG[name])
            threads = args.threads or cores()
            peer = Peer(name, args.peer_python, model=model, threads=threads, sequences=sequences, tokens=longest)
        except Missing as error:
            missing.append(str(error))
            continue
        stack.callback(peer.stop)
        peers.append(peer)
    if needed and not peers:
        raise ConfigError("; ".join(missing))
    for line in missing:
        print(f"nanoserve: {line}", file=sys.stderr)
    config = engine_config(args.model, args.kernels, args.threads, sequences=sequences, tokens=longest)
    return [Ours(replace(config, quantize_head=args.quantize_head)), *peers], missing


# --- servers -------------------------------------------------------------------------------------------------------


def compare_servers(
    mine: Server, other: Server, work: Work, streams: Sequence[int], repeats: int
) -> list[tuple[str, list[Load]]]:
    """(name, loads) of both servers, for each number of streams."""
    compared = []
    for count in streams:
        loads: dict[str, list[Load]] = {Ours.name: [], name_of(other): []}
        for turn in range(repeats + 1):
            pairs = list(zip(loads, (mine, other), strict=True))
            for name, server in pairs if turn % 2 else reversed(pairs):
                # The first load only warms: what a server makes once for a number of streams is no part of its pace.
                load = asyncio.run(measure(server, work if turn else replace(work, rounds=1), count))
                loads[name] += [load] if turn else []
        compared += list(loads.items())
    return compared


def _server_figures(compared: Sequence[tuple[str, list[Load]]]) -> list[Figure]:
    return [
        Figure("http", loads[0].streams, loads[0].streams, name, tuple(load.tokens_per_second for load in loads))
        for name, loads in compared
    ]


def _load_table(compared: Sequence[tuple[str, list[Load]]], work: Work, repeats: int) -> Table:
    keys = ("ttft_seconds", "full_gap_p50_seconds", "full_gap_p99_seconds", "client_share")
    records = []
    for name, loads in compared:
        each = [load.record() for load in loads]
        middle = {key: _median([record[key] for record in each]) for key in keys}
        records.append({"streams": loads[0].streams, "engine": name, **middle})
    columns = (
        Column("streams", "streams"),
        Column("engine", "engine"),
        Column("ttft_seconds", "first token p50", milliseconds),
        Column("full_gap_p50_seconds", "all decode: gap p50", milliseconds),
        Column("full_gap_p99_seconds", "p99", milliseconds),
        Column("client_share", "client's core", percent),
    )
    return Table("load", "Latency over HTTP", f"{work.describe()}; medians of {repeats} loads", columns, records)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


# --- tables --------------------------------------------------------------------------------------------------------


def _engine_table(contenders: Sequence[Contender], missing: Sequence[str]) -> Table:
    columns = (
        Column("engine", "engine"),
        Column("version", "version"),
        Column("format", "weights"),
        Column("file", "file"),
        Column("idle_seconds", "processor time while another ran", lambda value: f"{value:.2f} s"),
    )
    records = [
        {
            "engine": each.name,
            "version": each.version,
            "format": each.format,
            "file": each.model.name,
            "idle_seconds": each.idle_seconds,
        }
        for each in contenders
    ]
    return Table("engines", "Engines", "what computes", columns, records, tuple(missing))


WORK = {
    "decode": ("Decode", (Column("rows", "rows"), Column("tokens", "tokens of context", thousands))),
    "prefill": ("Prefill", (Column("tokens", "tokens of a prompt", thousands),)),
    "http": ("Over HTTP", (Column("rows", "streams"),)),
}
RATIO = (
    Column("ratio", "nanoserve is", times),
    Column("ratio_low", "least", times),
    Column("ratio_high", "most", times),
)


def _figure_tables(figures: Sequence[Figure], repeats: int) -> list[Table]:
    """One for each kind of work there is."""
    pace = (
        Column("engine", "engine"),
        Column("tokens_per_second", "tokens/s", whole),
        Column("low", "least", whole),
        Column("high", "most", whole),
    )
    tables = []
    for kind, (title, work) in WORK.items():
        records = [figure.record(_ours(figures, figure)) for figure in figures if figure.kind == kind]
        if records:
            tables.append(Table(kind, title, f"medians of {repeats}, in turn", (*work, *pace, *RATIO), records))
    return tables


def _best_table(figures: Sequence[Figure]) -> list[Table]:
    """At each piece of work, this engine against the fastest other."""
    records = []
    for ours in (figure for figure in figures if figure.engine == Ours.name):
        others = [each for each in figures if each.engine != Ours.name and _same_work(each, ours)]
        if others:
            best = max(others, key=lambda figure: figure.median)
            records.append({"kind": ours.kind, **best.record(ours)})
    columns = (
        Column("kind", "work"),
        Column("rows", "rows"),
        Column("tokens", "tokens", thousands),
        Column("engine", "best peer"),
        Column("tokens_per_second", "its tokens/s", whole),
        *RATIO,
    )
    return [Table("best", "Against the best peer", "ratios of medians", columns, records)] if records else []


def _ours(figures: Sequence[Figure], figure: Figure) -> Figure:
    return next(each for each in figures if each.engine == Ours.name and _same_work(each, figure))


def _same_work(a: Figure, b: Figure) -> bool:
    return (a.kind, a.rows, a.tokens) == (b.kind, b.rows, b.tokens)
