"""The generating routes through real clients: whole answers, streams, choices, prompts, errors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from nanoserve.errors import ContextLengthExceeded, EngineFailed, QueueFull
from nanoserve.request import ChatPrompt
from server.schemas import LONG_BODY
from tests.server.fake_engine import Script
from tests.server.support import CHAT, HELLO, TEXT, Running, error_of, serving

ANSWER = "".join(Script().tokens)
NO_REQUESTS = [b"", b"{", b"nonsense", b"[]", b"null", b'"x"', b"\xff", b"[" * 50_000, b'{"a":"\\ud800"}']


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


# --- one body


def test_chat_answers_with_one_body_when_not_streaming(server: Running) -> None:
    body = server.post(CHAT, HELLO).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "scripted"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert body["usage"]["completion_tokens"] == len(Script().tokens)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert set(body["nanoserve"]["graph"]) == {"steps", "replays", "eager_steps", "mean_pad_rows"}
    assert set(body["nanoserve"]["timings"]) == {"queue_seconds", "prefill_seconds", "decode_seconds", "ttft_seconds"}


def test_completion_answers_with_one_body_when_not_streaming(server: Running) -> None:
    body = server.post(TEXT, {"prompt": "x", "max_tokens": 3}).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "The capital of ", "logprobs": None, "finish_reason": "length"},
    ]


def test_stream_says_what_the_body_says_when_both_are_asked(server: Running) -> None:
    whole = server.post(CHAT, HELLO).json()
    chunks = server.stream(CHAT, HELLO | {"stream_options": {"include_usage": True}})
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]


# --- role, deltas and the finish reason


@pytest.mark.parametrize("limit", [1, 2, 16])
def test_stream_has_one_role_and_one_finish_reason_when_it_ends(server: Running, limit: int) -> None:
    chunks = server.stream(CHAT, HELLO | {"max_tokens": limit})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == ("length" if limit < len(Script().tokens) else "stop")
    assert all(choice["delta"].get("content") for choice in choices)
    assert [i for i, chunk in enumerate(chunks) if "nanoserve" in chunk] == [len(chunks) - 1]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_reason_is_stop_when_the_end_token_comes_exactly_at_the_limit(server: Running) -> None:
    limit = len(Script().tokens)
    assert server.post(CHAT, HELLO | {"max_tokens": limit}).json()["choices"][0]["finish_reason"] == "stop"


def test_middle_chunks_are_never_empty_when_tokens_print_nothing(server: Running) -> None:
    server.engine.script = lambda request: Script(tokens=("a", "", "", "b", ""), delay=0.005)
    choices = [chunk["choices"][0] for chunk in server.stream(CHAT, HELLO)]
    assert [choice["delta"].get("content") for choice in choices] == ["a", "b", None]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}


def test_stream_has_role_and_empty_content_when_the_answer_is_empty(server: Running) -> None:
    server.engine.script = lambda request: Script(tokens=())
    [chunk] = server.stream(CHAT, HELLO)
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"


def test_timeout_is_length_with_a_detail_when_the_request_times_out(server: Running) -> None:
    server.engine.script = lambda request: Script(finish="timeout")
    body = server.post(CHAT, HELLO).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["nanoserve"]["finish_detail"] == "timeout"
    assert server.stream(CHAT, HELLO)[-1]["nanoserve"]["finish_detail"] == "timeout"


# --- choices and prompts


def test_choices_have_all_indices_and_one_reason_each_when_n_is_four(server: Running) -> None:
    body = HELLO | {"n": 4, "seed": 3, "max_tokens": 5}
    whole = server.post(CHAT, body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["completion_tokens"] == 20
    texts, reasons, roles = [""] * 4, [[] for _ in range(4)], [0] * 4
    for chunk in server.stream(CHAT, body):
        [choice] = chunk["choices"]
        index = choice["index"]
        texts[index] += choice["delta"].get("content", "")
        roles[index] += "role" in choice["delta"]
        reasons[index] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 4
    assert reasons == [["length"]] * 4
    assert roles == [1] * 4


def test_prompts_are_numbered_through_when_there_are_several(server: Running) -> None:
    body = {"prompt": ["a b", "c"], "n": 2, "max_tokens": 3}
    whole = server.post(TEXT, body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    chunks = server.stream(TEXT, body)
    ended = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ended) == [0, 1, 2, 3]
    assert [i for i, chunk in enumerate(chunks) if "nanoserve" in chunk] == [len(chunks) - 1]


def test_answer_starts_with_the_prompt_when_echo_is_set(server: Running) -> None:
    body = {"prompt": ["one: ", "two: "], "n": 2, "max_tokens": 1, "echo": True}
    texts = [choice["text"] for choice in server.post(TEXT, body).json()["choices"]]
    assert texts == ["one: 0:The ", "one: 1:The ", "two: 0:The ", "two: 1:The "]
    streamed = [""] * 4
    for chunk in server.stream(TEXT, body):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


def test_nothing_runs_when_the_second_of_two_prompts_is_refused(server: Running) -> None:
    assert server.post(TEXT, {"prompt": [[1, 2], [5000]], "max_tokens": 500}).status_code == 400
    server.wait_idle(0.5)
    assert len(server.engine.aborted) == 1


# --- logprobs


def test_chat_logprobs_cover_every_token_when_asked_for(server: Running) -> None:
    server.engine.script = lambda request: Script(tokens=("a", "", "b"))
    body = HELLO | {"logprobs": True, "top_logprobs": 2}
    [choice] = server.post(CHAT, body).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "", "b"]
    assert entries[0]["bytes"] == [97]
    assert [other["logprob"] for other in entries[0]["top_logprobs"]] == [-0.5, -9999.0]
    chunks = server.stream(CHAT, body)
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == entries


def test_completion_logprobs_are_four_lists_when_asked_for(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 2, "logprobs": 1}
    logprobs = server.post(TEXT, body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["The ", "capital "]
    assert logprobs["text_offset"] == [0, 4]
    assert logprobs["top_logprobs"] == [{"alt0": -0.5}, {"alt0": -0.5}]
    chunks = server.stream(TEXT, body)
    assert [offset for c in chunks for offset in c["choices"][0]["logprobs"]["text_offset"]] == [0, 4]


# --- the openai client


def test_openai_client_reads_whole_answers_and_streams(server: Running) -> None:
    with client_of(server) as client:
        whole = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == ANSWER
        stream = client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(Script().tokens)
        text = client.completions.create(model="scripted", prompt="hi", max_tokens=2, logprobs=1)
        assert text.choices[0].text == "The capital "
        assert [model.id for model in client.models.list()] == ["scripted"]
        assert client.models.retrieve("scripted").id == "scripted"


def test_openai_stream_helper_collects_the_answer(server: Running) -> None:
    with client_of(server) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        with client.chat.completions.stream(model="scripted", messages=messages, n=2) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
    assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]
    assert final.choices[1].message.content == "".join(f"1:{token}" for token in Script().tokens)


def test_openai_client_raises_its_own_errors(server: Running) -> None:
    with client_of(server) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError, match="this server has: scripted"):
            client.chat.completions.create(model="nope", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="scripted", messages=messages, temperature=7)
        server.engine.script = lambda request: Script(fail_after=2, delay=0.005)
        with pytest.raises(openai.APIError, match="the scripted step raised"):
            list(client.chat.completions.create(model="scripted", messages=messages, stream=True))


# --- errors


def test_failure_is_one_frame_before_done_when_a_stream_has_begun(server: Running) -> None:
    server.engine.script = lambda request: Script(fail_after=2, delay=0.005)
    chunks = server.stream(CHAT, HELLO | {"stream_options": {"include_usage": True}})
    assert [set(chunk) == {"error"} for chunk in chunks] == [False, False, True]
    assert chunks[-1]["error"]["code"] == "generation_failed"
    assert "the scripted step raised" in chunks[-1]["error"]["message"]


def test_failure_is_a_500_when_not_streaming(server: Running) -> None:
    server.engine.script = lambda request: Script(fail_after=2)
    response = server.post(CHAT, HELLO)
    assert response.status_code == 500
    assert error_of(response)["code"] == "generation_failed"


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (QueueFull("full", retry_after_seconds=2.2), 429, "queue_full", "3"),
        (QueueFull("full", retry_after_seconds=9999), 429, "queue_full", "120"),
        (QueueFull("full", retry_after_seconds=0), 429, "queue_full", "1"),
        (EngineFailed("dead"), 503, "engine_failed", None),
        (ContextLengthExceeded("too long"), 400, "context_length_exceeded", None),
        (RuntimeError("secret"), 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_refusal_has_status_code_and_retry_after_when_submit_raises(
    server: Running, error: Exception, status: int, code: str, retry_after: str | None, stream: bool
) -> None:
    server.engine.submit_error = error
    response = server.post(CHAT, HELLO | {"stream": stream})
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in response.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b"[]", b"null", b'"x"', b"\xff", b"[" * 50_000, b'{"a":"\\ud800"}']
)
def test_body_is_refused_and_the_server_goes_on_when_it_is_no_request(server: Running, path: str, raw: bytes) -> None:
    response = server.post_raw(path, raw)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert server.post(CHAT, HELLO).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [[1000]]},
        {"prompt": [[-1]]},
        {"prompt": [[2**62]]},
        {"prompt": "x", "stop_token_ids": [1000]},
        {"prompt": "x", "logit_bias": {"1000": 1}},
        {"prompt": "x", "logit_bias": {"abc": 1}},
        {"prompt": "x", "n": 0},
    ],
)
def test_neighbour_is_undisturbed_when_a_bad_request_is_refused(server: Running, body: dict[str, Any]) -> None:
    server.engine.script = lambda request: Script(delay=0.01)
    with server.session.post(server.url + CHAT, json=HELLO | {"stream": True}, stream=True, timeout=30) as neighbour:
        response = server.session.post(server.url + TEXT, json=body, timeout=30)
        assert response.status_code == 400
        assert "error" in response.json()
        lines = [json.loads(line[6:]) for line in neighbour.iter_lines() if line.startswith(b"data: {")]
    assert "".join(line["choices"][0]["delta"].get("content", "") for line in lines) == ANSWER


def test_logit_bias_is_taken_when_the_key_is_the_last_token(server: Running) -> None:
    assert server.post(TEXT, {"prompt": "x", "logit_bias": {"999": 1}}).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_body_is_refused_with_the_remedy_when_it_is_not_declared_as_json(server: Running, content_type: str) -> None:
    response = server.post_raw(CHAT, json.dumps(HELLO).encode(), content_type)
    assert response.status_code == 415
    assert "-H 'content-type: application/json'" in error_of(response)["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
def test_body_is_taken_when_it_is_declared_as_json(server: Running, content_type: str) -> None:
    assert server.post_raw(CHAT, json.dumps(HELLO).encode(), content_type).status_code == 200


@pytest.mark.parametrize("size", [1000, LONG_BODY + 1])
def test_long_body_is_read_off_the_loop_and_answered_or_refused_alike(server: Running, size: int) -> None:
    body = {"messages": [{"role": "user", "content": "x" * size}]}
    assert server.post(CHAT, body).status_code == 200
    assert server.engine.requests[-1].prompt == ChatPrompt(({"role": "user", "content": "x" * size},))
    refused = server.post(CHAT, body | {"temperature": 9})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert server.post_raw(CHAT, b"{" + b" " * size).json()["error"]["code"] == "invalid_json"


def test_priority_reaches_the_engine_and_has_a_range(server: Running) -> None:
    for sent, seen in ((None, 0), (-3, -3), (7.0, 7)):
        assert server.post(CHAT, HELLO | {"priority": sent}).status_code == 200
        assert server.engine.requests[-1].priority == seen
    refused = server.post(CHAT, HELLO | {"priority": 1001})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_models_show_the_enforced_length(server: Running) -> None:
    [model] = server.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("scripted", "model", 2048)
    assert server.get("/v1/models/scripted").json() == model
    response = server.get("/v1/models/org/other")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_served_name_replaces_the_engines_when_configured() -> None:
    with serving(served_model_name="org/name") as server:
        assert server.get("/v1/models/org/name").json()["id"] == "org/name"
        assert server.post(CHAT, HELLO | {"model": "org/name"}).json()["model"] == "org/name"
        assert server.post(CHAT, HELLO | {"model": "scripted"}).status_code == 404
        assert server.get("/health").json()["model"] == "org/name"


def test_both_texts_reach_the_engine_when_content_is_parts(server: Running) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    server.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == ({"role": "user", "content": "A\nB"},)


def test_headers_come_at_once_and_pings_follow_when_a_stream_waits_in_the_queue() -> None:
    with serving(ping_seconds=0.05) as server:
        server.engine.script = lambda request: Script(tokens=("a",), queue_seconds=2.0)
        with server.post(CHAT, HELLO | {"stream": True}, stream=True) as response:
            assert response.status_code == 200
            assert server.engine.running, "the headers did not wait for the first token"
            raw = response.content
        assert raw.startswith(b": ping\n\n")
        assert raw.endswith(b"data: [DONE]\n\n")
