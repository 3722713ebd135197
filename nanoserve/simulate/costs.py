"""What a step costs: seconds as a function of its rows, its logit rows and the context they read.

    step  =  host_step + host_row * tokens chosen                the event loop's part that no step hides, first
           + host_request * first tokens among them
           + (1 + host_share) * sum over forwards:
                                 body(rows) + head(logit rows)                       curves through measured sizes
                                 + decode_context * positions the decode rows read
                                 + chunk_context  * positions the prompt rows read

    and all of it times a ratio drawn from `scatter`: a machine has more to do than this

Linear in what is unknown, so that it can be fitted (`fit`), and few enough numbers to be written by hand.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanoserve.errors import ConfigError

FORMAT = 1
Read = Literal["paged", "rectangle"]
READS: tuple[Read, ...] = ("paged", "rectangle")


class Work(NamedTuple):
    """What one forward computes: rows of the body, rows of the head, and context positions read by the decode rows and
    by the rows of prompt chunks (for each row, itself included)."""

    rows: int
    logit_rows: int
    decode_context: int
    chunk_context: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a number of rows: straight between `knots` (rows, seconds), the first one's seconds below it, the
    last stretch's slope beyond the last. No knots is no cost; nor have 0 rows any."""

    knots: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if any(after[0] <= before[0] for before, after in pairwise(self.knots)):
            raise ValueError("the rows of a cost curve do not ascend")
        if any(rows < 1 or not (isfinite(seconds) and seconds >= 0) for rows, seconds in self.knots):
            raise ValueError("a cost curve needs rows of at least 1 and seconds of at least 0")

    def at(self, rows: int) -> float:
        knots = self.knots
        if not knots or rows <= 0:
            return 0.0
        if len(knots) == 1 or rows <= knots[0][0]:
            return knots[0][1]
        index = min(bisect_left(knots, (rows,)), len(knots) - 1)
        (low, low_seconds), (high, high_seconds) = knots[index - 1], knots[index]
        return max(0.0, low_seconds + (high_seconds - low_seconds) * (rows - low) / (high - low))


class Scatter(NamedTuple):
    """How steps that take up to `seconds` scatter: quantiles, evenly spaced from the least to the most, of their time
    over the median of their like."""

    seconds: float
    ratios: tuple[float, ...]

    def at(self, chance: float) -> float:
        """The ratio below which a share `chance` (0 to 1) of these steps stays."""
        place = chance * (len(self.ratios) - 1)
        low = min(int(place), max(0, len(self.ratios) - 2))
        high = min(low + 1, len(self.ratios) - 1)
        return self.ratios[low] + (self.ratios[high] - self.ratios[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Costs:
    """A machine and a model as numbers. All seconds.

    read            the attention read they were measured on
    pads_compute    whether pad rows cost what real ones do (graphs of fixed shapes), or nothing (the native kernels)
    decode_context  for each context position that a decode row reads; chunk_context the same for a prompt's row
    host_step       of the event loop for each step: planning, filling, waking up. What is done beside a step counts as
                    far as it makes that one longer
    host_row        likewise for each token chosen: bookkeeping, text, its reader
    host_request    likewise for each first token: its request is read, begun and, some day, ended
    host_share      by what share of itself a forward takes longer while the event loop works beside it
    scatter         of short steps first; the last one is that of all longer steps too, since what delays a step by as
                    much delays a short one by more of itself. None: steps that are alike take alike
    measured        where they come from, as text for people
    """

    read: Read
    pads_compute: bool
    body: Curve
    head: Curve
    decode_context: float
    chunk_context: float
    host_step: float = 0.0
    host_row: float = 0.0
    host_request: float = 0.0
    host_share: float = 0.0
    scatter: tuple[Scatter, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("decode_context", "chunk_context", "host_step", "host_row", "host_request", "host_share"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a number, at least 0")
        if any(after.seconds <= before.seconds for before, after in pairwise(self.scatter)):
            raise ValueError("the seconds of scatter do not ascend")
        for each in self.scatter:
            if not each.ratios or any(not (isfinite(ratio) and ratio > 0) for ratio in each.ratios):
                raise ValueError("scatter is ratios above 0")

    @property
    def plans_ahead(self) -> bool:
        """Whether steps run beside the event loop, which then plans ahead: those of the native kernels."""
        return self.read == "paged" and not self.pads_compute

    def compute_seconds(self, work: Work) -> float:
        """One forward, without the event loop's part."""
        return (
            self.body.at(work.rows)
            + self.head.at(work.logit_rows)
            + self.decode_context * work.decode_context
            + self.chunk_context * work.chunk_context
        )

    def host_seconds(self, tokens: float, requests: float) -> float:
        """What the event loop puts before a step that chooses `tokens` tokens, `requests` of them first ones."""
        return self.host_step + self.host_row * tokens + self.host_request * requests

    def alone_seconds(self, works: Sequence[Work]) -> float:
        """The forwards of a step, without the event loop's part."""
        return sum([self.compute_seconds(work) for work in works])

    def served_seconds(self, tokens: float, requests: float, alone: float) -> float:
        """A step that chooses `tokens` tokens, `requests` of them first ones, whose forwards take `alone` seconds."""
        return self.host_seconds(tokens, requests) + (1 + self.host_share) * alone

    def scattered(self, seconds: float, chance: float) -> float:
        """What a step takes that should take `seconds`, where a share `chance` of its like takes less."""
        if not self.scatter:
            return seconds
        fitting = next((each for each in self.scatter if seconds <= each.seconds), self.scatter[-1])
        return seconds * fitting.at(chance)

    def describe(self) -> str:
        named = ", ".join(f"{value}" for value in self.measured.values() if isinstance(value, str))
        return named or "costs given by hand"


def costs_by_hand(text: str, read: Read) -> Costs:
    """`BASE,ROW,CONTEXT` in milliseconds: of a forward, of each of its rows, of each context position a row reads.

    Raises ConfigError for anything else.
    """
    try:
        base, row, context = (float(part) / 1e3 for part in text.split(","))
        if not all(isfinite(value) and value >= 0 for value in (base, row, context)) or base + row <= 0:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--step-ms {text!r} is not three numbers of milliseconds; write BASE,ROW,CONTEXT, such as 3,0.7,0.001"
        ) from None
    body = Curve(((1, base + row), (2, base + 2 * row)))
    return Costs(read, read == "rectangle", body, Curve(), context, context)


# --- the file ------------------------------------------------------------------------------------------------------


def save_costs(path: Path, costs: Costs) -> None:
    """Raises ConfigError if it cannot be written."""
    document = {"format": FORMAT, **asdict(costs), "body": costs.body.knots, "head": costs.head.knots}
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--costs {path} cannot be written: {error.strerror}; name another file") from error


def load_costs(path: Path) -> Costs:
    """Raises ConfigError, naming the file and what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"--costs {path}: there is no such file; measure one with nanoserve simulate --calibrate --costs {path}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--costs {path} cannot be read: {error}") from error
    try:
        return _parse(document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--costs {path} is no cost file ({error!r}); measure one with nanoserve simulate --calibrate"
        ) from error


def _parse(document: Mapping[str, Any]) -> Costs:
    fields = dict(document)
    if (version := fields.pop("format")) != FORMAT:
        raise ValueError(f"format {version}, {FORMAT} is supported")
    if fields["read"] not in READS or not isinstance(fields["pads_compute"], bool):
        raise ValueError("read is paged or rectangle, pads_compute is true or false")
    body, head = _curve(fields.pop("body")), _curve(fields.pop("head"))
    if not body.knots:
        raise ValueError("the body has no cost")
    scatter = tuple(
        Scatter(float(seconds), tuple(float(ratio) for ratio in ratios))
        for seconds, ratios in fields.pop("scatter", ())
    )
    return Costs(body=body, head=head, scatter=scatter, **fields)


def _curve(knots: Sequence[Sequence[float]]) -> Curve:
    if any(type(rows) is not int for rows, _ in knots):
        raise ValueError("rows are whole numbers")
    return Curve(tuple((int(rows), float(seconds)) for rows, seconds in knots))
