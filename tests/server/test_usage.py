"""`usage` in streams: at the end, in every chunk, or nowhere, as `stream_options` asks."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.fake_engine import Script
from tests.server.support import CHAT, HELLO, TEXT, Running, error_of

CONTINUOUS = {"continuous_usage_stats": True}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}, "absent"])
def test_stream_has_no_usage_when_it_is_not_asked_for(server: Running, options: Any) -> None:
    body = HELLO if options == "absent" else HELLO | {"stream_options": options}
    assert all("usage" not in chunk for chunk in server.stream(CHAT, body))


@pytest.mark.parametrize(("n", "limit"), [(1, None), (2, None), (2, 3)])
def test_stream_has_one_usage_chunk_last_when_asked_for(server: Running, n: int, limit: int | None) -> None:
    body = HELLO | {"n": n, "max_tokens": limit}
    chunks = server.stream(CHAT, body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == server.post(CHAT, body).json()["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] is not None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "prompt"), [(CHAT, HELLO), (TEXT, {"prompt": "x y", "max_tokens": 5})])
def test_every_chunk_counts_the_tokens_so_far_when_asked_for(
    server: Running, path: str, prompt: dict[str, Any], n: int
) -> None:
    body = prompt | {"n": n}
    whole = server.post(path, body).json()["usage"]
    chunks = server.stream(path, body | {"stream_options": CONTINUOUS})
    assert all(set(chunk["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"} for chunk in chunks)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole["prompt_tokens"]}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    # One delta is one token of the script, except where a slow reader finds several merged.
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == whole["completion_tokens"]
    assert [chunk["usage"]["total_tokens"] - whole["prompt_tokens"] for chunk in chunks] == counts
    assert all(chunk["choices"] for chunk in chunks), "a chunk of nothing but usage is include_usage's"


def test_chunk_counts_the_tokens_before_it_that_printed_nothing(server: Running) -> None:
    server.engine.script = lambda request: Script(tokens=("", "", "a", "", "b"), delay=0.005)
    chunks = server.stream(TEXT, {"prompt": "x", "stream_options": CONTINUOUS})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    counted = {chunk["choices"][0]["text"]: chunk["usage"]["completion_tokens"] for chunk in chunks}
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert counted.get("a", 3) == 3


def test_usage_covers_all_prompts_when_a_completion_has_several(server: Running) -> None:
    body = {"prompt": ["x", "x y z"], "max_tokens": 4}
    whole = server.post(TEXT, body).json()["usage"]
    last = server.stream(TEXT, body | {"stream_options": CONTINUOUS})[-1]["usage"]
    assert whole == {**last, "prompt_tokens_details": whole["prompt_tokens_details"]}


def test_openai_client_sees_the_usage_of_every_chunk_and_of_the_whole(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_body={"stream_options": {"include_usage": True, **CONTINUOUS}},
        )
        *chunks, last = list(stream)
    assert last.usage is not None
    assert not last.choices
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == last.usage.completion_tokens == len(Script().tokens)
    assert all(chunk.usage is not None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("value", [False, None])
def test_stream_is_as_ever_when_continuous_usage_is_declined(server: Running, value: bool | None) -> None:
    options = {"continuous_usage_stats": value}
    assert all("usage" not in chunk for chunk in server.stream(CHAT, HELLO | {"stream_options": options}))
    *chunks, last = server.stream(CHAT, HELLO | {"stream_options": {**options, "include_usage": True}})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["completion_tokens"] == len(Script().tokens)


def test_request_is_refused_when_continuous_usage_is_no_boolean(server: Running) -> None:
    response = server.post(CHAT, HELLO | {"stream": True, "stream_options": {"continuous_usage_stats": "yes"}})
    assert response.status_code == 400
    assert "continuous_usage_stats" in error_of(response)["message"]
