"""What surrounds a step: choosing from logits with and without a history, and the tokens a runner hands on."""

from __future__ import annotations

import pytest
import torch

from nanoserve.history import HistoryTable
from nanoserve.inputs import RowSampling, StepInputs, new_last_tokens
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.request import SamplingParams
from nanoserve.sequence import State
from nanoserve.slots import SlotTable
from nanoserve.step import StepOutput, check_mirror, choose, new_tokens
from tests.engines import sequence_of

VOCABULARY = 6
LOGITS = torch.tensor([[1.0, 4.0, 0.0, 3.5, -1.0, 2.0]])


def chosen(params: SamplingParams, tokens: list[int], steps: int) -> tuple[list[int], list[StepOutput], HistoryTable]:
    """What `steps` steps choose for a sequence of table row 1 whose logits are always the same."""
    history, inputs = HistoryTable(2, 20, torch.device("cpu")), StepInputs(1, new_last_tokens(2, "cpu"))
    history.write(1, tokens, len(tokens), params)
    outputs = []
    for length in range(len(tokens), len(tokens) + steps):
        inputs.write_rows([0], [length - 1], [0], [length], [1])
        inputs.write_sampling([RowSampling()])
        outputs.append(choose(ReferenceOps(), LOGITS, inputs.sampling(1), inputs.window(1), history=history.window))
        assert inputs.last_tokens.tolist() == [0, int(outputs[-1].tokens), 0]
    return [int(output.tokens) for output in outputs], outputs, history


def test_each_choice_knows_the_ones_before_it_although_nobody_told_the_host() -> None:
    tokens, outputs, history = chosen(SamplingParams(frequency_penalty=1.0), [1, 1], 5)
    assert tokens == [1, 3, 1, 3, 1], "4.0, 3.5, 3.0, 2.5 and 2.0 before 2.0 of a higher id"
    assert history.row(1, 7) == [1, 1, *tokens]
    assert all(torch.equal(output.logits, LOGITS) for output in outputs), "what is reported is the model's own"


def test_repetition_counts_the_prompt_and_presence_does_not() -> None:
    assert chosen(SamplingParams(repetition_penalty=2.5), [1], 3)[0] == [3, 5, 1]
    assert chosen(SamplingParams(presence_penalty=2.5), [1], 3)[0] == [1, 3, 5]


def test_a_token_chosen_in_vain_is_written_over() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    _, _, history = chosen(params, [1], 4)
    inputs = StepInputs(1, new_last_tokens(2, "cpu"))
    inputs.write_rows([0], [1], [0], [2], [1])
    inputs.write_sampling([RowSampling()])
    again = choose(ReferenceOps(), LOGITS, inputs.sampling(1), inputs.window(1), history=history.window)
    assert int(again.tokens) == 3, "position 2 knows the prompt and the token at position 1, and nothing after it"


@pytest.mark.parametrize("wanted", [None, 0, 2, 20])
def test_new_tokens_bear_as_many_logprobs_as_were_asked_for(wanted: int | None) -> None:
    params = SamplingParams(logprobs=wanted, logit_bias=((4, 100.0),))
    _, (output,), _ = chosen(params, [1], 1)
    sequence = sequence_of([1], max_tokens=5, params=params)
    (new,) = new_tokens([sequence], output)
    own = torch.log_softmax(LOGITS, -1)[0]
    assert (new.sequence, new.token) == (sequence, 4)
    assert new.logprob == (None if wanted is None else pytest.approx(float(own[4])))
    assert [token for token, _ in new.top] == [1, 3, 5, 0, 2, 4][: wanted or 0]
    assert [value for _, value in new.top] == pytest.approx([float(own[token]) for token, _ in new.top])


def test_a_history_that_is_not_the_sequences_is_found() -> None:
    params = SamplingParams(presence_penalty=1.0)
    sequence = sequence_of([1, 2], max_tokens=5, params=params)
    sequence.table_row, sequence.state = 1, State.DECODE
    slots, history = SlotTable(2, 20, 99), HistoryTable(2, 20, torch.device("cpu"))
    with pytest.raises(AssertionError, match="the history is not the sequence's"):
        check_mirror(sequence, sequence.computed, slots, history)
    history.write(1, [1, 2], 2, params)
    check_mirror(sequence, sequence.computed, slots, history)
    history.write(1, [1, 3], 2, params)
    with pytest.raises(AssertionError, match="the history is not the sequence's"):
        check_mirror(sequence, sequence.computed, slots, history)
