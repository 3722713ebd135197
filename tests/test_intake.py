"""From a Request to Sequences: what is refused before it can hurt anyone, and what a sequence starts with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest

from nanoserve.errors import ContextLengthExceeded, InvalidRequest
from nanoserve.intake import Intake
from nanoserve.request import ChatPrompt, Prompt, Request, SamplingParams, TextPrompt, TokenPrompt
from nanoserve.sequence import Sequence
from tests.fakes import ByteTokenizer

VOCABULARY = 300
LIMIT = 64


def intake(tokenizer: ByteTokenizer | None = None) -> Intake:
    """An intake whose model has 300 logits, 42 more than its tokenizer has tokens."""
    return Intake(
        cast(Any, tokenizer or ByteTokenizer()),
        vocab_size=VOCABULARY,
        max_model_len=LIMIT,
        eos_token_ids=frozenset({256, 299}),
        block_size=16,
    )


def sequences(prompt: Prompt | str, tokenizer: ByteTokenizer | None = None, **params: Any) -> list[Sequence]:
    prompt = TextPrompt(prompt) if isinstance(prompt, str) else prompt
    return intake(tokenizer).sequences(Request("r", prompt, SamplingParams(**params)))


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        (TextPrompt("hi"), [ByteTokenizer.BOS, *b"hi"]),
        (TokenPrompt((1, 2, 299)), [1, 2, 299]),
        (ChatPrompt(({"role": "user", "content": "hi"},)), [ByteTokenizer.BOS, *b"user: hi\nassistant: "]),
    ],
    ids=["text", "tokens", "chat"],
)
def test_prompt_becomes_ids_when_it_is_text_tokens_or_chat(prompt: Prompt, ids: list[int]) -> None:
    (sequence,) = sequences(prompt, ByteTokenizer(add_bos=True))
    assert sequence.tokens == ids
    assert (sequence.prompt_tokens, sequence.generated, sequence.target) == (len(ids), 0, len(ids))


@pytest.mark.parametrize("length", [1, 62, 63])
def test_answer_may_fill_the_context_when_max_tokens_is_absent(length: int) -> None:
    (sequence,) = sequences("x" * length)
    assert sequence.max_tokens == LIMIT - length


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"), [(60, 4, True), (60, 5, False), (1, 63, True), (1, 64, False)]
)
def test_request_is_refused_with_both_numbers_when_it_can_never_fit(length: int, max_tokens: int, fits: bool) -> None:
    if fits:
        assert sequences("x" * length, max_tokens=max_tokens)[0].max_tokens == max_tokens
        return
    with pytest.raises(ContextLengthExceeded, match=rf"together {length + max_tokens}; the limit is 64") as refused:
        sequences("x" * length, max_tokens=max_tokens)
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")


@pytest.mark.parametrize(("length", "said"), [(64, "64"), (65, "65"), (5_000, "at least 1,000")])
def test_prompt_is_refused_when_it_leaves_no_room_for_an_answer(length: int, said: str) -> None:
    with pytest.raises(ContextLengthExceeded, match=f"the prompt is {said} tokens; the limit is 64") as refused:
        sequences("x" * length, max_tokens=1)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokenPrompt(())])
def test_prompt_is_refused_when_it_is_empty(prompt: Prompt) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        sequences(prompt)


@pytest.mark.parametrize("token", [VOCABULARY, VOCABULARY + 1, -1, 2**62])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
def test_token_id_is_refused_by_name_when_it_lies_outside_the_vocabulary(field: str, token: int) -> None:
    prompt: Prompt = TokenPrompt((1, token)) if field == "prompt" else TextPrompt("hi")
    params: dict[str, Any] = {"stop_token_ids": (token,)} if field == "stop_token_ids" else {}
    params |= {"logit_bias": ((token, 1.0),)} if field == "logit_bias" else {}
    with pytest.raises(
        InvalidRequest, match=rf"{field} names token {token}; the vocabulary has ids 0 to 299"
    ) as refused:
        sequences(prompt, **params)
    assert refused.value.param == field


def test_last_id_of_the_model_is_legal_when_the_tokenizer_has_fewer_tokens() -> None:
    (sequence,) = sequences(TokenPrompt((299,)), stop_token_ids=(299,), logit_bias=((299, -5.0),))
    assert sequence.stop_token_ids == {299}


def test_stops_and_ends_are_the_requests_and_the_models() -> None:
    (plain,) = sequences("hi", stop_token_ids=(7,))
    (ignoring,) = sequences("hi", stop_token_ids=(7,), ignore_eos=True)
    assert (plain.stop_token_ids, plain.eos_token_ids) == ({7}, {256, 299})
    assert (ignoring.stop_token_ids, ignoring.eos_token_ids) == ({7}, frozenset())


def test_choices_share_a_seed_and_nothing_mutable_when_there_are_several() -> None:
    four = sequences("hi", n=4, seed=3)
    assert [sequence.choice for sequence in four] == [0, 1, 2, 3]
    assert {sequence.seed for sequence in four} == {3}
    assert len({id(sequence.tokens) for sequence in four}) == 4
    four[0].tokens.append(1)
    assert four[1].tokens == list(b"hi")


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**70])
def test_seed_fits_the_samplers_integers_whatever_was_sent(seed: int) -> None:
    (sequence,) = sequences("hi", seed=seed)
    assert 0 <= sequence.seed < 2**63
    assert sequence.seed == sequences("hi", seed=seed)[0].seed


def test_seeds_differ_when_none_is_given() -> None:
    assert len({sequences("hi")[0].seed for _ in range(8)}) == 8


@pytest.mark.parametrize(
    ("temperature", "kept"), [(0.0, 0.0), (1e-7, 0.0), (1e-5, 0.0), (1e-4, 0.0), (1e-3, 1e-3), (100.0, 100.0)]
)
def test_temperature_is_greedy_when_it_is_too_small_to_divide_by(temperature: float, kept: float) -> None:
    assert sequences("hi", temperature=temperature)[0].params.temperature == kept


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(0, 0), (-1, 0), (1, 1), (VOCABULARY - 1, VOCABULARY - 1), (VOCABULARY, 0), (VOCABULARY + 1, 0), (2**70, 0)],
)
def test_top_k_is_off_when_it_keeps_everything(top_k: int, kept: int) -> None:
    assert sequences("hi", top_k=top_k)[0].params.top_k == kept


NAN = math.nan


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0), ("temperature", NAN), ("temperature", math.inf), ("top_k", -5), ("top_p", 0.0),
        ("top_p", 1.5), ("top_p", NAN), ("min_p", -0.1), ("min_p", 1.1), ("n", 0), ("n", -1), ("max_tokens", 0),
        ("max_tokens", -1), ("repetition_penalty", 0.0), ("presence_penalty", NAN), ("frequency_penalty", math.inf),
        ("logprobs", -1), ("logprobs", 21), ("logit_bias", ((5, NAN),)),
        ("logit_bias", ((5, 1.0),) * 1025),
    ],
)  # fmt: skip
def test_parameter_is_refused_by_name_when_no_sampler_can_honour_it(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        sequences("hi", **{field: value})
    assert refused.value.param == field


def test_request_is_left_as_it_was_when_values_are_normalised() -> None:
    params = SamplingParams(temperature=1e-6, top_k=10_000)
    request = Request("r", TextPrompt("hi"), params)
    before = replace(params)
    intake = Intake(
        cast(Any, ByteTokenizer()), vocab_size=300, max_model_len=64, eos_token_ids=frozenset(), block_size=16
    )
    intake.sequences(request)
    assert request.params == before


@pytest.mark.parametrize(
    "prompt",
    [TextPrompt("x" * 5 * LIMIT), ChatPrompt(({"role": "user", "content": "x" * 5 * LIMIT},))],
    ids=["text", "chat"],
)
def test_prompt_is_refused_before_it_is_encoded_when_it_is_certain_not_to_fit(prompt: Prompt) -> None:
    class Unread(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
            raise AssertionError("a hopeless prompt was encoded")

    with pytest.raises(ContextLengthExceeded, match=r"the prompt is at least 6\d tokens; the limit is 64"):
        sequences(prompt, Unread())


@pytest.mark.parametrize(
    ("prompt", "long"),
    [
        (TextPrompt("x" * 8192), False),
        (TextPrompt("x" * 8193), True),
        (TokenPrompt((1,) * 8193), True),
        (ChatPrompt(({"role": "user", "content": "x" * 4096}, {"role": "user", "content": "x" * 4000})), False),
        (ChatPrompt(({"role": "user", "content": "x" * 4096},) * 2), True),
        (ChatPrompt(({"role": "user", "content": "x", "tool_calls": [{}]},)), True),
    ],
)
def test_prompt_is_long_when_reading_it_could_be_felt(prompt: Prompt, long: bool) -> None:
    assert intake().is_long(prompt) is long
