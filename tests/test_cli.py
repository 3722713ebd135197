"""The command line, in this process: what flags become, and the terminal chat."""

from __future__ import annotations

import argparse
import io
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from nanoserve.cli import build_parser, engine_config, main, parse_bytes
from nanoserve.config import EngineConfig
from tests.tiny_folder import write_served_model


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 << 20), ("2g", 2 << 30), ("1.5GiB", 3 << 29), ("10kb", 10 << 10), (" 4096 ", 4096), ("1e3", 1000)],
)
def test_size_is_bytes_when_it_has_a_unit_or_none(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "0", "-1G", "many", "1T", "infG", "nan"])
def test_size_is_refused_when_it_is_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_bytes(text)


def test_flags_set_every_field_of_the_config_and_default_to_it() -> None:
    args = build_parser().parse_args(["serve"])
    assert {field.name for field in fields(EngineConfig)} <= set(vars(args))
    assert engine_config(args) == EngineConfig()


def test_chat_goes_on_after_a_refused_line_and_ends_at_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_served_model(tmp_path / "tiny")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 200 + "\nhello\n\nnever read\n"))
    flags = ["--max-model-len", "96", "--threads", "1", "--warmup-seconds", "0", "--temperature", "0"]
    assert main(["chat", "--model", str(folder), "--system", "Be brief.", *flags]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("> > ")
    assert said.out.endswith("\n> ")
    assert len(said.out) > len("> > \n> "), "the second line was answered"
    assert "nanoserve: the prompt is 235 tokens; the limit is 96" in said.err
    assert "Traceback" not in said.err


def test_dry_run_prints_the_priced_plan_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    flags = ["--max-model-len", "64", "--max-sequences", "2", "--width-multiple", "32", "--threads", "1"]
    flags += ["--kernels", "reference"]
    assert main(["serve", "--dry-run", "--model", str(folder), *flags]) == 0
    pool, plan = capsys.readouterr().out.splitlines()
    assert pool.startswith("K/V pool: ")
    assert plan.startswith("warm-up: 4 of 4 shapes (rows <= 2, width <= 64)")
    assert re.search(r"predicted [\d.]+ s and [\d.]+ MB$", plan)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["serve", "--port", "x"],
            "nanoserve serve: argument --port: invalid int value: 'x'; see ",
        ),
        (["serve", "--kv-memory", "0"], "nanoserve serve: argument --kv-memory: '0' is no size;"),
        (["chat", "--nope"], "nanoserve: unrecognized arguments: --nope; see nanoserve --help"),
        ([], "nanoserve: the following arguments are required: command; see nanoserve --help"),
    ],
)
def test_error_is_one_line_when_a_flag_cannot_be_read(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_error_is_one_line_and_its_own_code_when_the_model_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--model", str(tmp_path / "none.gguf")]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "none.gguf" in captured.err
