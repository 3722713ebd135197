"""Turns: one order for the line, and who is served first in a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.sequence import Sequence
from nanoserve.turns import ARRIVALS_PER_PRIORITY, FIRST_SHARE, WaitingLine, serving_order, turn
from tests.engines import prompt_of, sequence_of


def arrived(number: int, *, tokens: int = 4, priority: int = 0) -> Sequence:
    sequence = sequence_of(prompt_of(tokens), priority=priority)
    sequence.arrival = number
    return sequence


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=40))
def test_line_is_first_come_first_served_within_a_priority(priorities: list[int]) -> None:
    line = WaitingLine()
    for number, priority in enumerate(priorities):
        line.add(arrived(number, priority=priority))
        line.check()
    for priority in set(priorities):
        arrivals = [sequence.arrival for sequence in line if sequence.priority == priority]
        assert arrivals == sorted(arrivals)


@given(st.integers(-5, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_a_later_request_passes_only_while_it_is_young_enough(priority: int, more: int, number: int) -> None:
    """The ageing: a request lets at most so many later arrivals pass, however urgent they are."""
    old = arrived(number, priority=priority + more)
    limit = number + more * ARRIVALS_PER_PRIORITY
    assert turn(arrived(limit - 1, priority=priority)) < turn(old)
    assert turn(arrived(limit + 1, priority=priority)) > turn(old)
    assert turn(arrived(limit, priority=priority)) > turn(old)


@given(st.data())
def test_line_stays_in_order_and_counts_its_tokens_when_anybody_leaves_and_returns(data: st.DataObject) -> None:
    line, out = WaitingLine(), [arrived(n, tokens=1 + n % 5, priority=n % 3) for n in range(12)]
    for _ in range(20):
        inside = list(line)
        if inside and data.draw(st.booleans()):
            leaver = data.draw(st.sampled_from(inside))
            line.remove(leaver)
            out.append(leaver)
        elif out:
            line.add(out.pop(data.draw(st.integers(0, len(out) - 1))))
        line.check()
        assert len(line) + len(out) == 12


def test_first_in_line_has_its_share_and_the_rest_goes_to_the_shortest() -> None:
    long, middle, short = arrived(0, tokens=900), arrived(1, tokens=200), arrived(2, tokens=30)
    order = list(serving_order([long, middle, short], 100))
    assert order == [(long, 100 // FIRST_SHARE), (short, 100), (middle, 100), (long, 100)]


def test_urgent_prompts_are_served_before_short_ones() -> None:
    first, urgent, short = arrived(0, tokens=500), arrived(1, tokens=400, priority=-1), arrived(2, tokens=5)
    assert [sequence for sequence, _ in serving_order([first, urgent, short], 8)] == [first, urgent, short, first]


def test_equal_prompts_are_served_one_after_the_other() -> None:
    """Sharing evenly would end all of them when the last could have ended."""
    prompts = [arrived(number, tokens=50) for number in range(3)]
    assert [sequence for sequence, _ in serving_order(prompts, 10)] == [prompts[0], *prompts]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_first_in_line_gets_a_row_of_the_smallest_budget(budget: int) -> None:
    assert next(serving_order([arrived(0, tokens=9), arrived(1, tokens=1)], budget))[1] == 1


def test_nobody_is_served_when_nobody_is_there() -> None:
    assert list(serving_order([], 8)) == []
