"""Choosing tokens: against formulas written out in numpy, by distribution, at the ends of every parameter's range."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.inputs import GREEDY, RowSampling, StepInputs, new_last_tokens
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.kernels.sampling import adjust_row, rank, uniforms
from nanoserve.ops import SamplingWindow

VOCABULARY = 32
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Row:
    """One logit row, how its token is chosen, and where the token goes."""

    logits: list[float]
    sampling: RowSampling
    position: int = 5


def window_of(rows: list[RowSampling]) -> SamplingWindow:
    inputs = StepInputs(len(rows), new_last_tokens(1, "cpu"))
    inputs.write_sampling(rows)
    return inputs.sampling(len(rows))


def sample(rows: list[Row]) -> list[int]:
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32)
    positions = torch.tensor([row.position for row in rows])
    tokens = ReferenceOps().sample(logits, window_of([row.sampling for row in rows]), positions)
    assert tokens.dtype == torch.int64
    return [int(token) for token in tokens]


def random_logits(seed: int, size: int = VOCABULARY) -> list[float]:
    return (np.random.default_rng(seed).normal(size=size) * 3).astype(np.float32).tolist()


# --- the oracle: plain Python and numpy, written from the definitions -------------------------------------------


def mix(x: int) -> int:
    """splitmix64's finaliser on unsigned integers (Steele, Lea & Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    x = mix((seed + golden) & MASK)
    x = mix((x + choice * golden) & MASK)
    x = mix((x + position * golden) & MASK)
    return (x >> 40) / 2**24


def kept_tokens(row: Row) -> dict[int, float]:
    """Token → probability (not renormalised) of what top-k, then top-p, then min-p leave."""
    scaled = np.array(row.logits, dtype=np.float64) / row.sampling.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if row.sampling.top_k > 0:
        order = order[: row.sampling.top_k]
    mass = sum(probs[token] for token in order)
    nucleus: list[int] = []
    for token in order:
        if row.sampling.top_p < 1 and sum(probs[t] for t in nucleus) >= row.sampling.top_p * mass:
            break
        nucleus.append(token)
    floor = row.sampling.min_p * probs.max()
    return {token: probs[token] for token in nucleus if probs[token] >= floor}


def support_of(row: Row, draws: int = 400) -> set[int]:
    """The tokens that many seeds choose."""
    return set(sample([replace(row, sampling=row.sampling._replace(seed=seed)) for seed in range(draws)]))


# --- randomness -----------------------------------------------------------------------------------------------


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 2**31))
def test_uniform_number_is_the_hash_of_seed_choice_and_position(seed: int, choice: int, position: int) -> None:
    drawn = uniforms(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]))
    assert drawn.dtype == torch.float64
    assert float(drawn) == uniform(seed, choice, position)
    assert 0 <= float(drawn) < 1


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_uniform_numbers_spread_evenly_when_only_one_key_moves(axis: str) -> None:
    count = 20_000
    keys = {name: torch.full((count,), 3) for name in ("seed", "choice", "position")}
    keys[axis] = torch.arange(count)
    drawn = uniforms(keys["seed"], keys["choice"], keys["position"]).numpy()
    cells = np.bincount((drawn * 50).astype(int), minlength=50)
    chi_square = ((cells - count / 50) ** 2 / (count / 50)).sum()
    assert chi_square < 97, "99.99 % of true uniforms stay below this with 49 degrees of freedom"
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


def test_token_depends_on_its_own_key_alone_when_rows_are_batched_or_reordered() -> None:
    rows = [
        Row(random_logits(n), RowSampling(0.5 + n / 8, n % 5, 1 - n / 40, n / 80, seed=n * 7, choice=n % 3), position=n)
        for n in range(16)
    ]
    together = sample(rows)
    assert together == [sample([row])[0] for row in rows]
    assert together[::-1] == sample(rows[::-1])
    assert sample(rows) == together, "the same key draws the same token every time"


def test_choices_and_positions_differ_when_the_seed_is_the_same() -> None:
    flat = [0.0] * 1000
    for key in ("choice", "position"):
        rows = [
            Row(flat, RowSampling(1.0, seed=3, choice=n if key == "choice" else 0), n if key == "position" else 0)
            for n in range(8)
        ]
        assert len(set(sample(rows))) == 8


# --- the distribution -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        RowSampling(1.0),
        RowSampling(0.7),
        RowSampling(1.5, top_k=5),
        RowSampling(1.0, top_p=0.8),
        RowSampling(2.0, min_p=0.2),
        RowSampling(1.3, top_k=9, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "cool", "top-k", "top-p", "min-p", "all"],
)
def test_frequencies_are_the_probabilities_when_many_seeds_draw(sampling: RowSampling) -> None:
    draws = 20_000
    row = Row(random_logits(2, 12), sampling)
    logits = torch.tensor([row.logits]).expand(draws, -1).contiguous()
    one = window_of([sampling])
    window = SamplingWindow(
        one.temperature.expand(draws), one.top_k.expand(draws), one.top_p.expand(draws), one.min_p.expand(draws),
        torch.arange(draws), one.choice.expand(draws),
    )  # fmt: skip
    counts = torch.bincount(ReferenceOps().sample(logits, window, torch.full((draws,), 9)), minlength=12).tolist()
    expected = kept_tokens(row)
    assert {token for token, count in enumerate(counts) if count} <= set(expected)
    total = sum(expected.values())
    wanted = {token: draws * p / total for token, p in expected.items() if draws * p / total >= 5}
    chi_square = sum((counts[token] - count) ** 2 / count for token, count in wanted.items())
    freedom = max(1, len(wanted) - 1)
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom) + 6


@st.composite
def rows(draw: st.DrawFn) -> Row:
    # On a grid: logits are equal, or far enough apart that fp32 probabilities keep the order of the exact ones.
    logits = [step / 64 for step in draw(st.lists(st.integers(-512, 512), min_size=1, max_size=20))]
    return Row(
        logits,
        RowSampling(
            temperature=draw(st.sampled_from([0.25, 1.0, 3.0])),
            top_k=draw(st.integers(0, 22)),
            top_p=draw(st.sampled_from([1e-6, 0.3, 0.75, 1.0])),
            min_p=draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])),
            seed=draw(st.integers(0, 2**40)),
        ),
    )


@given(rows())
@settings(max_examples=120)
def test_token_is_where_the_uniform_number_falls_among_what_the_filters_keep(row: Row) -> None:
    """Inverse transform in vocabulary order, by the definitions; a number within rounding of a border may fall on
    either side of it."""
    (token,) = sample([row])
    kept = kept_tokens(row)
    borders = kept_tokens(replace(row, sampling=row.sampling._replace(top_p=min(1.0, row.sampling.top_p + 1e-5))))
    assert token in kept or token in borders
    if token not in kept or kept.keys() != borders.keys():
        return
    below = sum(p for other, p in kept.items() if other < token) / sum(kept.values())
    target = uniform(row.sampling.seed, 0, row.position)
    assert below - 1e-5 <= target <= below + kept[token] / sum(kept.values()) + 1e-5


# --- the ends of the ranges -------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([-1.0, 0.0, 2.0, 5.0]), min_size=1, max_size=30))
def test_greedy_takes_the_lowest_id_when_the_best_are_tied(logits: list[float]) -> None:
    assert sample([Row(logits, GREEDY)]) == [logits.index(max(logits))]


def test_greedy_takes_the_lowest_id_when_ties_lie_far_apart_in_a_real_vocabulary() -> None:
    logits = [0.0] * 49_152
    for token in (3, 17_000, 49_151):
        logits[token] = 7.5
    assert sample([Row(logits, GREEDY), Row(logits, RowSampling(1.0, top_k=1)), Row(logits, GREEDY)]) == [3, 3, 3]


@pytest.mark.parametrize(
    "sampling",
    [
        RowSampling(1.0, top_k=1),
        RowSampling(1.0, top_p=1e-6),
        RowSampling(1.0, top_p=0.0),
        RowSampling(1.0, min_p=1.0),
        RowSampling(1e-7),
        RowSampling(1e-4),
        RowSampling(1e-3),
    ],
    ids=["top_k 1", "top_p 1e-6", "top_p 0", "min_p 1", "temperature 1e-7", "temperature 1e-4", "temperature 1e-3"],
)
def test_choice_is_greedy_when_a_parameter_leaves_one_token(sampling: RowSampling) -> None:
    row = Row(random_logits(3), sampling)
    assert support_of(row) == set(sample([replace(row, sampling=GREEDY)]))


@pytest.mark.parametrize("top_k", [0, -1, VOCABULARY, VOCABULARY + 1, 2**62])
@pytest.mark.parametrize("other", [{}, {"top_p": 0.999}])
def test_top_k_drops_nothing_when_it_is_off_or_holds_the_vocabulary(top_k: int, other: dict[str, Any]) -> None:
    base = RowSampling(5.0, **other)
    for seed in range(50):
        off, on = base._replace(seed=seed), base._replace(seed=seed, top_k=top_k)
        assert sample([Row(random_logits(4), on)]) == sample([Row(random_logits(4), off)])


def test_every_token_comes_when_the_temperature_is_high() -> None:
    assert support_of(Row(random_logits(5, 8), RowSampling(100.0))) == set(range(8))


def test_tokens_of_probability_zero_never_come_when_they_are_barred() -> None:
    barred = [-math.inf if token % 2 else 0.0 for token in range(10)]
    assert support_of(Row(barred, RowSampling(1.0))) == {0, 2, 4, 6, 8}
    assert support_of(Row(barred, RowSampling(1.0, top_k=7))) == {0, 2, 4, 6, 8}


@pytest.mark.parametrize("extreme", [1e9, -1e9, 1e30])
def test_choice_is_sound_when_logits_are_huge(extreme: float) -> None:
    logits = [0.0, extreme, 0.0, 0.0]
    wanted = {1} if extreme > 0 else {0, 2, 3}
    for temperature in (1e-4, 1.0, 100.0):
        chosen = support_of(Row(logits, RowSampling(temperature, top_p=0.99)))
        assert chosen <= wanted


def test_neighbours_keep_their_tokens_when_a_row_is_broken() -> None:
    rows = [Row(random_logits(n), RowSampling(1.0, seed=n) if n % 2 else GREEDY) for n in range(6)]
    alone = [sample([row])[0] for row in rows]
    broken = Row([math.nan] * VOCABULARY, RowSampling(1.0))
    mixed = sample([broken, *rows[:3], broken, *rows[3:], Row([math.inf] * VOCABULARY, RowSampling(1.0, top_k=3))])
    assert [*mixed[1:4], *mixed[5:8]] == alone
    assert all(0 <= token < VOCABULARY for token in mixed), "whatever a broken row says is still a token"


# --- penalties and bias -------------------------------------------------------------------------------------------


def adjusted(logits: list[float], **changes: Any) -> list[float]:
    fields: dict[str, Any] = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, **changes}
    prompt, output, bias = (fields.pop(name, []) for name in ("prompt", "output", "bias"))
    row = torch.tensor(logits)
    before = row.clone()
    values = adjust_row(
        row,
        torch.tensor([*prompt, *output], dtype=torch.int64),
        prompt_tokens=len(prompt),
        bias_ids=torch.tensor([token for token, _ in bias], dtype=torch.int64),
        bias_values=torch.tensor([value for _, value in bias], dtype=torch.float32),
        **fields,
    ).tolist()
    assert torch.equal(row, before), "the row of the model's own distribution is left alone"
    return values


LOGITS = [1.0, -1.0, 2.0, -2.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, LOGITS),
        ({"presence": 0.5}, [0.5, -1.0, 1.5, -2.0, 0.0]),
        ({"presence": -2.0}, [3.0, -1.0, 4.0, -2.0, 0.0]),
        ({"frequency": 0.5}, [-0.5, -1.0, 1.5, -2.0, 0.0]),
        ({"presence": 0.25, "frequency": 0.5}, [-0.75, -1.0, 1.25, -2.0, 0.0]),
        ({"repetition": 2.0}, [0.5, -1.0, 1.0, -4.0, 0.0]),
        ({"repetition": 0.5}, [2.0, -1.0, 4.0, -1.0, 0.0]),
        ({"bias": ((4, 10.0), (1, -100.0))}, [1.0, -101.0, 2.0, -2.0, 10.0]),
        ({"bias": ((4, 1.0), (4, 2.0))}, [1.0, -1.0, 2.0, -2.0, 3.0]),
        (
            {"repetition": 2.0, "presence": 0.5, "frequency": 0.5, "bias": ((0, 1.0),)},
            [0.5 - 0.5 - 1.5 + 1.0, -1.0, 1.0 - 0.5 - 0.5, -4.0, 0.0],
        ),
    ],
)
def test_logits_are_adjusted_by_the_formulas_when_counts_are_known(
    changes: dict[str, Any], expected: list[float]
) -> None:
    """Prompt: token 3 three times. Output: token 0 three times, token 2 once."""
    values = adjusted(LOGITS, prompt=[3, 3, 3], output=[0, 2, 0, 0], **changes)
    assert values == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("penalty", ["presence", "frequency"])
def test_prompt_tokens_are_not_penalised_when_only_output_counts(penalty: str) -> None:
    assert adjusted(LOGITS, prompt=[0, 0, 2], **{penalty: 2.0}) == LOGITS


@given(
    st.lists(st.sampled_from([-math.inf, -2.5, -0.0, 0.0, 1.0, 1e-30, 3e38, math.inf]), min_size=1, max_size=30),
    st.data(),
)
def test_ranking_takes_the_lowest_id_first_when_logits_are_equal(logits: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(logits)))
    wanted = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count]
    assert rank(torch.tensor([logits]), count).tolist() == [wanted]
