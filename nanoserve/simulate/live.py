"""A load on the real AsyncEngine, in real time and in this process; and how far a simulation of it was off.

Real time waits for nobody: measure on an otherwise idle machine."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from nanoserve import __version__
from nanoserve.admission import Limits
from nanoserve.async_engine import AsyncEngine
from nanoserve.bench.tables import Column, Record, Table
from nanoserve.boot import Boot, Booted, Report
from nanoserve.build import build_engine
from nanoserve.config import EngineConfig
from nanoserve.errors import ClientError, ConfigError, StartupError, Unavailable
from nanoserve.metrics import Metrics
from nanoserve.models.config import load_config
from nanoserve.request import Request, SamplingParams, TokenPrompt
from nanoserve.simulate.costs import Read
from nanoserve.simulate.report import Run
from nanoserve.simulate.result import percentiles
from nanoserve.simulate.simulator import FIRST
from nanoserve.simulate.trace import Ask, Load
from nanoserve.source import resolve

FIRST_TOKEN = 100
"""Token ids below it may be special ones."""
POLL_SECONDS = 0.01


@dataclass(slots=True)
class Measured:
    """What clients saw, from the first arrival. A gap lies between two deltas; the first token's time is the engine's
    own."""

    started: float = 0.0
    ended: float = 0.0
    output_tokens: int = 0
    refused: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / (self.ended - self.started)


def serve_live(boot: Boot, metrics: Metrics, load: Load, *, vocab_size: int, limits: Limits | None = None) -> Measured:
    """Boot an engine, serve FIRST, which does not count, then `load` to its end. Raises StartupError."""
    return asyncio.run(_serve(boot, metrics, load, vocab_size, limits))


async def _serve(boot: Boot, metrics: Metrics, load: Load, vocab_size: int, limits: Limits | None) -> Measured:
    engine = AsyncEngine(boot, metrics, model_names=("model",), version=__version__, limits=limits)
    async with engine:
        while (status := engine.snapshot().health["status"]) not in ("ready", "degraded"):
            if status == "failed":
                raise StartupError(str(engine.snapshot().health.get("message", "the engine did not start")))
            await asyncio.sleep(POLL_SECONDS)
        client = _Client(engine, load, vocab_size)
        await client.ask(Measured(), FIRST, "first")
        done = Measured(started=perf_counter())
        async with asyncio.TaskGroup() as group:
            for seconds, index in load.opening():
                group.create_task(client.chain(done, seconds, index))
        done.started += min(seconds for seconds, _ in load.opening())
        return done


class _Client:
    def __init__(self, engine: AsyncEngine, load: Load, vocab_size: int) -> None:
        self._engine = engine
        self._load = load
        self._vocab_size = vocab_size

    async def chain(self, done: Measured, seconds: float, index: int) -> None:
        """A request, and those that its end brings about, one after the other."""
        following: tuple[float, int] | None = (seconds, index)
        while following is not None:
            await asyncio.sleep(max(0.0, done.started + following[0] - perf_counter()))
            index = following[1]
            await self.ask(done, self._load.asks[index], str(index))
            following = self._load.after(index, perf_counter() - done.started)

    async def ask(self, done: Measured, ask: Ask, name: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True)
        request = Request(name, TokenPrompt(self._prompt(ask, name)), params, priority=ask.priority)
        try:
            stream = await self._engine.submit(request)
        except (ClientError, Unavailable):
            done.refused += 1
            return
        last = None
        async for delta in stream:
            now = perf_counter()
            if last is not None:
                done.gaps.append(now - last)
            last = now
            if delta.finished is not None:
                done.output_tokens += delta.finished.usage.completion_tokens
                done.ended = now
                if delta.finished.timings.ttft_seconds is not None:
                    done.ttfts.append(delta.finished.timings.ttft_seconds)

    def _prompt(self, ask: Ask, name: str) -> tuple[int, ...]:
        shared = self._ids(f"prefix {ask.prefix_id}", ask.prefix_tokens)
        return (*shared, *self._ids(f"prompt {name}", ask.prompt_tokens - ask.prefix_tokens))

    def _ids(self, name: str, count: int) -> list[int]:
        low = min(FIRST_TOKEN, self._vocab_size - 1)
        return random.Random(name).choices(range(low, self._vocab_size), k=count)


# --- validation ----------------------------------------------------------------------------------------------------

FIGURES: tuple[tuple[str, str, Callable[[Measured], float | None]], ...] = (
    ("tokens_per_second", "tokens/s", lambda done: done.tokens_per_second),
    ("ttft_p50_seconds", "first token p50", lambda done: percentiles(done.ttfts)["p50"]),
    ("gap_p50_seconds", "gap p50", lambda done: percentiles(done.gaps)["p50"]),
    ("gap_p99_seconds", "gap p99", lambda done: percentiles(done.gaps)["p99"]),
)


def validate(args: argparse.Namespace, read: Read, pairs: list[tuple[Run, Load]]) -> Table:
    """Serve each load on a real engine of the same sizes; simulated beside measured."""
    records: list[Record] = []
    for run, load in pairs:
        done = _live_run(args, read, run, load)
        simulated = run.record()
        for key, figure, measure in FIGURES:
            records.append(_compare(run, figure, simulated[key], measure(done)))
    columns = (
        Column("load", "load"),
        Column("max_sequences", "sequences"),
        Column("kv_blocks", "blocks"),
        Column("figure", "figure"),
        Column("simulated", "simulated", _number),
        Column("measured", "measured", _number),
        Column("error", "off by", lambda value: f"{value:+.1%}"),
    )
    about = f"{args.model} in this process, in real time; tokens/s and milliseconds"
    return Table("validation", "Simulated beside measured", about, columns, records)


def _compare(run: Run, figure: str, simulated: float | None, measured: float | None) -> Record:
    scale = 1.0 if figure == "tokens/s" else 1e3
    comparable = simulated is not None and measured
    return {
        "load": run.load,
        "max_sequences": run.sizes.max_sequences,
        "kv_blocks": run.result.blocks,
        "figure": figure,
        "simulated": None if simulated is None else simulated * scale,
        "measured": None if measured is None else measured * scale,
        "error": simulated / measured - 1 if comparable and simulated is not None and measured else None,
    }


def _number(value: float) -> str:
    return f"{value:,.1f}"


def _live_run(args: argparse.Namespace, read: Read, run: Run, load: Load) -> Measured:
    model = load_config(resolve(args.model))
    sizes = run.sizes
    token_bytes = model.kv_bytes_per_token(4 if args.kernels == "reference" else 2)
    config = EngineConfig(
        model=args.model,
        kernels=args.kernels,
        threads=args.threads,
        attention_read=read,
        max_model_len=sizes.longest(load),
        max_sequences=sizes.max_sequences,
        block_size=sizes.block_size,
        max_step_rows=sizes.step_rows,
        prefill_gap_seconds=sizes.prefill_gap_seconds,
        prefix_cache=sizes.prefix_cache,
        width_multiple=sizes.width_multiple,
        kv_memory_bytes=(run.result.blocks + 1) * sizes.block_size * token_bytes,
    )
    metrics = Metrics(__version__)

    def boot(report: Report) -> Booted:
        return build_engine(config, metrics, report, bar=False)

    print(f"serving {load.describe()} on {args.model} …", file=sys.stderr)
    done = serve_live(boot, metrics, load, vocab_size=model.vocab_size, limits=sizes.limits)
    if not done.output_tokens:
        raise ConfigError("the engine answered no request of the load; raise --max-queued or shorten the requests")
    return done
