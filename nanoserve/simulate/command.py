"""What `nanoserve simulate` does: calibrate, or simulate every combination of the flags, and perhaps hold it against
the real engine."""

from __future__ import annotations

import argparse
from itertools import product
from time import perf_counter

from nanoserve.bench.flags import check_flags
from nanoserve.bench.tables import Record, publish
from nanoserve.errors import ConfigError
from nanoserve.simulate.costs import Costs, costs_by_hand, load_costs
from nanoserve.simulate.flags import check_simulate_flags
from nanoserve.simulate.picture import draw
from nanoserve.simulate.report import Run, runs_table, shapes_table, warm_list, warm_table
from nanoserve.simulate.simulator import Sizes, simulate
from nanoserve.simulate.trace import Load, Mix, load_trace, save_trace


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises StartupError."""
    check_flags(args, may_be_zero=("seed", "prefix_tokens"))
    check_simulate_flags(args)
    if args.calibrate:
        from nanoserve.simulate.calibrate import calibrate

        return calibrate(args)
    costs = chosen_costs(args)
    loads = chosen_loads(args)
    sizes = chosen_sizes(args)
    if args.save_trace is not None:
        save_trace(args.save_trace, loads[0][1].asks)
    started = perf_counter()
    pairs = [(Run(each, name, simulate(each, costs, load)), load) for name, load in loads for each in sizes]
    wall = perf_counter() - started
    runs = [run for run, _ in pairs]
    tables = [runs_table(runs, _about(loads))]
    if len(runs) == 1:
        tables += [shapes_table(runs[0].result), warm_table(runs[0].result)]
    if args.save_warm_list is not None:
        _save_warm_list(args, runs)
    heading = f"Simulated on {costs.describe()}: {_speed(runs, wall)}"
    summary: Record = {"costs": dict(costs.measured) or args.step_ms, "wall_seconds": wall, "seed": args.seed}
    if args.validate:
        from nanoserve.simulate.live import validate

        tables.append(validate(args, costs.read, pairs))
    picture = (args.picture, draw(heading, runs)) if args.picture else None
    publish("simulate", heading, tables, summary, csv_folder=args.csv, picture=picture)
    return 0


def chosen_costs(args: argparse.Namespace) -> Costs:
    costs = load_costs(args.costs) if args.costs else costs_by_hand(args.step_ms, args.attention_read or "paged")
    if args.attention_read not in (None, costs.read):
        raise ConfigError(
            f"--attention-read is {args.attention_read}; {args.costs} was measured on the {costs.read} read; leave the "
            "flag out or calibrate that read"
        )
    return costs


def chosen_loads(args: argparse.Namespace) -> list[tuple[str, Load]]:
    """(its name in a table, the load), in the order given."""
    if args.trace is not None:
        return [(args.trace.name, load_trace(args.trace))]
    mix = Mix(
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        prefix_tokens=args.prefix_tokens,
        prefix_share=args.prefix_share,
        seed=args.seed,
    )
    if args.streams is not None:
        return [(f"{streams:,} streams", mix.closed(streams)) for streams in args.streams]
    return [(f"{rate:g}/s", mix.poisson(rate)) for rate in args.rate]


def chosen_sizes(args: argparse.Namespace) -> list[Sizes]:
    """Every combination of the swept flags."""
    swept = product(args.max_sequences, args.kv_blocks or [None], args.max_step_rows or [None])
    return [
        Sizes(
            max_sequences=sequences,
            kv_blocks=blocks,
            max_step_rows=rows,
            prefill_gap_seconds=args.prefill_gap_seconds,
            prefix_cache=args.prefix_cache,
            block_size=args.block_size,
            max_model_len=args.max_model_len,
            max_queued=args.max_queued,
            max_queued_tokens=args.max_queued_tokens,
            width_multiple=args.width_multiple,
        )
        for sequences, blocks, rows in swept
    ]


def _about(loads: list[tuple[str, Load]]) -> str:
    return loads[0][1].describe() if len(loads) == 1 else f"{len(loads[0][1].asks):,} requests of each load"


def _save_warm_list(args: argparse.Namespace, runs: list[Run]) -> None:
    from nanoserve.warmup.warm_list import save_warm_list  # the package it lies in needs torch

    if len(runs) > 1:
        raise ConfigError(f"--save-warm-list takes one deployment; the flags name {len(runs)}; choose one")
    try:
        save_warm_list(args.save_warm_list, warm_list(runs[0].result))
    except OSError as error:
        raise ConfigError(
            f"--save-warm-list: {args.save_warm_list} cannot be written: {error.strerror}; name another file"
        ) from error


def _speed(runs: list[Run], wall: float) -> str:
    requests, seconds = sum(len(run.result.finished) for run in runs), sum(run.result.seconds for run in runs)
    return f"{requests:,} requests over {seconds:,.0f} s in {wall:,.1f} s ({requests / wall:,.0f} a second)"
