"""Turns: who is next in line, and in what order the prompts of one step are served. Integers only.

The line has one order, that of `turn`: sequences wait, are admitted and come back from a preemption in it, and the last
in line is the one that is preempted. So the first in line always has what it needs, and everybody gets to be the first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from nanoserve.sequence import Sequence

ARRIVALS_PER_PRIORITY = 256
"""How many later arrivals a step of priority is worth: the ageing that keeps the least urgent request from starving."""
FIRST_SHARE = 4
"""One part in so many of a step's prompt rows is the first in line's, however short the other prompts are."""


def turn(sequence: Sequence) -> tuple[int, int]:
    """The place in line; the lowest is next. First come, first served among equal priorities, and a request of
    priority p + 1 lets at most ARRIVALS_PER_PRIORITY later ones of priority p pass. It never changes."""
    return sequence.arrival + sequence.priority * ARRIVALS_PER_PRIORITY, sequence.arrival


class WaitingLine:
    """The sequences that wait, in the order of their turns."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self.tokens = 0
        """Known tokens of all that wait: what their prefills will have to compute."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def add(self, sequence: Sequence) -> None:
        insort(self._line, sequence, key=turn)
        self.tokens += sequence.target

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._line, turn(sequence), key=turn)
        assert self._line[index] is sequence, "a sequence does not stand where its turn is"
        del self._line[index]
        self.tokens -= sequence.target

    def check(self) -> None:
        """Raises AssertionError if somebody stands out of turn or the tokens are miscounted."""
        turns = [turn(sequence) for sequence in self._line]
        assert turns == sorted(set(turns)), "the line is out of order"
        assert self.tokens == sum(sequence.target for sequence in self._line), "the line's tokens are miscounted"


def serving_order(prompts: SequenceOf[Sequence], budget: int) -> Iterator[tuple[Sequence, int]]:
    """(prompt, the most rows it may take now) in the order of service, for prompts in line order, until `budget` rows
    are spent.

    The first in line has its share, so that it ends whatever else comes. All other rows go to the most urgent, and
    among those to the prompt with the fewest tokens left, so that no short one waits for a long one to end: shortest
    remaining processing time first, which makes the mean wait least (Schrage 1968).
    """
    if not prompts:
        return
    yield prompts[0], max(1, budget // FIRST_SHARE)
    for prompt in sorted(prompts, key=lambda s: (s.priority, s.target - s.computed, turn(s))):
        yield prompt, budget
