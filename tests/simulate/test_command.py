"""`nanoserve simulate`, as a command: every form of output, every mistake in one line, and a real engine's costs."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.buckets import GraphKey
from nanoserve.cli import main
from nanoserve.simulate.costs import Work, load_costs
from nanoserve.warmup import load_warm_list
from tests.checkout import ROOT
from tests.tiny_folder import write_served_model

HAND = ["--step-ms", "3,0.5,0.001"]
SMALL = ["--requests", "40", "--prompt-tokens", "20", "--output-tokens", "10"]


def run(capsys: pytest.CaptureFixture[str], *flags: str | Path) -> tuple[str, dict[str, Any]]:
    """What it prints, and the object in its last line."""
    assert main(["simulate", *map(str, flags)]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_tables_csv_picture_and_warm_list_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, warm = tmp_path / "out" / "one.svg", tmp_path / "warm.json"
    flags = [*HAND, *SMALL, "--streams", "4", "--csv", tmp_path, "--picture", picture, "--save-warm-list", warm]
    out, result = run(capsys, *flags)
    (record,) = result["runs"]
    assert record["tokens_per_second"] > 0
    assert sum(shape["steps"] for shape in result["shapes"]) == sum(
        int(row["steps"]) for row in csv.DictReader((tmp_path / "simulate-shapes.csv").read_text().splitlines())
    )
    assert result["warm"][-1]["covered"] == pytest.approx(1.0)
    replays = load_warm_list(warm)
    assert replays == {GraphKey(g["kind"], g["rows"], None): g["steps"] for g in result["warm"]}
    titles = {"Sequences and blocks over time", "What clients wait for", "Steps by shape"}
    assert titles <= {element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")}
    assert "Warm list: graphs in the order" in out


def test_lists_are_swept_in_every_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--rate", "5", "50", "--max-sequences", "2", "8", "--kv-blocks", "6", "60", "--max-step-rows", "24"]
    sweep += ["--output-tokens", "30"]
    _, result = run(capsys, *HAND, *SMALL, *sweep, "--picture", tmp_path / "sweep.svg")
    keys = [(record["load"], record["max_sequences"], record["kv_blocks"]) for record in result["runs"]]
    assert keys == [(load, rows, blocks) for load in ("5/s", "50/s") for rows in (2, 8) for blocks in (6, 60)]
    assert any(record["preemptions"] for record in result["runs"] if record["kv_blocks"] == 6)
    assert not any(record["preemptions"] for record in result["runs"] if record["kv_blocks"] == 60)
    assert "Combinations" in (tmp_path / "sweep.svg").read_text()


def test_shared_prefixes_are_computed_once_unless_the_cache_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    """40 requests of 320 tokens, the same 300 first: 18 full blocks that all but the first find."""
    shared = [*HAND, *SMALL, "--streams", "4", "--prefix-tokens", "300", "--max-step-rows", "64", "128"]
    _, cached = run(capsys, *shared)
    _, computed = run(capsys, *shared, "--no-prefix-cache")
    assert [record["max_step_rows"] for record in cached["runs"]] == [64, 128]
    assert [record["cached_tokens"] for record in cached["runs"]] == [39 * 18 * 16] * 2
    assert [record["cached_tokens"] for record in computed["runs"]] == [0, 0]
    for with_cache, without in zip(cached["runs"], computed["runs"], strict=True):
        assert with_cache["tokens_per_second"] > 2 * without["tokens_per_second"]


def test_saved_trace_runs_as_the_synthetic_load_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    lengths = ["--requests", "30", "--prompt-tokens", "uniform:5:90", "--output-tokens", "lognormal:12:0.5:40"]
    _, made = run(capsys, *HAND, *lengths, "--rate", "20", "--seed", "7", "--save-trace", path)
    _, read = run(capsys, *HAND, "--trace", path)
    assert {**made["runs"][0], "load": None} == {**read["runs"][0], "load": None}
    assert made["shapes"] == read["shapes"]


def test_simulation_needs_no_torch() -> None:
    code = "import sys; from nanoserve.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    flags = ["simulate", *HAND, "--streams", "2", *SMALL]
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--streams", "2"], "no step costs are given; measure them with nanoserve simulate --calibrate --costs FILE"),
        ([*HAND, "--costs", "x", "--streams", "2"], "both --costs and --step-ms are given"),
        (["--costs", "none.json", "--streams", "2"], "--costs none.json: there is no such file"),
        (HAND, "no load given; name one of --streams N, --rate R and --trace FILE"),
        ([*HAND, "--streams", "2", "--rate", "3"], "--streams and --rate given"),
        ([*HAND, "--rate", "0"], "--rate is 0.0; it must be above 0"),
        (
            [*HAND, "--streams", "2", "--max-step-rows", "31"],
            "--max-step-rows is 31; 32 sequences may decode in one step",
        ),
        ([*HAND, "--streams", "2", "--prefill-gap-seconds", "-1"], "--prefill-gap-seconds is -1.0"),
        ([*HAND, "--streams", "0"], "--streams is 0; it must be at least 1"),
        ([*HAND, "--streams", "2", "--seed", "-1"], "--seed is -1; it must be at least 0"),
        ([*HAND, "--streams", "2", "--prefix-share", "2"], "--prefix-share is 2.0; it must be from 0 to 1"),
        ([*HAND, "--streams", "2", "--kv-blocks", "1"], "the shortest request has 228 tokens; 16 fit"),
        ([*HAND, "--trace", "none.jsonl"], "--trace none.jsonl cannot be read"),
        (["--calibrate"], "--calibrate writes a cost file; name it with --costs FILE"),
    ],
)
def test_mistake_is_one_line_with_its_remedy(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert said in line


def test_lengths_that_are_none_are_refused_where_they_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", *HAND, "--streams", "2", "--prompt-tokens", "normal:3"])
    assert "is no distribution of lengths; write N, uniform:LOW:HIGH" in capsys.readouterr().err


# --- a real engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("read", "kernels"), [("rectangle", "reference"), ("paged", "reference"), ("paged", "native")])
def test_costs_of_a_real_engine_are_measured_and_its_answers_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], read: str, kernels: str
) -> None:
    """That figures agree is for an idle machine to show (docs/BENCHMARKS.md); here, that both sides are measured."""
    before = torch.get_num_threads()
    folder, costs = write_served_model(tmp_path / "tiny", num_hidden_layers=1), tmp_path / "costs.json"
    engine = ["--model", folder, "--kernels", kernels, "--threads", "1", "--costs", costs, "--max-model-len", "64"]
    engine += ["--max-sequences", "2", "--max-step-rows", "16", "--width-multiple", "32"]
    try:
        _, measured = run(capsys, "--calibrate", "--calibrate-seconds", "0", *engine, "--attention-read", read)
        _, compared = run(
            capsys, "--validate", *engine, "--streams", "2", "--requests", "4", "--prompt-tokens", "20",
            "--output-tokens", "8",
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    found = load_costs(costs)
    assert (found.read, found.pads_compute, found.plans_ahead) == (read, kernels != "native", kernels == "native")
    assert found.compute_seconds(Work(1, 1, 8, 0)) > 0  # body and head are not told apart where every step has both
    assert all(step["seconds"] > 0 for step in measured["steps"])
    assert {1, 2} <= {record["tokens"] for record in measured["served"]}
    assert all(each.at(0.0) <= 1 <= each.at(1.0) for each in found.scatter)
    assert found.scatter
    figures = {record["figure"]: record for record in compared["validation"]}
    assert set(figures) == {"tokens/s", "first token p50", "gap p50", "gap p99"}
    for record in figures.values():
        assert record["simulated"] > 0
        assert record["measured"] > 0
        assert record["error"] == pytest.approx(record["simulated"] / record["measured"] - 1)
