from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.errors import ClientError, InvalidRequest, ModelNotFound, Unsupported
from nanoserve.request import ChatPrompt, SamplingParams, TextPrompt, TokenPrompt
from server.schemas import ChatBody, CompletionBody, SamplingBody, decode
from server.translate import Job, Served, chat_job, completion_job

SERVED = Served(("m", "alias"), {})
USER = [{"role": "user", "content": "x"}]


def chat(served: Served = SERVED, **body: Any) -> Job:
    return chat_job(decode(json.dumps({"messages": USER, **body}), ChatBody), served, "id")


def text(served: Served = SERVED, **body: Any) -> Job:
    return completion_job(decode(json.dumps({"prompt": "x", **body}), CompletionBody), served, "id")


def params(**body: Any) -> SamplingParams:
    return chat(**body).requests[0].params


def rendered(*messages: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    prompt = chat(messages=list(messages)).requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


# --- the prefix cache


def test_salt_reaches_every_request_of_a_body() -> None:
    assert [request.cache_salt for request in text(prompt=["a", "b"], cache_salt="tenant").requests] == ["tenant"] * 2
    assert chat(cache_salt=None).requests[0].cache_salt == chat().requests[0].cache_salt == ""


@pytest.mark.parametrize(("salt", "said"), [("", "cache_salt is empty; send at least one"), (5, "wrong type")])
def test_salt_is_refused_when_it_would_isolate_nobody(salt: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        chat(cache_salt=salt)
    assert caught.value.param == "cache_salt"


# --- ranges


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (0, 1e-7, 1e-5, 1e-4, 1e-3, 2)],
        *[("top_p", value) for value in (1e-6, 0.5, 1)],
        *[("top_k", value) for value in (1, 50, 2**31 - 1)],
        *[("min_p", value) for value in (0, 1)],
        *[("presence_penalty", value) for value in (-2, 2)],
        *[("frequency_penalty", value) for value in (-2, 1.05, 2)],
        *[("repetition_penalty", value) for value in (0.5, 1, 2)],
        *[("seed", value) for value in (0, -1, 2**63 - 1, -(2**63))],
        *[("n", value) for value in (1, 128)],
        ("max_tokens", 1),
    ],
)
def test_value_reaches_the_params_when_it_is_inside_the_range(field: str, value: float) -> None:
    assert getattr(params(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-1, -1e-9, 2.0001, 100)],
        *[("top_p", value) for value in (0, -0.1, 1.5)],
        *[("top_k", value) for value in (-2, -5, 2**31, 1.5)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("presence_penalty", value) for value in (-2.5, 2.5)],
        *[("frequency_penalty", value) for value in (-2.5, 2.5)],
        *[("repetition_penalty", value) for value in (0, -1, 11)],
        *[("seed", value) for value in (2**63, 10**40, 0.5)],
        *[("n", value) for value in (0, -1, 129, 1.5)],
        *[("max_tokens", value) for value in (0, -1, 2**31, 10**30, 3.7)],
        *[("max_completion_tokens", value) for value in (0, -5)],
        *[("timeout", value) for value in (0, -1, 1e9)],
        *[("top_logprobs", value) for value in (-1, 21)],
    ],
)
def test_request_is_refused_naming_the_field_when_a_value_is_outside_the_range(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{"logprobs": True, field: value})
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize("field", ["temperature", "n", "max_tokens", "top_k", "seed"])
@pytest.mark.parametrize("value", ["3", True, [1], {}])
def test_request_is_refused_when_a_number_has_another_type(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_request_is_refused_when_a_number_is_not_finite(raw: str) -> None:
    with pytest.raises(InvalidRequest):
        decode(f'{{"messages":[{{"role":"user","content":"x"}}],"temperature":{raw}}}', ChatBody)


@pytest.mark.parametrize("value", [-1, 0])
def test_top_k_is_off_when_zero_or_minus_one(value: int) -> None:
    assert params(top_k=value).top_k == 0


def test_integral_floats_are_integers_when_sent() -> None:
    got = params(n=2.0, max_tokens=16.0, seed=3.0, top_k=5.0)
    assert (got.n, got.max_tokens, got.seed, got.top_k) == (2, 16, 3, 5)
    assert all(isinstance(value, int) for value in (got.n, got.max_tokens, got.seed, got.top_k))


def test_message_gives_actual_and_limit_when_a_value_is_outside() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature is 3; the limit is 0\.0 to 2\.0"):
        chat(temperature=3)


def test_error_is_short_when_an_integer_has_thousands_of_digits() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode('{"messages":[{"role":"user","content":"x"}],"n":%s}' % ("9" * 20_000), ChatBody)
    assert len(caught.value.message) < 200


# --- absent, null, aliases, unknown


def test_null_equals_absent_when_every_optional_field_is_null() -> None:
    fields = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    assert chat(**dict.fromkeys(fields)) == chat()
    fields = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]
    assert text(**dict.fromkeys(fields)) == text()


def test_unknown_fields_are_ignored_when_sent() -> None:
    extra = {"foo": 1, "user": "u", "store": False, "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True}
    assert chat(**extra) == chat()


def test_the_newer_name_wins_when_both_limits_are_sent() -> None:
    assert params(max_completion_tokens=5).max_tokens == 5
    assert params(max_completion_tokens=5, max_tokens=50).max_tokens == 5


def test_default_limit_is_the_context_for_chat_and_16_for_completions() -> None:
    assert params().max_tokens is None
    assert text().requests[0].params.max_tokens == 16


def test_defaults_of_the_model_apply_when_the_client_sends_nothing() -> None:
    served = Served(("m",), {"temperature": 0.2, "top_k": 40, "top_p": 0.9, "unknown": 7})
    got = chat(served).requests[0].params
    assert (got.temperature, got.top_k, got.top_p) == (0.2, 40, 0.9)
    got = chat(served, temperature=1, top_k=-1, top_p=None).requests[0].params
    assert (got.temperature, got.top_k, got.top_p) == (1.0, 0, 0.9)


def test_openai_defaults_apply_when_the_model_has_none() -> None:
    got = params()
    assert (got.temperature, got.top_p, got.n, got.stop) == (1.0, 1.0, 1, ())


@pytest.mark.parametrize("empty", [{"tools": []}, {"tools": None}, {"response_format": {"type": "text"}}])
def test_request_is_taken_when_an_unsupported_field_asks_for_nothing(empty: dict[str, Any]) -> None:
    assert chat(**empty) == chat()


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("response_format", {"response_format": {"type": "json_object"}}),
    ],
)
def test_chat_is_refused_when_it_needs_what_is_unsupported(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        chat(**body)
    assert (caught.value.param, caught.value.code) == (param, "unsupported")


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("suffix", {"suffix": "end"}),
        ("best_of", {"best_of": 3}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("echo", {"echo": True, "prompt": [1, 2]}),
    ],
)
def test_completion_is_refused_when_it_needs_what_is_unsupported(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        text(**body)
    assert caught.value.param == param


def test_best_of_is_taken_when_it_equals_n() -> None:
    assert text(best_of=2, n=2).requests[0].params.n == 2


def test_model_is_the_served_one_when_absent_and_refused_when_unknown() -> None:
    assert chat().model == "m"
    assert chat(model="alias").model == "alias"
    with pytest.raises(ModelNotFound, match="this server has: m, alias") as caught:
        chat(model="gpt-4")
    assert caught.value.param == "model"


# --- stops, token ids, biases


def test_empty_stops_are_dropped_when_sent() -> None:
    assert params(stop="").stop == ()
    assert params(stop=[]).stop == ()
    assert params(stop=["a", "", "b"]).stop == ("a", "b")
    assert params(stop="end").stop == ("end",)


def test_stop_is_refused_when_it_is_longer_than_any_answer_needs() -> None:
    assert params(stop=["x" * 1024]).stop == ("x" * 1024,)
    with pytest.raises(InvalidRequest, match=r"a stop string has 1,025 characters; the limit is 1,024") as caught:
        chat(stop=["a", "x" * 1025])
    assert caught.value.param == "stop"


def test_stop_is_refused_when_it_has_five_entries() -> None:
    with pytest.raises(InvalidRequest, match="stop has 5 entries; the limit is 4"):
        chat(stop=list("abcde"))


@pytest.mark.parametrize("key", ["abc", "-1", "1.5", "", " 1", "99999999999999", "٣"])
def test_logit_bias_is_refused_naming_the_key_when_it_is_no_token_id(key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(logit_bias={key: 1})
    assert caught.value.param == "logit_bias"
    assert repr(key) in caught.value.message


@pytest.mark.parametrize("value", [1e9, 100.5, "x", True])
def test_logit_bias_is_refused_when_a_value_is_outside_the_range(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        chat(logit_bias={"5": value})


def test_logit_bias_reaches_the_params_when_legal() -> None:
    assert params(logit_bias={"5": 100, "7": -100}).logit_bias == ((5, 100.0), (7, -100.0))


@pytest.mark.parametrize("ids", [[-1], [2**62], [1.5], [True], ["a"]])
def test_stop_token_ids_are_refused_when_one_is_no_token_id(ids: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        chat(stop_token_ids=ids)


# --- logprobs


@pytest.mark.parametrize(
    ("body", "expected"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)],
)
def test_chat_logprobs_count_alternatives_when_asked_for(body: dict[str, Any], expected: int | None) -> None:
    assert params(**body).logprobs == expected


def test_top_logprobs_are_refused_when_logprobs_is_off() -> None:
    with pytest.raises(InvalidRequest, match="top_logprobs needs logprobs"):
        chat(top_logprobs=2)


def test_completion_logprobs_are_a_number_when_sent() -> None:
    assert text(logprobs=0).requests[0].params.logprobs == 0
    assert text(logprobs=3).requests[0].params.logprobs == 3
    with pytest.raises(InvalidRequest):
        text(logprobs=True)


# --- prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt((1, 2)),)),
        ([1.0, 2], (TokenPrompt((1, 2)),)),
        ([[1], [2, 3]], (TokenPrompt((1,)), TokenPrompt((2, 3)))),
        (list(range(500)), (TokenPrompt(tuple(range(500))),)),
    ],
)
def test_prompt_becomes_one_request_each_when_it_has_any_of_the_four_forms(prompt: Any, expected: Any) -> None:
    job = text(prompt=prompt)
    assert tuple(request.prompt for request in job.requests) == expected
    assert len({request.request_id for request in job.requests}) == len(expected)


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [[1], []],
        [[-1]],
        [[2**62]],
        [[1.5]],
        [[True]],
        [True],
        ["a", 1],
        [[1], "a"],
        [None],
        5,
        {},
        ["a"] * 129,
    ],
)
def test_prompt_is_refused_when_it_has_another_form(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        text(prompt=prompt)
    assert (caught.value.param or "").startswith("prompt")


def test_prompts_are_refused_when_there_are_too_many() -> None:
    with pytest.raises(InvalidRequest, match="prompt has 129 entries; the limit is 128"):
        text(prompt=["a"] * 129)


def test_prompts_are_refused_when_their_choices_are_too_many() -> None:
    with pytest.raises(InvalidRequest, match="64 prompts x 3 choices is 192; the limit is 128"):
        text(prompt=["a"] * 64, n=3)


def test_token_ids_are_the_same_when_one_of_a_million_is_a_float() -> None:
    many = [7] * 1_000_000
    whole, mixed = (text(prompt=ids).requests[0].prompt for ids in ([*many, 8], [*many, 8.0]))
    assert whole == mixed == TokenPrompt((*many, 8))
    with pytest.raises(InvalidRequest, match=r"prompt\[1000000\] is -1"):
        text(prompt=[*many, -1])


# --- messages


@pytest.mark.parametrize(
    "messages",
    [USER * 4097, [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4096}, *USER]],
    ids=["messages", "parts"],
)
def test_messages_are_refused_when_they_and_their_parts_are_too_many(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest, match=r"messages has 4,097 entries, text parts counted; the limit is 4,096"):
        chat(messages=messages)
    assert len(rendered(*USER * 4096)) == 4096


def test_parts_are_joined_when_content_is_a_list() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert rendered({"role": "user", "content": parts})[0]["content"] == "A\nB"
    assert rendered({"role": "user", "content": []})[0]["content"] == ""
    assert rendered({"role": "user", "content": ""})[0]["content"] == ""


def test_null_content_is_empty_when_the_assistant_called_a_tool() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    got = rendered(
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    )
    assert got[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert got[2] == {"role": "tool", "content": "42", "tool_call_id": "c"}


def test_developer_is_system_when_rendered() -> None:
    assert rendered({"role": "developer", "content": "x"})[0]["role"] == "system"


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("messages[0].content", {"role": "user", "content": 5}),
        ("messages[0].content", {"role": "user"}),
        ("messages[0].content", {"role": "user", "content": None}),
        ("messages[0].content", {"role": "assistant", "content": None}),
        ("messages[0].content[0]", {"role": "user", "content": [5]}),
        ("messages[0].content[0]", {"role": "user", "content": [{"text": "x"}]}),
        ("messages[0].content[0]", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}),
        ("messages[0].content[0].text", {"role": "user", "content": [{"type": "text"}]}),
        ("messages[0].role", {"role": "wizard", "content": "x"}),
        ("messages[0].role", {"content": "x"}),
    ],
)
def test_message_is_refused_naming_its_place_when_it_has_another_shape(param: str, message: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as caught:
        chat(messages=[message])
    assert caught.value.param == param


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": None}, {"messages": "x"}])
def test_chat_is_refused_when_there_are_no_messages(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    assert caught.value.param == "messages"


def test_missing_field_is_named_when_the_body_is_empty() -> None:
    with pytest.raises(InvalidRequest, match="messages is missing") as caught:
        decode(b"{}", ChatBody)
    assert caught.value.param == "messages"


# --- anything at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
def test_any_json_is_a_job_or_a_client_error_when_decoded(fields: dict[str, Any], as_chat: bool) -> None:
    body = ({"messages": USER} if as_chat else {"prompt": "x"}) | fields
    kind: type[SamplingBody] = ChatBody if as_chat else CompletionBody
    try:
        decoded = decode(json.dumps(body), kind)
        job = chat_job(decoded, SERVED, "i") if isinstance(decoded, ChatBody) else completion_job(decoded, SERVED, "i")
    except ClientError:
        return
    assert 1 <= job.choices <= 128


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_a_client_error_when_decoded(raw: bytes) -> None:
    outcome: ChatBody | ClientError
    try:
        outcome = decode(raw, ChatBody)
    except ClientError as error:
        outcome = error
    assert isinstance(outcome, ChatBody) or outcome.code in (None, "invalid_json")


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"messages":' * 20_000, b'{"logit_bias":' + b'{"a":' * 20_000])
def test_body_is_refused_when_it_is_nested_too_deeply(raw: bytes) -> None:
    with pytest.raises(ClientError):
        decode(raw, ChatBody)
