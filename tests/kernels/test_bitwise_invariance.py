"""The real model's logits and tokens depend on the request alone, to the bit: not on company, chunks, preemption,
warm-up or threads. All pairs of conditions meet in some case."""

from __future__ import annotations

from dataclasses import astuple
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.kernels.invariance import Answer, Ask, Case, Served, asks

pytestmark = pytest.mark.model
ALONE = Case()
AXES = ((0, 1, 7, 31), (512, 16, 64), (False, True), (False, True), (1, 2))
CASES = [
    Case(0, 16, True, True, 2),
    Case(0, 64, True, False, 1),
    Case(1, 512, True, False, 2),
    Case(1, 16, False, False, 1),
    Case(1, 64, False, True, 2),
    Case(7, 512, False, True, 1),
    Case(7, 16, True, False, 2),
    Case(7, 64, True, True, 1),
    Case(31, 512, True, True, 2),
    Case(31, 16, False, True, 1),
    Case(31, 64, False, False, 2),
]
FEW, MANY = 6, 50
"""Prompts, each of which is asked greedily and with a seed."""


def check(path: Path, requests: list[Ask], wanted: list[Answer], case: Case) -> None:
    served = Served(path, case)
    found = served.answers(requests)
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours == theirs, f"request {number} of {len(requests[number].prompt)} tokens differs: {case}"
    assert served.most_running == case.neighbours + 1
    if case.preempted:
        assert len(served.preempted) >= (len(requests) // 10 if case.neighbours else len(requests))


@pytest.fixture(scope="module")
def few(smollm2_path: Path) -> tuple[list[Ask], list[Answer]]:
    requests = asks(smollm2_path, FEW)
    return requests, Served(smollm2_path, ALONE).answers(requests)


@pytest.fixture(scope="module")
def many(smollm2_path: Path) -> tuple[list[Ask], list[Answer]]:
    requests = asks(smollm2_path, MANY)
    return requests, Served(smollm2_path, ALONE).answers(requests)


def test_every_pair_of_conditions_meets_in_some_case() -> None:
    cases = [astuple(case) for case in (ALONE, *CASES)]
    for a, b in combinations(range(len(AXES)), 2):
        assert {(case[a], case[b]) for case in cases} == set(product(AXES[a], AXES[b]))


@pytest.mark.parametrize("case", [CASES[0], CASES[7], CASES[10]], ids=str)
def test_a_dozen_requests_answer_as_they_do_alone(
    smollm2_path: Path, few: tuple[list[Ask], list[Answer]], case: Case
) -> None:
    check(smollm2_path, *few, case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fifty_prompts_answer_as_they_do_alone(
    smollm2_path: Path, many: tuple[list[Ask], list[Answer]], case: Case
) -> None:
    check(smollm2_path, *many, case)


def test_prompts_and_seeds_show_in_the_answers(few: tuple[list[Ask], list[Answer]]) -> None:
    _, answers = few
    greedy, drawn = answers[::2], answers[1::2]
    assert [answer[0][1] for answer in greedy] == [answer[0][1] for answer in drawn], "one prompt, the same logits"
    assert len({answer[0][1] for answer in greedy}) == FEW
    assert greedy != drawn
