"""The README's examples, run as they are printed against a server started as it says, with only the port changed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.checkout import read, run
from tests.serving import served

pytestmark = pytest.mark.model


def example(language: str, holding: str) -> str:
    """The README's one code block in a language that holds a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", read("README.md"), re.DOTALL)
    (found,) = (block for block in blocks if holding in block)
    return str(found)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A ready server's port."""
    with served("--max-model-len", "512") as server:
        yield server.port
        assert server.stop() == 0, server.said


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
