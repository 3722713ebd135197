"""The server as it starts without a flag: the real model on the native kernels. Skipped where no compiler is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

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
            messages=[{"role": "user", "content": "What is the capital of France?"}],
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
    server.wait_idle(2)


def test_penalties_bias_and_logprobs_work_when_the_head_is_native(server: Served) -> None:
    plain = answer(server, "one two one two one two", max_tokens=12, temperature=0)
    fined = answer(server, "one two one two one two", max_tokens=12, temperature=0, frequency_penalty=2)
    assert plain != fined
    body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0, "logprobs": 3}
    logprobs = server.post(TEXT, body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" Paris"]
    assert -3 < logprobs["token_logprobs"][0] < 0
    assert len(logprobs["top_logprobs"][0]) == 3


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
        waits = []
        for _ in range(20):
            started = time.monotonic()
            server.get("/livez")
            waits.append(time.monotonic() - started)
            time.sleep(0.02)
        assert all(stream.result() for stream in streams)
    assert sorted(waits)[len(waits) // 2] < 0.25, waits
