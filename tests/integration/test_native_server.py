"""The server as it starts without a flag: the real model on the native kernels. Skipped where no compiler is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from nanoserve.errors import KernelBuildError
from nanoserve.kernels import native_build
from tests.serving import Served, served

pytestmark = pytest.mark.model
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Served]:
    try:
        native_build.find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    with served("--max-model-len", "2048") as running:
        yield running


def answer(server: Served, prompt: str, **fields: Any) -> str:
    response = server.post(TEXT, {"prompt": prompt, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_openai_client_streams_paris_when_flags_are_the_defaults(server: Served) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "Name the capital of France."}],
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Paris" in text
    assert server.get("/health")["kernels"].startswith("native (")


def test_answers_equal_their_solo_runs_when_40_streams_share_32_rows(server: Served) -> None:
    """Greedy and seeded, prompts from 3 to 400 tokens, more streams than rows."""
    asks: list[dict[str, Any]] = [
        {
            "prompt": f"Number {n}. " + "The story so far was long and strange. " * (n * 13 % 50),
            "max_tokens": 8 + n % 24,
            **({"temperature": 0} if n % 2 else {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": n}),
        }
        for n in range(40)
    ]
    solo = [answer(server, **ask) for ask in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        together = list(pool.map(lambda ask: answer(server, **ask), asks))
    assert together == solo
    server.wait_idle(20)


def test_penalties_bias_and_logprobs_work_when_the_head_is_native(server: Served) -> None:
    plain = answer(server, "one two one two one two", max_tokens=12, temperature=0)
    fined = answer(server, "one two one two one two", max_tokens=12, temperature=0, frequency_penalty=2)
    assert plain != fined
    body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0, "logprobs": 3}
    logprobs = server.post(TEXT, body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" Paris"]
    assert -3 < logprobs["token_logprobs"][0] < 0
    assert len(logprobs["top_logprobs"][0]) == 3


# --- the prefix cache

STORY = "The keeper of the lighthouse wrote down what the sea had brought that day, and the day before. "


def chat(server: Served, messages: list[dict[str, str]], **fields: Any) -> tuple[str, Any]:
    """The answer, greedy, and its usage, by the OpenAI client."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        whole = client.chat.completions.create(
            model="smollm2-135m", messages=messages, temperature=0, max_tokens=24, **fields
        )
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    return str(whole.choices[0].message.content), whole.usage


def test_second_turn_computes_little_and_answers_the_same_when_its_history_is_cached(server: Served) -> None:
    turn = [{"role": "user", "content": STORY * 85 + "Who keeps the lighthouse?"}]
    before = server.get("/metrics")["tokens"]
    answered, first = chat(server, turn)
    assert 1_700 < first.prompt_tokens < 2_000
    turn += [{"role": "assistant", "content": answered}, {"role": "user", "content": "And what did he write?"}]
    cached, second = chat(server, turn)
    after = server.get("/metrics")["tokens"]
    computed = second.prompt_tokens - second.prompt_tokens_details.cached_tokens
    assert first.prompt_tokens_details.cached_tokens <= 16, "the template's own words"
    assert 0 < computed < 0.05 * first.prompt_tokens
    assert second.prompt_tokens_details.cached_tokens % 16 == 0
    queried = after["prefix_queried_total"] - before["prefix_queried_total"]
    assert queried == after["prompt_total"] - before["prompt_total"] == first.prompt_tokens + second.prompt_tokens
    found = sum(usage.prompt_tokens_details.cached_tokens for usage in (first, second))
    assert after["prefix_cached_total"] - before["prefix_cached_total"] == found
    alone, isolated = chat(server, turn, extra_body={"cache_salt": "another tenant"})
    assert isolated.prompt_tokens_details.cached_tokens == 0
    assert alone == cached


def test_choices_and_streams_share_the_prompt_they_arrive_with_at_once(server: Served) -> None:
    """Eight requests of two choices each: one of the sixteen computes the prompt's full blocks."""
    before = server.get("/metrics")["tokens"]
    body = {"prompt": STORY * 20, "max_tokens": 8, "n": 2, "temperature": 0.9, "seed": 5, "cache_salt": "crowd"}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post(TEXT, body).json(), range(8)))
    assert len({tuple(choice["text"] for choice in each["choices"]) for each in answers}) == 1
    after = server.get("/metrics")["tokens"]
    tokens = answers[0]["usage"]["prompt_tokens"]
    assert after["prefix_queried_total"] - before["prefix_queried_total"] == 16 * tokens
    assert after["prefix_cached_total"] - before["prefix_cached_total"] == 15 * ((tokens - 1) // 16 * 16)
    cached = sorted(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers)
    assert cached == [0] + [(tokens - 1) // 16 * 16] * 7


def test_usage_over_the_socket_and_in_a_stream_says_what_was_cached(server: Served) -> None:
    ask = {"prompt": STORY * 4, "max_tokens": 2, "temperature": 0, "cache_salt": "wire"}
    assert answer(server, **ask)
    with connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=[Subprotocol("nanoserve.v1")]) as socket:
        socket.send(json.dumps({"type": "generate", "id": "a", **ask}))
        while (event := json.loads(socket.recv(timeout=60)))["type"] != "done":
            assert event["type"] != "error", event
    usage = event["usage"]
    expected = (usage["prompt_tokens"] - 1) // 16 * 16
    assert usage["prompt_tokens_details"]["cached_tokens"] == expected > 0
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        chunks = client.completions.create(
            model="smollm2-135m",
            prompt=ask["prompt"],
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": "wire"},
        )
        last = list(chunks)[-1]
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == expected


def test_every_step_replayed_a_warm_graph_when_all_has_been_served(server: Served) -> None:
    graphs = server.get("/metrics")["graphs"]
    assert (graphs["read"], graphs["backend"]) == ("paged", "native")
    assert (graphs["cold_captures"], graphs["eager_steps"], graphs["prefill_eager_steps"]) == (0, 0, 0)
    assert graphs["hit_rate"] == 1.0
    warmup = server.get("/health")["warmup"]
    assert warmup["uncovered"] == []
    assert warmup["self_test"]["verdict"] == "passed"
    assert warmup["self_test"]["max_difference"] == 0.0


def test_step_loop_leaves_the_event_loop_responsive_when_every_row_is_busy(server: Served) -> None:
    with ThreadPoolExecutor(9) as pool:
        streams = [pool.submit(answer, server, f"Story {n}", max_tokens=150, temperature=0) for n in range(8)]
        answered = 0
        while not any(stream.done() for stream in streams):
            server.get("/livez")
            answered += 1
        assert all(stream.result() for stream in streams)
    assert answered > 10, "while 150 steps ran"
