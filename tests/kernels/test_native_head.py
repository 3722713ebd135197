"""The native full head against the torch one: adjusted logits and histories to the bit, log-probabilities closely."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.history import HistoryTable
from nanoserve.kernels.native_lib import MAX_TOP
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.ops import StepWindow
from nanoserve.request import MAX_TOP_LOGPROBS, SamplingParams
from tests.kernels.native import Harness, plain_step
from tests.kernels.test_native_ops import feed

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
reference = ReferenceOps()
SEQUENCES, LONGEST = 6, 60


@st.composite
def histories(draw: st.DrawFn, vocab: int) -> tuple[HistoryTable, list[int]]:
    """A table of some written rows and some untouched ones, and how many tokens each has; the last is the pad rows'."""
    table, lengths = HistoryTable(SEQUENCES, LONGEST, torch.device("cpu")), [0] * (SEQUENCES + 1)
    ids = st.integers(0, vocab - 1)
    for row in range(SEQUENCES):
        if draw(st.booleans()):
            continue
        tokens = draw(st.lists(ids, min_size=1, max_size=LONGEST))
        lengths[row] = len(tokens)
        params = SamplingParams(
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.6])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -2.0])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -1.1])),
            logit_bias=tuple(draw(st.lists(st.tuples(ids, st.floats(-100, 100, width=32)), max_size=5))),
            logprobs=draw(st.sampled_from([None, 0, 1, 5, 20])),
        )
        table.write(row, tokens, draw(st.integers(1, len(tokens))), params)
    return table, lengths


def step_over(rows: list[int], lengths: list[int]) -> StepWindow:
    step = plain_step(len(rows), max_sequences=SEQUENCES)
    step.table_rows.copy_(torch.tensor(rows))
    step.context_lens.copy_(torch.tensor([lengths[row] for row in rows]))
    return step


def logits_of(rows: int, vocab: int, seed: int) -> Tensor:
    """On a grid, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 40, (rows, vocab), generator=generator) / 8 + (seed % 2) * torch.rand(rows, vocab)


CASES = st.sampled_from([1, 3, 16, 33, 500]).flatmap(lambda vocab: st.tuples(st.just(vocab), histories(vocab)))


@few
@given(case=CASES, rows=st.lists(st.integers(0, SEQUENCES), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_adjusted_logits_are_torchs_to_the_bit(
    harness: Harness, case: tuple[int, tuple[HistoryTable, list[int]]], rows: list[int], seed: int
) -> None:
    vocab, (table, lengths) = case
    logits, step = logits_of(len(rows), vocab, seed), step_over(rows, lengths)
    index = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    (ours,) = harness.run(lambda r: r.adjust_logits(feed(r, logits), table.window, step, index))
    assert torch.equal(ours, reference.adjust_logits(logits, table.window, step, index))
    for row, at in enumerate(index.tolist()):
        if table.row(rows[at], 0) is None:
            assert torch.equal(ours[row], logits[row]), "a row that asks for nothing keeps its logits"


@few
@given(case=CASES, rows=st.lists(st.integers(0, SEQUENCES), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_logprobs_are_torchs_and_equals_come_by_id(
    harness: Harness, case: tuple[int, tuple[HistoryTable, list[int]]], rows: list[int], seed: int
) -> None:
    vocab, (table, lengths) = case
    logits, step = logits_of(len(rows), vocab, seed), step_over(rows, lengths)
    picked: list[Tensor] = []

    def record(recorder):  # type: ignore[no-untyped-def]
        fed = feed(recorder, logits)
        tokens = recorder.sample(fed, plain_sampling(len(rows)), step.context_lens)
        found = recorder.logprobs(fed, tokens, table.window, step)
        picked.append(tokens)
        return found.chosen, found.top_ids, found.top, tokens

    chosen, ids, top, tokens = harness.run(record)
    wanted = reference.logprobs(logits, tokens, table.window, step)
    assert ids.shape == wanted.top_ids.shape == (len(rows), min(MAX_TOP, vocab))
    for row, table_row in enumerate(rows):
        count = int(table.window.counts[table_row, 2])
        if count < 0:
            continue
        count = min(count, vocab)
        assert ids[row, :count].tolist() == wanted.top_ids[row, :count].tolist()
        torch.testing.assert_close(top[row, :count], wanted.top[row, :count], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(chosen[row], wanted.chosen[row], rtol=1e-5, atol=2e-6)


def plain_sampling(rows: int):  # type: ignore[no-untyped-def]
    from tests.kernels.native import greedy

    sampling = greedy(rows)
    sampling.temperature.fill_(1.5)
    sampling.seed.copy_(torch.arange(rows))
    return sampling


@pytest.mark.parametrize("vocab", [7, 49_152])
def test_logprobs_of_a_row_have_the_same_bits_in_any_batch(harness: Harness, vocab: int) -> None:
    table = HistoryTable(SEQUENCES, LONGEST, torch.device("cpu"))
    for row in range(SEQUENCES):
        table.write(row, [row], 1, SamplingParams(logprobs=20, frequency_penalty=0.5))
    logits = torch.randn(SEQUENCES, vocab) * 4

    def of(rows: list[int]) -> list[Tensor]:
        step = step_over(rows, [1] * (SEQUENCES + 1))

        def record(recorder):  # type: ignore[no-untyped-def]
            fed = feed(recorder, logits[rows])
            adjusted = recorder.adjust_logits(fed, table.window, step)
            tokens = recorder.sample(adjusted, plain_sampling(len(rows)), step.context_lens)
            found = recorder.logprobs(fed, tokens, table.window, step)
            return found.chosen, found.top_ids, found.top, adjusted

        return harness.run(record)

    alone, beside = of([4]), of([0, 1, 2, 3, 4, 5])
    for one, many in zip(alone[1:], beside[1:], strict=True):
        assert torch.equal(one[0], many[4])


def test_only_real_rows_join_a_history_at_their_position(harness: Harness) -> None:
    table = HistoryTable(SEQUENCES, LONGEST, torch.device("cpu"))
    step = step_over([2, 0, 1, SEQUENCES], [3, 0, LONGEST, 0, 0, 0, 0])
    logits = torch.eye(4, 10) * 5

    def record(recorder):  # type: ignore[no-untyped-def]
        tokens = recorder.sample(feed(recorder, logits), plain_greedy(4), step.context_lens)
        recorder.append_tokens(table.window, tokens, step)
        return tokens

    harness.run(record, live=2)
    kept = table.window.tokens.clone()
    assert (int(kept[2, LONGEST - 1]), int(kept[0, 3])) == (0, 1), "a full history takes no more"
    assert int((kept != 0).sum()) == 1


def plain_greedy(rows: int):  # type: ignore[no-untyped-def]
    from tests.kernels.native import greedy

    return greedy(rows)


def test_the_kernels_report_as_many_alternatives_as_a_request_may_ask_for() -> None:
    assert MAX_TOP == MAX_TOP_LOGPROBS
