"""The README's examples, run as they are printed against a server started as it says, with only the port changed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT, read, run

pytestmark = pytest.mark.model


def example(language: str, holding: str) -> str:
    """The README's one code block in a language that holds a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", read("README.md"), re.DOTALL)
    (found,) = (block for block in blocks if holding in block)
    return str(found)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A ready server's port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "serve.py", "--port", str(number), "--max-model-len", "512"]
    with log.open("w") as output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as process:
        try:
            wait_until_ready(number, process, log)
            yield number
            process.terminate()
            assert process.wait(timeout=60) == 0, log.read_text()
        finally:
            process.kill()


def wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                assert json.load(answer)["ready"] is True
                return
        except (urllib.error.URLError, ConnectionError):
            assert process.poll() is None, f"exit {process.returncode}: {log.read_text()}"
            assert time.monotonic() < deadline, f"not ready within {seconds} s: {log.read_text()}"
            time.sleep(0.2)


def test_curl_example_streams_an_answer_and_ends_with_done(port: int) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not in PATH")
    command = shlex.split(example("bash", "curl").replace("\\\n", " ").replace("localhost:8000", f"127.0.0.1:{port}"))
    done = run(*command)
    assert done.returncode == 0, done.stderr
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    assert "Paris" in "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("holding", ["from openai", "websockets"])
def test_client_example_prints_the_answer(port: int, holding: str) -> None:
    code = example("python", holding)
    assert "localhost:8000" in code
    done = run(sys.executable, "-c", code.replace("localhost:8000", f"127.0.0.1:{port}"))
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_offline_example_prints_an_answer_for_each_prompt() -> None:
    done = run(sys.executable, "-c", example("python", "from nanoserve"))
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "cold" in done.stdout
