"""Admission: whether the line takes another request, and when to come back if it does not. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from nanoserve.errors import InvalidRequest, QueueFull
from nanoserve.metrics import Metrics
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """max_queued               sequences that may wait beside those for which a table row is free
    max_queued_tokens        prompt tokens that may wait; None: any. Where nobody waits, any request is taken
    request_timeout_seconds  of requests that name none; None: no limit
    """

    max_queued: int = 1024
    max_queued_tokens: int | None = None
    request_timeout_seconds: float | None = None


class Admission:
    """Applies the limits to what waits now, `coming` sequences included: those of prompts that are still being read."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self.coming = 0

    def check(self, scheduler: Scheduler, sequences: SequenceOf[Sequence]) -> None:
        """Raises QueueFull, or InvalidRequest if no wait would ever make room for so many choices."""
        self._check_choices(scheduler, len(sequences))
        self._check_sequences(scheduler, len(sequences))
        self._check_tokens(scheduler, sum(sequence.target for sequence in sequences))

    def check_coming(self, scheduler: Scheduler, choices: int) -> None:
        """The same for a request whose prompt is still to be read, so that no number of them piles up unread."""
        self._check_choices(scheduler, choices)
        self._check_sequences(scheduler, choices)

    def _check_choices(self, scheduler: Scheduler, choices: int) -> None:
        limit = self._limits.max_queued
        if choices > limit + scheduler.max_sequences:
            raise InvalidRequest(
                f"n is {choices}; {scheduler.max_sequences} sequences run at once and the queue holds {limit}; lower n "
                "or raise --max-queued",
                param="n",
            )

    def _check_sequences(self, scheduler: Scheduler, adding: int) -> None:
        limit = self._limits.max_queued
        waiting = scheduler.waiting + self.coming
        excess = waiting + adding - scheduler.free_rows - limit
        if excess > 0:
            raise QueueFull(
                f"{waiting} sequences wait and this request adds {adding}; the limit is {limit}; try again later or "
                "raise --max-queued",
                retry_after_seconds=self._metrics.starts.seconds_for(sequences=excess),
            )

    def _check_tokens(self, scheduler: Scheduler, adding: int) -> None:
        limit, waiting = self._limits.max_queued_tokens, scheduler.waiting_tokens
        if limit is not None and waiting and waiting + adding > limit:
            raise QueueFull(
                f"{waiting:,} prompt tokens wait and this request adds {adding:,}; the limit is {limit:,}; try again "
                "later or raise --max-queued-tokens",
                retry_after_seconds=self._metrics.starts.seconds_for(tokens=min(waiting, waiting + adding - limit)),
            )
