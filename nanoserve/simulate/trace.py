"""Arrivals: who asks for what, when. Made from a seed, or read from a recorded trace of JSON lines. No clock.

A line of a trace is an object: `arrival_seconds`, `prompt_tokens`, `output_tokens` and, where prompts begin alike,
`prefix_id` (text) with `prefix_tokens`; `priority`, the lower the sooner, is 0 where it is not given. Other keys are
left alone, so that a recorder may write more than is needed.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from nanoserve.errors import ConfigError

MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `prefix_tokens` of its prompt are shared with every request of the same `prefix_id`; the lower its
    `priority`, the sooner it is served."""

    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    prefix_id: str | None = None
    prefix_tokens: int = 0
    priority: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Load(Protocol):
    """Where requests come from while a simulation runs."""

    @property
    def asks(self) -> Sequence[Ask]:
        """Every request there will be."""

    def opening(self) -> list[tuple[float, int]]:
        """(seconds, index into `asks`) of the arrivals that depend on nothing."""

    def after(self, index: int, now: float) -> tuple[float, int] | None:
        """The arrival that the end of `asks[index]` brings about."""

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests arrive when the trace says, whatever the server does."""

    asks: Sequence[Ask]
    source: str

    def opening(self) -> list[tuple[float, int]]:
        return [(ask.arrival_seconds, index) for index, ask in enumerate(self.asks)]

    def after(self, index: int, now: float) -> None:
        return None

    def describe(self) -> str:
        return f"{len(self.asks):,} requests, {self.source}"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`streams` clients, each sending its next request when its last one has ended. Stream s sends s, s + streams, …"""

    asks: Sequence[Ask]
    streams: int

    def opening(self) -> list[tuple[float, int]]:
        return [(0.0, index) for index in range(min(self.streams, len(self.asks)))]

    def after(self, index: int, now: float) -> tuple[float, int] | None:
        following = index + self.streams
        return (now, following) if following < len(self.asks) else None

    def describe(self) -> str:
        return f"{len(self.asks):,} requests from {self.streams:,} streams"


# --- synthetic -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers of tokens, at least 1.

    fixed      N
    uniform    uniform:LOW:HIGH, both included
    lognormal  lognormal:MEDIAN:SIGMA[:MOST]; SIGMA is of the logarithm, and draws above MOST become MOST
    """

    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        values = tuple(float(number) for number in numbers)
        if not all(math.isfinite(value) for value in values):
            raise ValueError(f"{text!r} is not finite")
        tokens = values if kind != "lognormal" else values[:1] + values[2:]
        counts = {"fixed": (1,), "uniform": (2,), "lognormal": (2, 3)}
        if len(values) not in counts.get(kind, ()) or not all(1 <= value <= MOST_TOKENS for value in tokens):
            raise ValueError(f"{text!r} is no distribution of lengths")
        if any(value != int(value) for value in tokens) or list(tokens) != sorted(tokens) or min(values) < 0:
            raise ValueError(f"{text!r} is no distribution of lengths")
        return cls(kind, values)

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.numbers[0])
        if self.kind == "uniform":
            return rng.randint(int(self.numbers[0]), int(self.numbers[1]))
        median, sigma, *most = self.numbers
        drawn = math.exp(rng.gauss(math.log(median), sigma))
        return max(1, round(min(drawn, most[0] if most else MOST_TOKENS)))


@dataclass(frozen=True, slots=True)
class Mix:
    """What synthetic requests are like. `prefix_share` of them begin with the same `prefix_tokens` tokens, and are
    that much longer than `prompt_tokens` says."""

    requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    prefix_tokens: int = 0
    prefix_share: float = 1.0
    seed: int = 0

    def asks(self) -> list[Ask]:
        """All at second 0; the same for the same seed."""
        rng = random.Random(f"asks {self.seed}")
        return [self._ask(rng) for _ in range(self.requests)]

    def _ask(self, rng: random.Random) -> Ask:
        prompt, output = self.prompt_tokens.draw(rng), self.output_tokens.draw(rng)
        shares = self.prefix_tokens > 0 and rng.random() < self.prefix_share
        if not shares:
            return Ask(0.0, prompt, output)
        return Ask(0.0, self.prefix_tokens + prompt, output, "shared", self.prefix_tokens)

    def poisson(self, rate: float) -> OpenLoop:
        """Arrivals with exponentially distributed gaps, `rate` a second in the long run, the first after one gap."""
        rng, now, asks = random.Random(f"arrivals {self.seed}"), 0.0, []
        for ask in self.asks():
            now += rng.expovariate(rate)
            asks.append(replace(ask, arrival_seconds=now))
        return OpenLoop(asks, f"{rate:g} a second (Poisson)")

    def closed(self, streams: int) -> ClosedLoop:
        return ClosedLoop(self.asks(), streams)


# --- recorded ------------------------------------------------------------------------------------------------------


def load_trace(path: Path) -> OpenLoop:
    """Requests in order of arrival. Raises ConfigError with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error
    asks: list[Ask] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            asks.append(_ask(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(f"--trace {path}, line {number} is no request: {reason}") from error
    if not asks:
        raise ConfigError(f"--trace {path} holds no requests; record one or make one with --save-trace")
    return OpenLoop(sorted(asks, key=lambda ask: ask.arrival_seconds), f"recorded in {path.name}")


def save_trace(path: Path, asks: Iterable[Ask]) -> None:
    """Raises ConfigError if it cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as file:
            for ask in asks:
                file.write(json.dumps(_line(ask)) + "\n")
    except OSError as error:
        raise ConfigError(f"--save-trace: {path} cannot be written: {error.strerror}; name another file") from error


def _ask(line: dict[str, Any]) -> Ask:
    arrival = line["arrival_seconds"]
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival < math.inf:
        raise ValueError(f"arrival_seconds is {arrival!r}; it must be a number, at least 0")
    prefix_id = line.get("prefix_id")
    prefix = _tokens(line, "prefix_tokens", 0) if prefix_id is not None else 0
    prompt = _tokens(line, "prompt_tokens", 1)
    if prefix > prompt:
        raise ValueError(f"prefix_tokens is {prefix:,}, more than the {prompt:,} prompt_tokens")
    output = _tokens(line, "output_tokens", 1)
    if type(priority := line.get("priority", 0)) is not int:
        raise ValueError(f"priority is {priority!r}; it must be a whole number, the lower the sooner")
    return Ask(float(arrival), prompt, output, None if prefix_id is None else str(prefix_id), prefix, priority)


def _tokens(line: dict[str, Any], key: str, least: int) -> int:
    value = line[key]
    if type(value) is not int or not least <= value <= MOST_TOKENS:
        raise ValueError(f"{key} is {value!r}; it must be a whole number from {least} to {MOST_TOKENS:,}")
    return value


def _line(ask: Ask) -> dict[str, Any]:
    line: dict[str, Any] = {
        "arrival_seconds": ask.arrival_seconds,
        "prompt_tokens": ask.prompt_tokens,
        "output_tokens": ask.output_tokens,
    }
    if ask.prefix_id is not None:
        line |= {"prefix_id": ask.prefix_id, "prefix_tokens": ask.prefix_tokens}
    if ask.priority:
        line["priority"] = ask.priority
    return line
