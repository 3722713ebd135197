"""The native sampler against the torch one: the same token from the same logits."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.kernels.sampling import sample_rows
from nanoserve.ops import SamplingWindow
from tests.kernels.native import Harness
from tests.kernels.test_native_ops import feed

few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def window(rows: int, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingWindow:
    return SamplingWindow(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) * 7919 + 3,
        torch.arange(rows) % 3,
    )


def sample(harness: Harness, logits: Tensor, sampling: SamplingWindow, positions: Tensor) -> Tensor:
    (tokens,) = harness.run(lambda r: r.sample(feed(r, logits), sampling, positions))
    return tokens


@few
@given(rows=st.integers(1, 64), vocab=st.integers(1, 1000), values=st.integers(1, 50), seed=st.integers(0, 99))
def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(
    harness: Harness, rows: int, vocab: int, values: int, seed: int
) -> None:
    logits = torch.randint(-values, values, (rows, vocab), generator=torch.Generator().manual_seed(seed)).float()
    tokens = sample(harness, logits, window(rows, temperature=0.0), torch.zeros(rows, dtype=torch.int64))
    assert torch.equal(tokens, logits.argmax(-1))


@few
@given(
    vocab=st.sampled_from([2, 15, 100, 5000]),
    temperature=st.sampled_from([0.2, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    seed=st.integers(0, 1000),
)
def test_a_drawn_token_is_the_torch_samplers(
    harness: Harness, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float, seed: int
) -> None:
    rows = 32
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * spread
    sampling = window(rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    positions = torch.randint(1, 5000, (rows,), generator=generator)
    tokens, wanted = sample(harness, logits, sampling, positions), sample_rows(logits, sampling, positions)
    # A draw within rounding of a boundary may fall on either side of it; so may a cut through equal probabilities.
    assert (tokens == wanted).float().mean() >= 0.9
    assert (tokens >= 0).all()
    assert (tokens < vocab).all()


def test_only_what_top_k_keeps_is_drawn_when_all_probabilities_are_equal(harness: Harness) -> None:
    rows = 200
    sampling = window(rows, temperature=1.0, top_k=3)
    tokens = sample(harness, torch.zeros(rows, 500), sampling, torch.arange(rows))
    assert set(tokens.tolist()) == {0, 1, 2}


def test_top_p_keeps_the_entry_that_crosses_the_mass(harness: Harness) -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().repeat(400, 1)
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.85, {0, 1, 2})):
        tokens = sample(harness, logits, window(400, temperature=1.0, top_p=top_p), torch.arange(400))
        assert set(tokens.tolist()) == kept


def test_frequencies_are_the_probabilities(harness: Harness) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    tokens = sample(
        harness, probabilities.log().repeat(20_000, 1)[:200], window(200, temperature=1.0), torch.arange(200)
    )
    counts = torch.bincount(tokens, minlength=4).float() / 200
    assert (counts - probabilities).abs().max() < 0.12


def test_a_row_draws_the_same_token_wherever_it_stands(harness: Harness) -> None:
    logits = torch.randn(1, 3000) * 3
    sampling = window(1, temperature=0.9, top_p=0.9)
    alone = sample(harness, logits, sampling, torch.tensor([77]))
    wide = window(9, temperature=1.3, top_k=5)
    for name in SamplingWindow.__slots__:
        getattr(wide, name)[4] = getattr(sampling, name)[0]
    many = torch.randn(9, 3000)
    many[4] = logits[0]
    assert int(sample(harness, many, wide, torch.full((9,), 77))[4]) == int(alone)


def test_remember_writes_the_token_of_each_table_row(harness: Harness) -> None:
    last, tables = torch.zeros(5, dtype=torch.int64), torch.tensor([3, 0, 4])
    logits = torch.eye(3, 10) * 5

    def record(recorder):  # type: ignore[no-untyped-def]
        tokens = recorder.sample(feed(recorder, logits), window(3, temperature=0.0), tables)
        recorder.remember(last, tables, tokens)
        return tokens

    harness.run(record, live=2)
    assert last.tolist() == [1, 0, 0, 0, 0]
