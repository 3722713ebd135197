"""Every number `/metrics`, `/steps` and the page show: counters, 60-second latency windows and the live feed's tally.

One `Metrics` object is made by the composition root and passed in. It is written only from the event loop (the boot
thread hands its numbers over with the finished engine), so nothing here takes a lock. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

StepKind = Literal["decode", "prefill", "mixed"]
WINDOW_SECONDS = 60.0
WINDOW_SAMPLES = 4096


class Window:
    """The last 60 seconds of one latency, in seconds, at most `WINDOW_SAMPLES` of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=WINDOW_SAMPLES)
        self.count = 0
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self._samples.append((self._clock(), seconds))
        self.count += 1
        self.total += seconds

    def percentiles(self) -> dict[str, float | int | None]:
        """`{p50, p90, p99, count}`; nearest-rank over the window, null when it is empty. `count` is since start."""
        horizon = self._clock() - WINDOW_SECONDS
        while self._samples and self._samples[0][0] < horizon:
            self._samples.popleft()
        values = sorted(value for _, value in self._samples)
        result: dict[str, float | int | None] = {
            f"p{q}": values[-(-len(values) * q // 100) - 1] if values else None for q in (50, 90, 99)
        }
        result["count"] = self.count
        return result


class StartRate:
    """How fast sequences have left the queue lately: the last 60 seconds in slices of one, idle time left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[list[float]] = deque()  # [second, busy seconds, sequences, their tokens]

    def add(self, seconds: float, sequences: int, tokens: int) -> None:
        """A step of `seconds` in which so many sequences left the queue, with so many tokens to compute."""
        second = self._clock() // 1.0
        if not self._slices or self._slices[-1][0] != second:
            self._slices.append([second, 0.0, 0, 0])
        newest = self._slices[-1]
        newest[1], newest[2], newest[3] = newest[1] + seconds, newest[2] + sequences, newest[3] + tokens

    def seconds_for(self, *, sequences: int = 0, tokens: int = 0) -> float:
        """How long until so many sequences, or sequences of so many tokens, have left the queue at that rate.

        If none did, as long again as the steps of the last minute took. At least a second."""
        horizon = self._clock() - WINDOW_SECONDS
        while self._slices and self._slices[0][0] < horizon:
            self._slices.popleft()
        busy, left, left_tokens = (sum(each[index] for each in self._slices) for index in (1, 2, 3))
        return max(1.0, busy * max(sequences / left, tokens / left_tokens) if left else busy)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step was. `rows` is the padded row count; `width` is None where the read has none (paged, prefill).

    `promised` says the step should have replayed a graph (rectangle read: it has a decode part; paged read: always).
    `decode` and `prefill` count tokens: one per decode row, and the prompt tokens computed; `prefill_eager` says that
    those ran without a graph. `started` sequences, with `started_tokens` to compute, took part in their first step.
    """

    kind: StepKind
    rows: int
    width: int | None
    real_rows: int
    pad_rows: int
    hit: bool
    promised: bool
    seconds: float
    decode_tokens: int
    prefill_tokens: int
    prefill_eager: bool = False
    started: int = 0
    started_tokens: int = 0


@dataclass(slots=True)
class ShapeTally:
    count: int = 0
    real_rows: int = 0
    pad_rows: int = 0
    seconds: float = 0.0

    def add(self, step: StepRecord) -> None:
        self.count += 1
        self.real_rows += step.real_rows
        self.pad_rows += step.pad_rows
        self.seconds += step.seconds


@dataclass(slots=True)
class Gauges:
    """State of the moment, refreshed after each step; None while unknown (before the engine is up)."""

    running: int = 0
    waiting: int = 0
    blocks_total: int | None = None
    blocks_used: int | None = None
    block_size: int | None = None


@dataclass(slots=True)
class Counters:
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_cached_tokens: int = 0
    hits: int = 0
    misses: int = 0
    eager_steps: int = 0
    prefill_eager_steps: int = 0


@dataclass(slots=True)
class Latencies:
    ttft_seconds: Window = field(default_factory=Window)
    inter_token_seconds: Window = field(default_factory=Window)
    step_seconds: Window = field(default_factory=Window)
    queue_seconds: Window = field(default_factory=Window)


GRAPH_KEYS = (
    "read",
    "backend",
    "warmed",
    "captured",
    "cold_captures",
    "background_captures",
    "replays",
    "eager_steps",
    "prefill_eager_steps",
    "hit_rate",
    "warmup_seconds",
    "predicted_seconds",
)


class Metrics:
    """The counters of one engine. `graph_stats` and `graph_shapes` are set once the engine's GraphSet exists."""

    def __init__(self, version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._version = version
        self._started = clock()
        self.gauges = Gauges()
        self.counters = Counters()
        self.latency = Latencies(*(Window(clock) for _ in range(4)))
        self.starts = StartRate(clock)
        self.graph_stats: Callable[[], dict[str, Any]] = dict
        self.graph_shapes: Callable[[], list[dict[str, Any]]] = list
        self._steps_total = 0
        self._tally: dict[tuple[StepKind, int, int | None, bool], ShapeTally] = {}
        self._tally_steps = 0
        self._tally_tokens = 0
        self._tally_since = self._started

    def uptime_seconds(self) -> float:
        return self._clock() - self._started

    def record_step(self, step: StepRecord) -> None:
        counters = self.counters
        if step.promised and step.hit:
            counters.hits += 1
        elif step.promised:
            counters.misses += 1
        counters.prefill_eager_steps += step.prefill_eager
        self.latency.step_seconds.add(step.seconds)
        self.starts.add(step.seconds, step.started, step.started_tokens)
        self._steps_total += 1
        self._tally_steps += 1
        self._tally_tokens += step.decode_tokens
        key = (step.kind, step.rows, step.width, step.hit)
        self._tally.setdefault(key, ShapeTally()).add(step)

    def take_steps_event(self) -> dict[str, Any]:
        """The `steps` live event for everything since the last call (CONTRACT: step events), and start a new tally."""
        now = self._clock()
        elapsed = max(now - self._tally_since, 1e-9)
        counters, gauges = self.counters, self.gauges
        event: dict[str, Any] = {
            "first_step": self._steps_total - self._tally_steps,
            "steps": self._tally_steps,
            "hits": counters.hits,
            "misses": counters.misses,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "tokens_per_second": self._tally_tokens / elapsed,
            "blocks_used": gauges.blocks_used,
            "blocks_total": gauges.blocks_total,
            "shapes": [
                {
                    "rows": rows,
                    "width": width,
                    "kind": kind,
                    "hit": hit,
                    "count": tally.count,
                    "real_rows": tally.real_rows,
                    "pad_rows": tally.pad_rows,
                    "seconds": tally.seconds,
                }
                for (kind, rows, width, hit), tally in self._tally.items()
            ],
        }
        self._tally = {}
        self._tally_steps = 0
        self._tally_tokens = 0
        self._tally_since = now
        return event

    @property
    def has_untold_steps(self) -> bool:
        """True if a step ran since the last `steps` event."""
        return self._tally_steps > 0

    @property
    def hit_rate(self) -> float | None:
        total = self.counters.hits + self.counters.misses
        return self.counters.hits / total if total else None

    def snapshot(self) -> dict[str, Any]:
        """The JSON body of `/metrics`: every key always present, None while unknown."""
        counters, gauges = self.counters, self.gauges
        graphs: dict[str, Any] = dict.fromkeys(GRAPH_KEYS)
        graphs.update(self.graph_stats())
        graphs["eager_steps"] = counters.eager_steps
        graphs["prefill_eager_steps"] = counters.prefill_eager_steps
        graphs["hit_rate"] = self.hit_rate
        known = gauges.blocks_total is not None and gauges.blocks_used is not None
        return {
            "uptime_seconds": self.uptime_seconds(),
            "version": self._version,
            "requests": {
                "running": gauges.running,
                "waiting": gauges.waiting,
                "finished_total": counters.finished,
                "aborted_total": counters.aborted,
                "rejected_total": counters.rejected,
                "preempted_total": counters.preempted,
            },
            "tokens": {
                "prompt_total": counters.prompt_tokens,
                "generated_total": counters.generated_tokens,
                "prefix_queried_total": counters.prefix_queried_tokens,
                "prefix_cached_total": counters.prefix_cached_tokens,
            },
            "kv": {
                "blocks_total": gauges.blocks_total,
                "blocks_used": gauges.blocks_used,
                "blocks_free": (gauges.blocks_total or 0) - (gauges.blocks_used or 0) if known else None,
                "block_size": gauges.block_size,
            },
            "graphs": graphs,
            "shapes": self.graph_shapes(),
            "latency": {
                "ttft_seconds": self.latency.ttft_seconds.percentiles(),
                "inter_token_seconds": self.latency.inter_token_seconds.percentiles(),
                "step_seconds": self.latency.step_seconds.percentiles(),
                "queue_seconds": self.latency.queue_seconds.percentiles(),
            },
        }
