"""What a simulation counted, and what follows from it: percentiles, shapes, and which of them to warm."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanoserve.buckets import GraphKey
from nanoserve.simulate.forms import StepKind

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
MOST_SPANS = 512


class Gaps:
    """Seconds between tokens, each with how often it occurred: the rows of a step mostly share one."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._counts = array("q")

    def add(self, seconds: float, count: int) -> None:
        self._seconds.append(seconds)
        self._counts.append(count)

    def __len__(self) -> int:
        return sum(self._counts)

    def percentiles(self) -> dict[str, float | None]:
        """Nearest rank, so every figure occurred; None without any."""
        return percentiles(self._seconds, self._counts)


def percentiles(values: Iterable[float], counts: Iterable[int] | None = None) -> dict[str, float | None]:
    """p50, p90, p99 and max of `values`, each of which occurred `counts` times (once, where that is None)."""
    taken = list(values)
    pairs = sorted(zip(taken, counts if counts is not None else [1] * len(taken), strict=True))
    total = sum(count for _, count in pairs)
    found: dict[str, float | None] = dict.fromkeys(SHARES)
    seen = 0
    ranks = [(name, max(1, math.ceil(share * total))) for name, share in SHARES.items()] if total else []
    for value, count in pairs:
        seen += count
        while ranks and ranks[0][1] <= seen:
            found[ranks.pop(0)[0]] = value
    return found


@dataclass(slots=True)
class Span:
    """One bin of a timeline: sequences times seconds, and the most blocks in use."""

    running_seconds: float = 0.0
    waiting_seconds: float = 0.0
    most_blocks: int = 0

    def add(self, seconds: float, running: int, waiting: int, used_blocks: int) -> None:
        self.running_seconds += running * seconds
        self.waiting_seconds += waiting * seconds
        self.most_blocks = max(self.most_blocks, used_blocks)

    def merged(self, other: Span) -> Span:
        return Span(
            self.running_seconds + other.running_seconds,
            self.waiting_seconds + other.waiting_seconds,
            max(self.most_blocks, other.most_blocks),
        )


class Timeline:
    """Sequences and blocks over time in at most MOST_SPANS bins of `span_seconds`, which doubles as time goes on."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.span_seconds = 1e-3

    def add(self, start: float, stop: float, running: int, waiting: int, used_blocks: int) -> None:
        """What held from `start` to `stop`, in seconds from the first arrival."""
        while stop > MOST_SPANS * self.span_seconds:
            pairs = zip(self.spans[::2], [*self.spans[1::2], Span()], strict=False)
            self.spans = [even.merged(odd) for even, odd in pairs]
            self.span_seconds *= 2
        width = self.span_seconds
        first, last = int(start / width), min(int(stop / width), MOST_SPANS - 1)
        while len(self.spans) <= last:
            self.spans.append(Span())
        for index in range(first, last + 1):
            seconds = min(stop, (index + 1) * width) - max(start, index * width)
            self.spans[index].add(max(0.0, seconds), running, waiting, used_blocks)


@dataclass(slots=True)
class Tally:
    """Steps of one kind in one bucket."""

    steps: int = 0
    real_rows: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Result:
    """One run. Seconds are the simulation's.

    finished     indices of the requests that ended, in order
    never_fit    requests longer than the context or the whole pool; refused: the queue was full
    prompt_tokens  of requests whose answer began; prefilled_tokens: computed of prompts, or again after a preemption
    cached_tokens  prompt tokens that the prefix cache had when their sequence was first admitted
    recomputed_tokens  prompt and generated tokens computed again after a preemption, the cache having lost them
    tallies      by (kind, rows, width) of the bucket; `shapes` counts steps by the graphs they replay
    """

    blocks: int
    block_size: int
    started: float = 0.0
    ended: float = 0.0
    busy_seconds: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    never_fit: int = 0
    refused: int = 0
    finished: list[int] = field(default_factory=list)
    ttfts: array[float] = field(default_factory=lambda: array("d"))
    gaps: Gaps = field(default_factory=Gaps)
    timeline: Timeline = field(default_factory=Timeline)
    tallies: dict[tuple[StepKind, int, int | None], Tally] = field(default_factory=dict)
    shapes: dict[tuple[GraphKey, ...], int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(self.ended - self.started, 0.0)

    @property
    def steps(self) -> int:
        return sum(tally.steps for tally in self.tallies.values())

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def most_blocks(self) -> int:
        """Most blocks in use at once."""
        return max((span.most_blocks for span in self.timeline.spans), default=0)

    def add_step(self, kind: StepKind, keys: tuple[GraphKey, ...], rows: int, real_rows: int, seconds: float) -> None:
        width = keys[0].width if keys else None
        tally = self.tallies.get((kind, rows, width))
        if tally is None:
            tally = self.tallies[kind, rows, width] = Tally()
        tally.steps += 1
        tally.real_rows += real_rows
        tally.seconds += seconds
        if keys:
            self.shapes[keys] = self.shapes.get(keys, 0) + 1


@dataclass(frozen=True, slots=True)
class Advice:
    """One graph of a warm list. `share` of the steps replay it; `covered` of them replay only graphs from the top of
    the list to this one."""

    key: GraphKey
    steps: int
    share: float
    covered: float


def advise(shapes: dict[tuple[GraphKey, ...], int]) -> list[Advice]:
    """The graphs that steps replayed, in the order in which recording them covers most steps soonest.

    A step is covered when all its graphs are recorded, so the next to record are those that complete the shape with the
    most steps for each graph it still lacks.
    """
    total = sum(shapes.values())
    uses: dict[GraphKey, int] = {}
    for keys, steps in shapes.items():
        for key in keys:
            uses[key] = uses.get(key, 0) + steps
    warmed: set[GraphKey] = set()
    advice: list[Advice] = []
    open_shapes = dict(shapes)
    while open_shapes:
        best = max(
            open_shapes,
            key=lambda keys: (open_shapes[keys] / len([k for k in keys if k not in warmed]), [-k.rows for k in keys]),
        )
        for key in sorted((k for k in best if k not in warmed), key=lambda k: -uses[k]):
            warmed.add(key)
            open_shapes = {keys: steps for keys, steps in open_shapes.items() if not warmed.issuperset(keys)}
            covered = 1 - sum(open_shapes.values()) / total
            advice.append(Advice(key, uses[key], uses[key] / total, covered))
    return advice
