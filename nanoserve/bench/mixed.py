"""`nanoserve bench mixed`: streams decode, then a long prompt comes. What that does to the gaps between their tokens,
and how much longer the prompt takes than alone. On the engine and the scheduler that would serve, without a network.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from statistics import median
from time import perf_counter

from nanoserve import __version__
from nanoserve.bench.client import settled_heap
from nanoserve.bench.flags import check_flags
from nanoserve.bench.tables import Column, Record, Table, milliseconds, publish
from nanoserve.build import Prepared, prepare
from nanoserve.config import EngineConfig
from nanoserve.errors import ConfigError
from nanoserve.metrics import Metrics
from nanoserve.request import SamplingParams
from nanoserve.sequence import Sequence

QUIET_STEPS = 100
"""Steps of the streams alone before the prompt comes."""


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt beside the streams and one alone. `quiet` and `shared` are the seconds of the steps before the prompt
    came and of those it took part in; `rows` the prompt rows of each of the latter."""

    quiet: tuple[float, ...]
    shared: tuple[float, ...]
    rows: tuple[int, ...]
    alone: float

    def record(self) -> Record:
        quiet, ttft = median(self.quiet), sum(self.shared)
        # What the streams' own tokens cost meanwhile is no delay of the scheduler's making.
        counted = self.alone + quiet * len(self.shared)
        return {
            "quiet_p50_seconds": quiet,
            "quiet_p99_seconds": percentile(self.quiet, 0.99),
            "gap_p50_seconds": median(self.shared),
            "gap_p99_seconds": percentile(self.shared, 0.99),
            "gap_max_seconds": max(self.shared),
            "prompt_rows": median(self.rows),
            "ttft_alone_seconds": self.alone,
            "ttft_seconds": ttft,
            "ttft_ratio": ttft / self.alone,
            "ttft_counted_ratio": ttft / counted,
        }


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    config = EngineConfig(
        model=args.model,
        kernels=args.kernels,
        threads=args.threads,
        max_sequences=args.streams + 1,
        max_step_rows=args.max_step_rows,
        prefill_gap_seconds=args.prefill_gap_seconds,
        warmup_seconds=0.0,
    )
    prepared = prepare(config, Metrics(__version__), lambda progress: None)
    limit = prepared.pool.max_model_len
    longest = max(args.prompt_tokens, args.stream_tokens + QUIET_STEPS + args.prompt_tokens)
    if longest > limit:
        raise ConfigError(
            f"streams and prompt need up to {longest:,} tokens of context each; {args.model} serves {limit:,}; "
            "lower --prompt-tokens or --stream-tokens"
        )
    with settled_heap():
        measure(prepared, args, 0, prompt_tokens=min(args.prompt_tokens, 2 * prepared.choices.config.step_rows))
        rounds = [measure(prepared, args, number, args.prompt_tokens) for number in range(1, args.repeats + 1)]
    about = (
        f"{args.streams} streams of {args.stream_tokens} tokens, then a prompt of {args.prompt_tokens:,}; "
        f"{args.prefill_gap_seconds:g} s of prompt in a step, or as long as its decoding takes"
    )
    heading = f"{args.model} on {prepared.choices.kernels} kernels"
    table = _table([each.record() for each in rounds], about)
    publish("mixed", heading, [table], {"model": args.model}, csv_folder=args.csv, picture=None)
    return 0


def measure(prepared: Prepared, args: argparse.Namespace, number: int, prompt_tokens: int) -> Round:
    """One round; the first, which records what is missing, is not to be counted."""
    engine, seeds = prepared.engine, count(number * (args.streams + 2))
    streams = [_sequence(prepared, args.stream_tokens, next(seeds)) for _ in range(args.streams)]
    for stream in streams:
        engine.add(stream)
    while any(not stream.generated for stream in streams):
        engine.step()
    quiet = [_timed_step(prepared)[0] for _ in range(QUIET_STEPS)]
    beside = list(_prefill(prepared, _sequence(prepared, prompt_tokens, next(seeds))))
    for stream in streams:
        engine.finish(stream, "cancelled")
    alone = list(_prefill(prepared, _sequence(prepared, prompt_tokens, next(seeds))))
    return Round(
        quiet=tuple(quiet),
        shared=tuple(seconds for seconds, _ in beside),
        rows=tuple(rows for _, rows in beside),
        alone=sum(seconds for seconds, _ in alone),
    )


def _prefill(prepared: Prepared, prompt: Sequence) -> Iterator[tuple[float, int]]:
    """The steps until the prompt has its first token: (seconds, prompt rows)."""
    prepared.engine.add(prompt)
    while not prompt.generated:
        yield _timed_step(prepared)
    prepared.engine.finish(prompt, "cancelled")


def _timed_step(prepared: Prepared) -> tuple[float, int]:
    engine, started = prepared.engine, perf_counter()
    plan = engine.plan()
    assert plan is not None, "a measurement without work"
    engine.commit(plan, engine.launch(plan))
    return perf_counter() - started, plan.prefill_tokens


def _sequence(prepared: Prepared, tokens: int, seed: int) -> Sequence:
    """A prompt like no other, so that no cache of prompts answers it; greedy, to the end of the context."""
    vocabulary = prepared.model.vocab_size
    return Sequence(
        request_id=f"bench-{seed}",
        choice=0,
        prompt_ids=[(seed * 7919 + position * 31 + 1) % vocabulary for position in range(tokens)],
        params=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=prepared.pool.max_model_len - tokens,
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset(),
        block_size=prepared.pool.block_size,
    )


def percentile(values: tuple[float, ...], share: float) -> float:
    """Nearest rank: a value that occurred."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _table(records: list[Record], about: str) -> Table:
    def ratio(value: float) -> str:
        return f"{value:.2f}"

    columns = (
        Column("quiet_p50_seconds", "gap before p50", milliseconds),
        Column("quiet_p99_seconds", "p99", milliseconds),
        Column("gap_p50_seconds", "with the prompt p50", milliseconds),
        Column("gap_p99_seconds", "p99", milliseconds),
        Column("gap_max_seconds", "max", milliseconds),
        Column("prompt_rows", "rows of it"),
        Column("ttft_alone_seconds", "its first token alone", milliseconds),
        Column("ttft_seconds", "beside the streams", milliseconds),
        Column("ttft_ratio", "ratio", ratio),
        Column("ttft_counted_ratio", "streams counted", ratio),
    )
    return Table("rounds", "Gaps", about, columns, records)
