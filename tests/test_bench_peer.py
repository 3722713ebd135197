"""`nanoserve bench peer`: the same work for everybody, ratios of medians, what is said of a peer that is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoserve.bench.contenders import Missing, q4_0_file
from nanoserve.bench.peer import Figure, first_context
from nanoserve.bench.peer_worker import prompt_ids
from nanoserve.cli import main
from nanoserve.errors import ConfigError
from tests.checkout import ROOT
from tests.models.gguf_writer import write_gguf
from tests.server.support import wait_until
from tests.tiny_folder import write_served_model
from tests.tiny_server import warm_server

FAKE = """\
#!{python}
# An interpreter whose every engine takes half a second a step and a quarter for a prompt, by its own account.
import json, shutil, sys
if sys.argv[3:]:
    {makes}
    sys.exit(shutil.copy(sys.argv[3], sys.argv[4]) and 0)
calls = open({log!r}, "a")
print("an engine's chatter", file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    calls.write(line)
    calls.flush()
    call, reply = request["call"], {{}}
    if call == {dies_at!r}:
        sys.exit("out of luck")
    if call == "load":
        reply = {{"version": "9.9"}}
        if request["engine"] in {missing!r}:
            reply = {{"missing": "its_module"}}
    if call == "decode":
        reply = {{"seconds": [0.5] * request["steps"]}}
    if call == "prefill":
        reply = {{"seconds": 0.25}}
    print(json.dumps({{**reply, "idle_seconds": 0.125}}), flush=True)
"""


def fake_python(
    folder: Path, *, missing: tuple[str, ...] = (), dies_at: str = "", makes: str = ""
) -> tuple[Path, Path]:
    """(what to give --peer-python, the log of what it was asked)."""
    script, log = folder / "python", folder / "calls"
    script.write_text(
        FAKE.format(python=sys.executable, log=str(log), missing=missing, dies_at=dies_at, makes=makes or "pass")
    )
    script.chmod(0o755)
    return script, log


def peer_flags(folder: Path, *more: str | Path) -> list[str]:
    model = write_served_model(folder / "tiny", num_hidden_layers=1)
    named = ["--openvino-model", model, "--llama-model", model]
    work = ["--rows", "1", "3", "--context", "20", "--prefill", "9", "--steps", "4", "--repeats", "2"]
    flags = ["bench", "peer", "--model", model, "--kernels", "reference", "--threads", "1", *named, *work, *more]
    return [str(flag) for flag in flags]


def test_every_engine_gets_the_same_work_and_the_ratio_is_of_medians(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, log = fake_python(tmp_path, missing=("llama-cpp-python",))
    assert main(peer_flags(tmp_path, "--peer-python", python, "--csv", tmp_path / "csv")) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert f"llama-cpp-python: {python} has no its_module; pip install llama-cpp-python there" in err
    assert [(each["engine"], each["format"]) for each in result["engines"]] == [
        ("nanoserve", "safetensors F32"),
        ("openvino-genai", "safetensors F32"),
    ]
    # 20 tokens are the mean over the two stretches of 4 steps that count, after one that does not.
    calls = [json.loads(line) for line in log.read_text().splitlines() if '"load"' not in line]
    opened = [(call["rows"], call["prompt_tokens"], call["steps"]) for call in calls if call["call"] == "open"]
    assert opened == [(1, 12, 12), (3, 12, 12)]
    assert [call["call"] for call in calls] == ["open", *["decode"] * 3, "close"] * 2 + ["prefill"] * 3

    ours, theirs = (
        {each["rows"]: each for each in result["decode"] if each["engine"] == name}
        for name in ("nanoserve", "openvino-genai")
    )
    for rows in (1, 3):
        assert theirs[rows]["tokens_per_second"] == pytest.approx(rows / 0.5)
        assert theirs[rows]["ratio"] == pytest.approx(ours[rows]["tokens_per_second"] / (rows / 0.5))
        assert theirs[rows]["ratio_low"] <= theirs[rows]["ratio"] <= theirs[rows]["ratio_high"]
        assert (ours[rows]["ratio"], ours[rows]["tokens"]) == (1.0, 20)
    prefill = result["prefill"][1]
    assert (prefill["engine"], prefill["tokens_per_second"]) == ("openvino-genai", pytest.approx(9 / 0.25))
    assert [(each["kind"], each["rows"], each["engine"]) for each in result["best"]] == [
        ("decode", 1, "openvino-genai"),
        ("decode", 3, "openvino-genai"),
        ("prefill", 1, "openvino-genai"),
    ]
    assert (tmp_path / "csv" / "peer-decode.csv").read_text().startswith("rows,tokens,engine,tokens_per_second")


def test_head_that_is_quantised_at_load_is_named_beside_what_the_file_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, _ = fake_python(tmp_path, missing=("llama-cpp-python",))
    assert main(peer_flags(tmp_path, "--peer-python", python, "--quantize-head", "w4")) == 0
    engines = json.loads(capsys.readouterr().out.splitlines()[-1])["engines"]
    assert [each["format"] for each in engines] == ["safetensors F32, head w4", "safetensors F32"]


def test_best_peer_is_the_fastest_one_and_ratios_keep_their_rounds_together() -> None:
    ours = Figure("decode", 8, 192, "nanoserve", (100.0, 200.0, 60.0))
    record = Figure("decode", 8, 192, "other", (50.0, 50.0, 30.0)).record(ours)
    assert (record["tokens_per_second"], record["low"], record["high"]) == (50.0, 30.0, 50.0)
    assert (record["ratio"], record["ratio_low"], record["ratio_high"]) == (2.0, 2.0, 4.0)


def test_context_is_the_mean_over_the_counted_steps() -> None:
    assert first_context(192, 16, 5) == 192 - 16 - 40
    with pytest.raises(ConfigError, match="--context is 30; 6 stretches of 16 steps around it take at least 57"):
        first_context(30, 16, 5)


def test_prompts_share_no_first_token_so_that_no_cache_answers() -> None:
    firsts = [prompt_ids(3, salt)[0] for salt in range(1000)]
    assert len(set(firsts)) == 1000
    assert all(100 <= token < 4100 for token in prompt_ids(500, 7))


@pytest.mark.parametrize(
    ("dies_at", "says"),
    [
        ("load", "openvino-genai gave no answer to 'load': out of luck; name another file with --openvino-model"),
        ("decode", "openvino-genai gave no answer to 'decode': out of luck"),
    ],
)
def test_error_is_one_line_when_a_peer_dies(
    dies_at: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, _ = fake_python(tmp_path, dies_at=dies_at)
    assert main(peer_flags(tmp_path, "--peer-python", python, "--peers", "openvino-genai")) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"nanoserve: {says}"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--peer-python", "/no/such/python"], "--peer-python /no/such/python does not start: No such file"),
        (["--peers"], "there is nothing to compare; name --peers"),
        (["--context", "20", "--steps", "16"], "--context is 20"),
        (["--server-url", "localhost"], "--server-url localhost is no http:// address"),
        (["--peers", "--server-url", "http://127.0.0.1:1"], "--server-url http://127.0.0.1:1 lists no models"),
    ],
)
def test_error_is_one_line_when_there_is_nothing_to_compare_with(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(peer_flags(tmp_path, *flags)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_peers_are_missed_by_name_when_the_interpreter_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real worker, in an interpreter that is known to have neither: this one without its packages."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    assert main(peer_flags(tmp_path, "--peer-python", bare)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"openvino-genai: {bare} has no openvino_genai; pip install openvino-genai there" in line
    assert f"llama-cpp-python: {bare} has no llama_cpp; pip install llama-cpp-python there" in line


def test_model_that_is_no_gguf_needs_one_for_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    assert main(["bench", "peer", "--model", str(model)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "tiny is no GGUF file, which this peer would read; name one with --openvino-model" in line


def q4_1_file(folder: Path) -> Path:
    model = write_served_model(folder / "tiny", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    return write_gguf(model, folder / "tiny.gguf", "Q4_1")


def test_peers_get_the_q4_0_file_that_llama_cpp_makes(tmp_path: Path) -> None:
    model = q4_1_file(tmp_path)
    python, _ = fake_python(tmp_path)
    made = q4_0_file(str(python), model, tmp_path)
    assert (made, made.read_bytes()) == (tmp_path / "tiny-Q4_0.gguf", model.read_bytes())
    ready = write_gguf(tmp_path / "tiny", tmp_path / "ready.gguf", "Q4_0")
    assert q4_0_file("/no/such/python", ready, tmp_path) == ready


@pytest.mark.parametrize(
    ("makes", "problem"),
    [("import llama_cpp_that_is_not_here", "ModuleNotFoundError: No module named"), ("sys.exit('no room')", "no room")],
)
def test_peers_read_the_file_as_it_is_when_llama_cpp_makes_none(tmp_path: Path, makes: str, problem: str) -> None:
    model = q4_1_file(tmp_path)
    python, _ = fake_python(tmp_path, makes=makes)
    with pytest.raises(Missing, match=f"peers read tiny.gguf as it is, since .* makes no Q4_0 file of it: {problem}"):
        q4_0_file(str(python), model, tmp_path)
    with pytest.raises(Missing, match="No such file"):
        q4_0_file("/no/such/python", model, tmp_path)


def test_worker_answers_line_by_line_whatever_its_engine_prints() -> None:
    code = """
import os
from nanoserve.bench import peer_worker
class Engine:
    def __init__(self, *, model, threads, sequences, tokens):
        self.about = {"version": "1"}
    def open(self, *, rows, prompt_tokens, steps):
        print("chatter"); os.write(1, b"more of it")
    def decode(self, *, steps): return [0.5] * steps
    def prefill(self, *, tokens): raise RuntimeError("no room\\nfor it")
peer_worker.ENGINES["engine"] = Engine
peer_worker.main()
"""
    requests: list[dict[str, Any]] = [
        {"call": "load", "engine": "engine", "model": "m", "threads": 1, "sequences": 2, "tokens": 9},
        {"call": "open", "rows": 2, "prompt_tokens": 4, "steps": 3},
        {"call": "decode", "steps": 3},
        {"call": "prefill", "tokens": 3},
    ]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=lines, capture_output=True, text=True, timeout=60, check=True
    )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(reply.pop("idle_seconds") >= 0 for reply in replies)
    assert replies == [
        {"version": "1"},
        {},
        {"seconds": [0.5] * 3},
        {"error": "RuntimeError: no room"},
    ]
    assert "more of it" in done.stderr


def test_servers_are_compared_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    load = [
        "--streams",
        "2",
        "--rounds",
        "1",
        "--prompt-tokens",
        "5",
        "--generated",
        "12",
        "--repeats",
        "1",
        "--prompt-ids",
        "260",
    ]
    with warm_server(folder) as (server, engine):
        wait_until(lambda: engine.stage == "ready", 30)
        flags = ["bench", "peer", "--peers", "--url", server.url, "--server-url", server.url, "--repeats", "1", *load]
        assert main(flags) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    mine, other = result["http"]
    assert (mine["engine"], mine["rows"], mine["ratio"]) == ("nanoserve", 2, 1.0)
    assert other["engine"] == f"{server.url.removeprefix('http://')} tiny"
    assert other["ratio"] == pytest.approx(mine["tokens_per_second"] / other["tokens_per_second"])
    assert [each["engine"] for each in result["best"]] == [other["engine"]]
    assert all(each["ttft_seconds"] > 0 for each in result["load"])
