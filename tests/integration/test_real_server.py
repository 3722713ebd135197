"""The main job, end to end: a real server process, the real model, real client libraries."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import websockets

from nanoserve.source import resolve
from nanoserve.tokens import load_tokenizer
from tests.checkout import ROOT, run
from tests.serving import SERVE, Served, free_port, served

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Name the capital of France."}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
REFERENCE = ("--kernels", "reference")
"""fp32, as transformers computes; what the native kernels do is test_native_server's."""
LIMITS = ("--max-sequences", "32", "--max-model-len", "384", "--paranoid", "--self-test-seconds", "5", *REFERENCE)


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Served]:
    with served(*LIMITS) as running:
        yield running


def answer(server: Served, prompt: str | list[int], max_tokens: int, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    response = server.post(TEXT, body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_curl_streams_paris_and_done_when_asked_for_the_capital(server: Served) -> None:
    body = {"model": "smollm2-135m", "stream": True, "messages": QUESTION, "temperature": 0}
    command = ["curl", "-sN", server.url + CHAT, "-H", "content-type: application/json", "-d", json.dumps(body)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    frames = [line.removeprefix("data: ") for line in out.splitlines() if line]
    assert frames[-1] == "[DONE]"
    deltas = [json.loads(frame)["choices"][0]["delta"] for frame in frames[:-1]]
    assert "Paris" in "".join(delta.get("content") or "" for delta in deltas)


def test_openai_client_streams_paris_when_asked_for_the_capital(server: Served) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    with client:
        stream = client.chat.completions.create(
            model="smollm2-135m", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        whole = client.chat.completions.create(model="smollm2-135m", messages=QUESTION, temperature=0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert whole.choices[0].message.content == text
    assert chunks[-1].usage == whole.usage


def test_websockets_client_gets_paris_when_asked_for_the_capital(server: Served) -> None:
    async def ask() -> tuple[str, dict[str, Any]]:
        async with websockets.connect(f"ws://127.0.0.1:{server.port}/ws", subprotocols=["nanoserve.v1"]) as ws:
            await ws.send(json.dumps({"type": "generate", "id": "a", "messages": QUESTION, "temperature": 0}))
            text = ""
            async for raw in ws:
                frame = json.loads(raw)
                if frame["type"] == "token":
                    text += frame["text"]
                if frame["type"] in ("done", "error"):
                    return text, frame
        raise AssertionError("the socket ended before the generation")

    text, frame = asyncio.run(ask())
    assert "Paris" in text
    assert frame["type"] == "done"
    assert frame["finish_reason"] == "stop"
    assert frame["nanoserve"]["graph"]["replays"] == frame["nanoserve"]["graph"]["steps"] - 1


def test_golden_prompts_continue_as_transformers_does_when_greedy(server: Served) -> None:
    golden = json.loads((ROOT / "tests/data/smollm2_golden.json").read_text())["prompts"]
    assert len(golden) == 10

    tokenizer = load_tokenizer(resolve("smollm2-135m"))
    with ThreadPoolExecutor(len(golden)) as pool:
        asked = [(entry["prompt_ids"], len(entry["token_ids"])) for entry in golden]
        answers = list(pool.map(lambda pair: answer(server, *pair), asked))
    for entry, text in zip(golden, answers, strict=True):
        assert text == tokenizer.decode(entry["token_ids"]), entry["text"]


def test_answers_equal_their_solo_runs_when_32_streams_run_at_once(server: Served) -> None:
    prompts = [f"Number {n}. " + "The story so far was long. " * (n % 3) for n in range(32)]
    lengths = [2 + n % 7 for n in range(32)]
    solo = [answer(server, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda pair: answer(server, *pair), zip(prompts, lengths, strict=True)))
    assert together == solo
    server.wait_idle(20)


@pytest.mark.parametrize("stream", [True, False])
def test_generation_ends_and_blocks_are_back_when_a_client_is_killed(server: Served, stream: bool) -> None:
    aborted = server.get("/metrics")["requests"]["aborted_total"]
    body = json.dumps({"messages": QUESTION, "ignore_eos": True, "temperature": 0, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head.encode() + body)
        server.wait(lambda: server.get("/metrics")["requests"]["running"], "the request runs", 30)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with RST
    server.wait_idle(20)
    assert server.get("/metrics")["requests"]["aborted_total"] == aborted + 1


def test_no_capture_was_cold_when_every_stream_has_ended(server: Served) -> None:
    """Last but for the order of this module: it looks back on all the requests before it."""
    metrics, health = server.get("/metrics"), server.get("/health")
    graphs = metrics["graphs"]
    assert graphs["cold_captures"] == 0
    assert graphs["hit_rate"] == 1.0
    assert graphs["captured"] == graphs["warmed"] == 18  # rows 1, 2, 4, 8, 16, 32; widths 128, 256, 384
    assert graphs["replays"] > 0
    assert graphs["eager_steps"] == 0
    assert health["status"] == "ready"
    assert health["warmup"]["uncovered"] == []
    assert health["warmup"]["self_test"]["verdict"] == "passed"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 2000}]}, 400, "messages"),
        (CHAT, {"messages": QUESTION, "max_tokens": 5000}, 400, "max_tokens"),
        (CHAT, {"messages": QUESTION, "logit_bias": {"49152": 1}}, 400, "logit_bias"),
        (CHAT, {"messages": QUESTION, "model": "gpt-9"}, 404, "model"),
        (TEXT, {"prompt": [49152]}, 400, "prompt"),
        (TEXT, {"prompt": ""}, 400, "prompt"),
        (TEXT, {"prompt": "a", "stop_token_ids": [-1]}, 400, "stop_token_ids"),
        (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ],
)
def test_bad_input_is_refused_and_the_server_serves_on(
    server: Served, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert answer(server, "The capital of France is", 1) == " Paris"


def test_streams_end_truly_and_exit_code_is_0_when_told_to_stop(smollm2_path: Path) -> None:
    with served("--max-sequences", "4", "--max-model-len", "512", "--drain-seconds", "1") as server:
        body = {"messages": QUESTION, "ignore_eos": True, "temperature": 0, "stream": True}
        with server.post(CHAT, body, stream=True) as response:
            lines = response.iter_lines(decode_unicode=True)
            assert next(lines).startswith("data: ")
            with ThreadPoolExecutor(1) as pool:
                code = pool.submit(server.stop)
                rest = [line for line in lines if line]
                assert code.result() == 0
        assert "Traceback" not in server.said
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["error"]["code"] == "draining" or last["choices"][0]["finish_reason"] == "length"


def test_exit_code_is_0_when_told_to_stop_while_warming(smollm2_path: Path) -> None:
    """The engine thread is then inside native code, which the interpreter's own end would unwind and abort."""
    with served(*REFERENCE, ready=None) as server:
        server.wait(lambda: "warming" in server.errors, "the warm-up has begun", 60)
        assert server.stop() == 0
        assert "terminate called" not in server.said


def bare_seconds() -> float:
    """How long Python and the server's imports alone take now, on this machine and under its load."""
    started = time.monotonic()
    run(sys.executable, "-c", "import nanoserve.cli, server.run")
    return time.monotonic() - started


def test_a_taken_port_is_one_line_at_once(server: Served) -> None:
    started = time.monotonic()
    done = run(*SERVE, "--port", str(server.port))
    assert done.returncode == 3
    assert time.monotonic() - started < 2 + 4 * bare_seconds(), "not after torch and the weights"
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(server.port) in done.stderr


def test_a_missing_model_is_one_line_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(*SERVE, "--port", str(free_port()), "--model", tmp_path / "none.gguf")
    assert done.returncode == 4
    assert time.monotonic() - started < 2 + 4 * bare_seconds(), "not after torch and the weights"
    assert len(done.stderr.strip().splitlines()) == 1
    assert "none.gguf" in done.stderr
