"""`nanoserve bench engine`, `mixed`, `prefix` and `start`: what each measures, and that it adds up."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from nanoserve.bench.engine import Shapes
from nanoserve.cli import build_parser, main
from nanoserve.errors import ConfigError
from tests.benching import bench, same_threads  # noqa: F401
from tests.tiny_folder import write_served_model

# --- bench engine ----------------------------------------------------------------------------------------------------


def test_engine_measures_whole_steps_and_what_they_read_when_the_model_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    shapes = ["--rows", "1", "3", "--context", "20", "--prefill", "9", "--max-step-rows", "4", "--repeats", "2"]
    flags = ["--model", folder, "--kernels", "reference", "--threads", "1", *shapes, "--csv", tmp_path / "csv"]
    out, result = bench(capsys, "engine", *flags)
    assert [(each["rows"], each["context"]) for each in result["decode"]] == [(1, 20), (3, 20)]
    token_bytes = 2 * 1 * 2 * 16 * 4
    reads = [each["megabytes"] * 1e6 for each in result["decode"]]
    assert reads == [pytest.approx(result["weight_bytes"] + rows * 20 * token_bytes) for rows in (1, 3)]
    (prefill,) = result["prefill"]
    assert prefill["megabytes"] * 1e6 == pytest.approx(3 * result["weight_bytes"] + (4 + 8 + 9) * token_bytes)
    assert prefill["tokens_per_second"] == pytest.approx(9 / prefill["seconds"])
    assert all(each["least_seconds"] <= each["seconds"] for each in (*result["decode"], prefill))
    assert "reference kernels, 1 threads" in out
    assert (tmp_path / "csv" / "engine-decode.csv").read_text().startswith("kind,rows,context,seconds")


def test_engine_measures_what_sampling_costs_beside_greedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    shapes = ["--context", "20", "--sampling", "1", "3", "--prefill", "--rows", "1", "--repeats", "2"]
    few = ["--max-step-rows", "4"]  # the first of three sequences decodes for long before the last one's prompt is done
    out, result = bench(capsys, "engine", "--model", folder, "--kernels", "reference", "--threads", "1", *shapes, *few)
    assert [(each["rows"], each["context"]) for each in result["sampling"]] == [(1, 20), (3, 20)]
    for each in result["sampling"]:
        assert each["cost"] == pytest.approx(each["sampled_seconds"] / each["greedy_seconds"] - 1)
        assert each["cost_low"] <= each["cost_high"]
    assert "prefill" not in result
    assert "temperature 0.8, top_k 40, top_p 0.95, in turn with greedy" in out


def engine_args(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "engine", *flags])


def test_engine_measures_the_whole_grid_when_nothing_is_asked_for() -> None:
    shapes = Shapes.choose(engine_args(), step_rows=512, block_bytes=1, free_bytes=1 << 40)
    assert shapes.decode == tuple((r, c) for c in (192, 1024, 4096) for r in (1, 2, 4, 8, 16, 32, 64))
    assert shapes.prefill == (128, 512, 2048)
    assert (shapes.blocks, shapes.longest, shapes.left_out) == (64 * 4096 // 16, 4096, ())


def test_engine_leaves_out_and_says_what_memory_does_not_hold() -> None:
    # Three quarters of 2,000 bytes are 300 blocks of 5, one of them the sink: 64 x 4 is 256 blocks, 64 x 12 is 768.
    flags = ["--rows", "1", "64", "--context", "64", "192", "--prefill", "128"]
    shapes = Shapes.choose(engine_args(*flags), step_rows=512, block_bytes=5, free_bytes=2000)
    assert shapes.decode == ((1, 64), (64, 64), (1, 192))
    assert (shapes.left_out, shapes.blocks, shapes.longest) == (((64, 192),), 256, 192)
    with pytest.raises(ConfigError, match="too little for the K/V of any --rows at any --context"):
        Shapes.choose(engine_args(*flags[:-2], "--prefill"), step_rows=512, block_bytes=5, free_bytes=20)


# --- bench mixed -----------------------------------------------------------------------------------------------------


def test_mixed_times_streams_and_a_prompt_together_and_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1, max_position_embeddings=512)
    load = [
        "--streams",
        "3",
        "--stream-tokens",
        "4",
        "--prompt-tokens",
        "60",
        "--max-step-rows",
        "23",
        "--repeats",
        "2",
    ]
    flags = ["--model", folder, "--kernels", "reference", "--threads", "1", *load, "--prefill-gap-seconds", "100"]
    out, result = bench(capsys, "mixed", *flags)
    assert "3 streams of 4 tokens, then a prompt of 60" in out
    assert len(result["rounds"]) == 2
    for each in result["rounds"]:
        assert each["prompt_rows"] == 23 - 3, "the streams decode in every step of the prompt"
        assert 0 < each["gap_p50_seconds"] <= each["gap_p99_seconds"] <= each["gap_max_seconds"]
        assert each["ttft_ratio"] == pytest.approx(each["ttft_seconds"] / each["ttft_alone_seconds"])
        counted = each["ttft_alone_seconds"] + 3 * each["quiet_p50_seconds"]
        assert each["ttft_counted_ratio"] == pytest.approx(each["ttft_seconds"] / counted)


def test_mixed_ends_in_one_line_when_the_context_is_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    assert main(["bench", "mixed", "--model", str(folder), "--kernels", "reference"]) == 2
    assert "lower --prompt-tokens or --stream-tokens" in capsys.readouterr().err.splitlines()[-1]


# --- bench prefix ----------------------------------------------------------------------------------------------------


def test_prefix_reuses_the_first_turn_and_answers_alike_when_the_model_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    turns = ["--history", "70", "--generated", "5", "--added", "3", "--repeats", "2"]
    flags = ["--model", folder, "--kernels", "reference", "--threads", "1", *turns, "--csv", tmp_path / "csv"]
    out, result = bench(capsys, "prefix", *flags)
    assert [(each["prompt_tokens"], each["cached_tokens"]) for each in result["turns"]] == [(70, 0), (78, 64), (78, 0)]
    assert all(0 < each["least_seconds"] <= each["ttft_seconds"] for each in result["turns"])
    first, second, _ = (each["ttft_seconds"] for each in result["turns"])
    assert result["second_over_first"] == pytest.approx(second / first)
    assert result["answers_equal"] is True
    assert "answers with and without the cache are equal" in out
    assert (tmp_path / "csv" / "prefix-turns.csv").read_text().startswith("turn,prompt_tokens,cached_tokens")


# --- bench start ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_start_counts_from_the_command_to_the_first_token_stage_by_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_served_model(tmp_path / "model")
    flags = ("--model", folder, "--repeats", "1", "--flags", "--device cpu --max-model-len 128 --kernels reference")
    _, result = bench(capsys, "start", *flags)
    seconds = {record["stage"].strip(): record["seconds"] for record in result["start"]}
    assert list(seconds)[:3] == ["port open", "ready", "first token"]
    assert 0 < seconds["port open"] < seconds["ready"] < seconds["first token"]
    stages = ("server", "imports", "kernels", "weights", "tokenizer", "engine", "warm-up")
    assert list(seconds)[3:] == list(stages)
    assert sum(seconds[stage] for stage in stages) < seconds["ready"] + 0.5
