"""Relay: what lets one step be written, and the tokens of another be read, while a third program runs.

    waiting numbers --copied--> live numbers --> body, head --> the head's outputs --copied--> one of two places

The copies are programs of the same launch as the step they belong to, so they happen between two steps and never during
one. A step's tokens stay where they were left until the second step after it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from nanoserve.graphs import GraphBackend, GraphKey
from nanoserve.inputs import StepInputs
from nanoserve.step import StepOutput

Replay = Callable[[], Any]


class Relay:
    """`copy(source, target)` records that all bytes of one tensor go to another."""

    def __init__(self, copy: Callable[[Tensor, Tensor], None], backend: GraphBackend, inputs: StepInputs) -> None:
        self._copy = copy
        self._backend = backend
        self._inputs = inputs
        self._arrivals = [backend.record(partial(copy, each.whole, inputs.live.whole)) for each in inputs.waiting]
        self._departures: dict[tuple[GraphKey, int], tuple[Replay, StepOutput]] = {}
        self._place = 0

    @property
    def arrival(self) -> Replay:
        """Moves in the numbers that were written ahead last."""
        return self._arrivals[self._inputs.place]

    def departure(self, key: GraphKey, output: StepOutput) -> tuple[Replay, StepOutput]:
        """What moves out the tokens that the head of `key` leaves in `output`, and where to, which alternates."""
        self._place = 1 - self._place
        found = self._departures.get((key, self._place))
        if found is None:
            moved: list[StepOutput] = []
            replay = self._backend.record(lambda: moved.append(self._move_out(output)))
            found = self._departures[key, self._place] = replay, moved[0]
        return found

    def _move_out(self, output: StepOutput) -> StepOutput:
        logprobs = output.logprobs
        moved = replace(output, tokens=self._moved(output.tokens))
        if logprobs is None:
            return moved
        each = {field.name: self._moved(getattr(logprobs, field.name)) for field in fields(logprobs)}
        return replace(moved, logprobs=replace(logprobs, **each))

    def _moved(self, source: Tensor) -> Tensor:
        target = source.clone()
        self._copy(source, target)
        return target
