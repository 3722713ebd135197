"""`nanoserve bench stalls`: the gaps between one client's tokens, on an engine that records as it goes and on one that
was warmed. Without a network: a gap is the time from one token's commit to the next one's.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from tqdm import tqdm

from nanoserve.bench.client import Run, generate, settled_heap
from nanoserve.bench.flags import check_flags
from nanoserve.bench.stalls_picture import draw
from nanoserve.bench.subject import Subject
from nanoserve.bench.tables import Column, Record, Table, milliseconds, publish, thousands, two_decimals

Kind = Literal["lazy", "warmed"]
KINDS: tuple[Kind, ...] = ("lazy", "warmed")
NAMES = {"lazy": "nothing warmed", "warmed": "warmed"}


@dataclass(frozen=True, slots=True)
class Result:
    """One kind of engine, over all repeats. Token numbers count from 1; the first one comes from the prefill.

    gaps      seconds before tokens 2, 3, …: medians over the repeats
    recorded  numbers of the tokens whose step recorded a graph first, the same in each repeat
    """

    kind: Kind
    gaps: tuple[float, ...]
    recorded: tuple[int, ...]
    graphs_before: int
    start_seconds: float
    tokens: tuple[int, ...]

    def percentile(self, share: float) -> float:
        """Nearest rank: a gap that occurred."""
        ordered = sorted(self.gaps)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def record(self) -> Record:
        waits = [self.gaps[number - 2] for number in self.recorded if number > 1]
        return {
            "engine": NAMES[self.kind],
            "start_seconds": self.start_seconds,
            "graphs_before": self.graphs_before,
            "cold": len(self.recorded),
            "p50_seconds": self.percentile(0.50),
            "p99_seconds": self.percentile(0.99),
            "max_seconds": max(self.gaps),
            "recording_gap_seconds": median(waits) if waits else None,
        }


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    subject = Subject.load(args)
    with settled_heap():
        results = measure(subject, prompt_tokens=args.prompt_tokens, generated=args.generated, repeats=args.repeats)
    summary_table = stalls_table(subject, results, args.prompt_tokens, args.generated, args.repeats)
    gaps = gaps_table(results, args.prompt_tokens)
    drawing = draw(subject.describe(), gaps, summary_table, args.width_multiple) if args.picture else ""
    publish(
        "stalls",
        subject.describe(),
        [summary_table],
        _summary(subject, results, args),
        csv_tables=[summary_table, gaps],
        csv_folder=args.csv,
        picture=(args.picture, drawing) if args.picture else None,
    )
    return 0


def measure(subject: Subject, *, prompt_tokens: int, generated: int, repeats: int) -> dict[Kind, Result]:
    """`repeats` runs of each kind, in turn, after one of each that is thrown away (what a process does once)."""
    runs: dict[Kind, list[tuple[Run, int, float]]] = {kind: [] for kind in KINDS}
    order = [(repeat, kind) for repeat in range(repeats + 1) for kind in KINDS]
    for repeat, kind in tqdm(order, desc="measuring", unit="run", file=sys.stderr, disable=not sys.stderr.isatty()):
        engine, config, pool = subject.engine(rows=1, tokens=prompt_tokens + generated)
        graphs, seconds = 0, 0.0
        if kind == "warmed":
            report = subject.warm(engine, config, pool).report
            graphs, seconds = report.graphs, report.seconds
        done = generate(
            engine,
            rows=1,
            prompt_tokens=prompt_tokens,
            generated=generated,
            vocab_size=subject.loaded.config.vocab_size,
            block_size=config.block_size,
        )
        if repeat:
            runs[kind].append((done, graphs, seconds))
    return {kind: _result(kind, taken) for kind, taken in runs.items()}


def _result(kind: Kind, taken: list[tuple[Run, int, float]]) -> Result:
    first, graphs, _ = taken[0]
    gaps = tuple(median(values) for values in zip(*(done.gaps for done, _, _ in taken), strict=True))
    recorded = tuple(index + 1 for index in first.recorded)
    return Result(kind, gaps, recorded, graphs, median(seconds for _, _, seconds in taken), first.tokens[0])


# --- tables --------------------------------------------------------------------------------------------------------


def stalls_table(
    subject: Subject, results: dict[Kind, Result], prompt_tokens: int, generated: int, repeats: int
) -> Table:
    lazy, warmed = results["lazy"], results["warmed"]
    notes = []
    if lazy.recorded:
        before = ", ".join(map(str, lazy.recorded))
        notes.append(f"nothing warmed: recordings before tokens {before}, where the context enters a width")
    agreed = lazy.tokens == warmed.tokens
    notes.append(f"the warmed engine's tokens are {'' if agreed else 'NOT '}the unwarmed engine's tokens")
    columns = (
        Column("engine", "engine"),
        Column("start_seconds", "warm-up", two_decimals),
        Column("graphs_before", "graphs", thousands),
        Column("cold", "cold", thousands),
        Column("p50_seconds", "gap p50", milliseconds),
        Column("p99_seconds", "p99", milliseconds),
        Column("max_seconds", "max", milliseconds),
        Column("recording_gap_seconds", "with a recording", milliseconds),
    )
    about = (
        f"{prompt_tokens}-token prompt, {generated} generated, width multiple {subject.config.width_multiple}, "
        f"medians of {repeats} runs"
    )
    return Table(
        "engines",
        "Gaps between one client's tokens",
        about,
        columns,
        [results[kind].record() for kind in KINDS],
        tuple(notes),
    )


def gaps_table(results: dict[Kind, Result], prompt_tokens: int) -> Table:
    """Every gap: which engine, before which token, at how many tokens of context, and whether a graph was recorded."""
    records = [
        {
            "engine": NAMES[kind],
            "token": number,
            "context_tokens": prompt_tokens + number - 1,
            "gap_seconds": gap,
            "recorded": number in results[kind].recorded,
        }
        for kind in KINDS
        for number, gap in enumerate(results[kind].gaps, start=2)
    ]
    columns = tuple(Column(key, key) for key in ("engine", "token", "context_tokens", "gap_seconds", "recorded"))
    return Table("gaps", "Every gap", "seconds before each token", columns, records)


def _summary(subject: Subject, results: dict[Kind, Result], args: argparse.Namespace) -> dict[str, Any]:
    lazy, warmed = results["lazy"], results["warmed"]
    return {
        **subject.summary(),
        "prompt_tokens": args.prompt_tokens,
        "generated": args.generated,
        "width_multiple": args.width_multiple,
        "repeats": args.repeats,
        "record_seconds_added": args.record_seconds,
        "recorded_before_tokens": {"lazy": lazy.recorded, "warmed": warmed.recorded},
        "tokens_equal": lazy.tokens == warmed.tokens,
    }
