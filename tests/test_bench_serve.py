"""`nanoserve bench serve`: what a server is asked, and which gaps count for what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoserve.bench.load import Answer, Chunk, Load
from nanoserve.cli import main
from nanoserve.simulate.trace import load_trace
from tests.server.support import wait_until
from tests.tiny_folder import write_served_model
from tests.tiny_server import warm_server


def bench_serve(capsys: pytest.CaptureFixture[str], *flags: str | Path) -> tuple[str, dict[str, Any]]:
    assert main(["bench", "serve", *map(str, flags)]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_serve_counts_every_token_of_every_stream_when_the_server_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    load = ["--streams", "1", "3", "--rounds", "2", "--prompt-tokens", "5", "--generated", "12", "--prompt-ids", "260"]
    with warm_server(folder) as (server, engine):
        wait_until(lambda: engine.stage == "ready", 30)
        output = ["--csv", tmp_path / "csv", "--save-trace", tmp_path / "trace"]
        out, result = bench_serve(capsys, "--url", server.url, *load, *output)
        counted = server.get("/metrics").json()["tokens"]["generated_total"]
    assert counted == (1 + 3) * 2 * 12
    assert [each["streams"] for each in result["load"]] == [1, 3]
    assert all(each["ttft_seconds"] > 0 and each["tokens_per_second"] > 0 for each in result["load"])
    assert "5 tokens in, 12 out, 2 requests a stream" in out
    sent = load_trace(tmp_path / "trace").asks
    assert [(ask.prompt_tokens, ask.output_tokens) for ask in sent] == [(5, 12)] * 8
    assert sent[0].arrival_seconds == 0.0
    assert sent[1].arrival_seconds > 0.0
    assert (tmp_path / "csv" / "serve-load.csv").read_text().startswith("streams,tokens_per_second,ttft_seconds")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "127.0.0.1:8000"], "is no http:// address"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--streams", "0"], "--streams is 0; it must be at least 1"),
        (["--prompt-ids", "100"], "--prompt-ids is 100; it must be above 100"),
    ],
)
def test_serve_ends_in_one_line_when_there_is_no_server(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_serve_quotes_the_server_when_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    with warm_server(folder) as (server, engine):
        wait_until(lambda: engine.stage == "ready", 30)
        assert main(["bench", "serve", "--url", server.url, "--prompt-tokens", "500", "--prompt-ids", "260"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "answered HTTP/1.1 400" in line
    assert "the prompt is 500 tokens; the limit is 64" in line


# --- what the clients of a server saw ---------------------------------------------------------------------------------


def answer(sent: float, *chunks: float, each: int = 1) -> Answer:
    times = [Chunk(at, each * (index + 1)) for index, at in enumerate(chunks)]
    return Answer(sent, tuple(times), each * len(chunks))


def test_gaps_count_as_steady_only_while_every_stream_decodes() -> None:
    early, late = answer(0.0, 1.0, 2.0, 3.5, 4.0, 5.0), answer(0.0, 1.5, 2.5, 3.5, 4.5, 6.5)
    load = Load(2, 10.0, 1.0, (early, late))
    assert load.full_spans() == [(1.5, 5.0)]
    record = load.record()
    # 2.0 to 3.5, to 4.0, to 5.0 of the one; 1.5 to 2.5, to 3.5, to 4.5 of the other.
    assert record["full_gaps"] == 6
    assert (record["full_gap_p50_seconds"], record["full_gap_max_seconds"]) == (1.0, 1.5)
    assert record["gap_max_seconds"] == 2.0
    assert (record["ttft_seconds"], record["ttft_max_seconds"]) == (1.25, 1.5)
    assert (record["tokens_per_second"], record["client_share"]) == (1.0, 0.1)


def test_next_round_of_one_stream_hides_no_gap_of_another() -> None:
    answers = (answer(0.0, 1.0, 2.0), answer(2.0, 2.5, 4.0), answer(0.0, 1.0, 3.0, 4.0))
    assert Load(2, 4.0, 0.0, answers).full_spans() == [(1.0, 2.0), (2.5, 4.0)]


def test_gap_is_shared_out_when_a_chunk_holds_several_tokens() -> None:
    record = Load(1, 6.0, 0.0, (answer(0.0, 1.0, 2.0, 4.0, each=2),)).record()
    assert (record["gap_p50_seconds"], record["gap_max_seconds"]) == (0.5, 1.0)
    assert record["tokens_per_second"] == 1.0


def test_stream_of_one_chunk_has_no_gaps() -> None:
    record = Load(1, 1.0, 0.0, (answer(0.0, 1.0),)).record()
    assert (record["gap_p50_seconds"], record["full_gaps"], record["full_gap_p99_seconds"]) == (None, 0, None)
