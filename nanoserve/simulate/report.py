"""A simulation's results as tables: one row for each combination of sizes and load; shapes and warm list of one."""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.bench.tables import Column, Record, Table, milliseconds, thousands
from nanoserve.buckets import DecodeShape, GraphKey, Shape
from nanoserve.simulate.result import SHARES, Result, advise, percentiles
from nanoserve.simulate.simulator import Sizes


@dataclass(frozen=True, slots=True)
class Run:
    """One combination. `load` names it in one word: streams or requests a second."""

    sizes: Sizes
    load: str
    result: Result

    def record(self) -> Record:
        result = self.result
        record: Record = {
            "load": self.load,
            "max_sequences": self.sizes.max_sequences,
            "kv_blocks": result.blocks,
            "max_step_rows": self.sizes.step_rows,
            "requests": len(result.finished),
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "busy_share": result.busy_seconds / result.seconds if result.seconds else 0.0,
            "preemptions": result.preemptions,
            "refused": result.refused,
            "never_fit": result.never_fit,
            "cached_tokens": result.cached_tokens,
            "recomputed_tokens": result.recomputed_tokens,
            "most_blocks": result.most_blocks,
            "steps": result.steps,
        }
        for name, found in (("ttft", percentiles(result.ttfts)), ("gap", result.gaps.percentiles())):
            record |= {f"{name}_{share}_seconds": found[share] for share in SHARES}
        return record


def runs_table(runs: list[Run], about: str) -> Table:
    columns = (
        Column("load", "load"),
        Column("max_sequences", "sequences", thousands),
        Column("kv_blocks", "blocks", thousands),
        Column("most_blocks", "most used", thousands),
        Column("max_step_rows", "step rows", thousands),
        Column("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
        *(Column(f"ttft_{share}_seconds", _heading("first token", share), milliseconds) for share in SHARES),
        *(Column(f"gap_{share}_seconds", _heading("gap", share), milliseconds) for share in SHARES),
        Column("busy_share", "busy", lambda value: f"{value:.0%}"),
        Column("preemptions", "preempted", thousands),
        Column("cached_tokens", "cached tokens", thousands),
        Column("refused", "refused", thousands),
    )
    records = [run.record() for run in runs]
    return Table("runs", "Simulated", about, columns, records, tuple(_warnings(runs)))


def _heading(what: str, share: str) -> str:
    return f"{what} {share}" if share == "p50" else share


def _warnings(runs: list[Run]) -> list[str]:
    lost = sum(run.result.never_fit for run in runs)
    notes = [f"{lost:,} requests are longer than the context or the pool and were turned away"] if lost else []
    recomputed = sum(run.result.recomputed_tokens for run in runs)
    if recomputed:
        notes.append(f"preemptions made {recomputed:,} tokens be computed again: more blocks or fewer sequences")
    return notes


def shapes_table(result: Result) -> Table:
    """Steps by kind and bucket."""
    records: list[Record] = []
    for (kind, rows, width), tally in sorted(result.tallies.items(), key=lambda item: (item[0][0], item[0][1:])):
        records.append(
            {
                "kind": kind,
                "rows": rows,
                "width": width,
                "steps": tally.steps,
                "share": tally.steps / result.steps,
                "pad_share": 1 - tally.real_rows / (rows * tally.steps),
                "mean_seconds": tally.seconds / tally.steps,
            }
        )
    columns = (
        Column("kind", "step"),
        Column("rows", "rows", thousands),
        Column("width", "width", thousands),
        Column("steps", "steps", thousands),
        Column("share", "of all", lambda value: f"{value:.1%}"),
        Column("pad_share", "pad rows", lambda value: f"{value:.1%}"),
        Column("mean_seconds", "a step", milliseconds),
    )
    return Table("shapes", "Shapes", "steps by kind and the bucket they are padded to", columns, records)


def warm_table(result: Result) -> Table:
    """Which graphs to record first. None of the steps replay what is not listed."""
    records: list[Record] = [
        {
            "order": order,
            "kind": advice.key.kind,
            "rows": advice.key.rows,
            "width": advice.key.width,
            "steps": advice.steps,
            "share": advice.share,
            "covered": advice.covered,
        }
        for order, advice in enumerate(advise(result.shapes), start=1)
    ]
    columns = (
        Column("order", "warm"),
        Column("kind", "graph"),
        Column("rows", "rows", thousands),
        Column("width", "width", thousands),
        Column("steps", "steps", thousands),
        Column("share", "of all", lambda value: f"{value:.1%}"),
        Column("covered", "hits from here", lambda value: f"{value:.1%}"),
    )
    return Table("warm", "Warm list", "graphs in the order that covers most steps soonest", columns, records)


def warm_list(result: Result) -> dict[Shape, int]:
    """What `warmup.save_warm_list` takes: shapes and how many steps replayed each."""
    return {_shape(advice.key): advice.steps for advice in advise(result.shapes)}


def _shape(key: GraphKey) -> Shape:
    return key if key.width is None else DecodeShape(key.rows, key.width)
