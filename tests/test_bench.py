"""`nanoserve bench`: the source document's figures, the measured beside the predicted, and every form of output."""

from __future__ import annotations

import argparse
import csv
import gc
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.bench.client import settled_heap
from nanoserve.bench.svg import Canvas, ticks
from nanoserve.bench.tables import Column, Table
from nanoserve.bench.warm_picture import draw
from nanoserve.bench.warm_tables import Serving, budget_table, paid_table
from nanoserve.cli import build_parser, main
from tests.benching import bench, same_threads  # noqa: F401
from tests.checkout import ROOT

SERVING = Serving(rows=256, width=8192, multiple=128, seconds_per_graph=0.05, trim_rows=8, trim_width=2048)
SVG = "{http://www.w3.org/2000/svg}"


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def texts(markup: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(markup).iter(f"{SVG}text")]


# --- warm: the document's tables -----------------------------------------------------------------------------------


def test_cold_recordings_are_the_documents_when_nothing_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = bench(capsys, "warm")
    cold = result["cold"]
    assert [record["generated"] for record in cold] == [8, 32, 64, 128]
    assert [record["lazy"] for record in cold] == [1, 2, 3, 5]
    assert [record["predicted"] for record in cold] == [1, 2, 3, 5]
    assert [record["warmed"] for record in cold] == [0, 0, 0, 0]
    assert [record["warm_graphs"] for record in cold] == [2, 4, 6, 10]
    assert all(record["warm_seconds"] > 0 and record["tokens_equal"] for record in cold)


@pytest.mark.parametrize(("rows", "prompt", "multiple"), [(1, 1, 8), (3, 8, 8), (2, 15, 16)])
def test_measured_is_predicted_when_lengths_end_at_a_width(
    capsys: pytest.CaptureFixture[str], rows: int, prompt: int, multiple: int
) -> None:
    lengths = [2, multiple, multiple + 1, multiple + 2, 2 * multiple + 1]
    flags = ["--rows", rows, "--prompt-tokens", prompt, "--width-multiple", multiple, "--generated", *lengths]
    _, result = bench(capsys, "warm", *map(str, flags))
    assert [record["lazy"] for record in result["cold"]] == [record["predicted"] for record in result["cold"]]
    assert {record["warmed"] for record in result["cold"]} == {0}


def test_where_recordings_are_paid_for_is_the_documents_table() -> None:
    records = paid_table(SERVING, [128, 512, 2048, 8192]).records
    assert [record["lazy_graphs"] for record in records] == [1, 4, 16, 64]
    assert [record["latency_seconds"] for record in records] == pytest.approx([0.05, 0.20, 0.80, 3.20])
    for record in records:
        starts = [record[key] for key in ("full_seconds", "rows_seconds", "rows_width_seconds")]
        assert starts == pytest.approx([28.80, 12.80, 3.20])


def test_full_list_is_nine_times_the_stall_it_saves() -> None:
    (note,) = paid_table(SERVING, [128, 8192]).notes
    assert note == "the full list is 576 graphs: 9.0 times what it saves a request of 8,192 tokens"


def test_what_a_budget_holds_is_the_documents_list() -> None:
    table = budget_table(SERVING, heads=32, budgets_mb=[64, 268, 1000])
    assert [(r["width_ceiling"], r["shapes"], r["shapes_in_all"]) for r in table.records] == [
        (1953, 135, 576),
        (8178, 567, 576),
        (30517, 576, 576),
    ]
    assert table.notes == ("the whole list fits in 1,000 MB",)
    assert all(record["arena_bytes"] <= record["budget_mb"] * 10**6 for record in table.records)


def test_budget_holds_no_shape_when_it_is_smaller_than_one() -> None:
    (record,) = budget_table(SERVING, heads=32, budgets_mb=[4]).records
    assert (record["width_ceiling"], record["shapes"], record["arena_bytes"]) == (122, 0, 0)


# --- warm: its outputs ---------------------------------------------------------------------------------------------


def test_warm_writes_what_it_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, picture = tmp_path / "new/folder", tmp_path / "other/warm.svg"
    out, result = bench(capsys, "warm", "--generated", "8", "20", "--csv", folder, "--picture", picture)
    for name in ("cold", "paid", "budgets"):
        rows = read_csv(folder / f"warm-{name}.csv")
        assert rows == [{key: str(value) for key, value in record.items()} for record in result[name]]
    shown = texts(picture.read_text(encoding="utf-8"))
    assert {"28.80 s", "12.80 s", "3.20 s", "64 MB: 1,953 tokens, 135 shapes", "1,000 MB: the whole list"} <= set(shown)
    assert "28.80 s" in out
    assert str(picture) in out
    assert result["bench"] == "warm"
    assert {"model", "device", "graph_backend", "threads", "torch", "nanoserve"} <= set(result)


def test_tables_are_aligned_and_none_is_a_dash() -> None:
    columns = (Column("a", "first"), Column("b", "second", lambda value: f"{value:.1f}"))
    table = Table("t", "What", "of what", columns, [{"a": 1000000, "b": 2.0}, {"a": 1, "b": None}], ("a note",))
    assert table.text().splitlines() == [
        "What: of what",
        "    first   second",
        "  1000000      2.0",
        "        1        -",
        "  a note",
    ]


# --- stalls --------------------------------------------------------------------------------------------------------


def test_stalls_come_where_the_context_enters_a_width_and_not_when_warmed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--prompt-tokens", "6", "--generated", "24", "--width-multiple", "8", "--repeats", "1"]
    files = ["--csv", tmp_path, "--picture", tmp_path / "stalls.svg"]
    out, result = bench(capsys, "stalls", *flags, "--record-seconds", "0.02", *files)
    # Token 1 is the prefill's. Token n is chosen over 6 + n - 1 of context: the first step, then 9, 17 and 25.
    assert result["recorded_before_tokens"] == {"lazy": [2, 4, 12, 20], "warmed": []}
    assert result["tokens_equal"] is True
    lazy, warmed = result["engines"]
    assert (lazy["cold"], lazy["graphs_before"], warmed["cold"], warmed["graphs_before"]) == (4, 0, 0, 4)
    assert lazy["max_seconds"] >= 0.02
    assert lazy["recording_gap_seconds"] >= 0.02
    assert warmed["recording_gap_seconds"] is None
    assert warmed["start_seconds"] >= 4 * 0.02
    assert "each recording made 0.02 s longer" in out
    assert "each recording made 0.02 s longer" in result["graph_backend"]

    gaps = read_csv(tmp_path / "stalls-gaps.csv")
    assert len(gaps) == 2 * 23
    for gap in gaps:
        waited = gap["engine"] == "nothing warmed" and gap["context_tokens"] in ("7", "9", "17", "25")
        assert (gap["recorded"] == "True") == waited
        assert not waited or float(gap["gap_seconds"]) >= 0.02
    assert len(read_csv(tmp_path / "stalls-engines.csv")) == 2
    markup = (tmp_path / "stalls.svg").read_text(encoding="utf-8")
    assert "4 tokens wait for a recording" in texts(markup)
    bars = [element.get("class") for element in ElementTree.fromstring(markup).iter(f"{SVG}rect")]
    assert (bars.count("miss"), bars.count("real")) == (4, 2 * 23 - 4)


def test_gaps_measure_what_they_find_when_recordings_are_not_made_longer(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = bench(capsys, "stalls", "--generated", "4", "--repeats", "1")
    assert result["graph_backend"] == "eager"
    assert result["record_seconds_added"] is None
    assert all(0 < each["p50_seconds"] <= each["p99_seconds"] <= each["max_seconds"] for each in result["engines"])


def test_full_collection_walks_nothing_that_was_alive_when_measuring_began() -> None:
    with settled_heap():
        assert gc.get_freeze_count() > 0
        assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


@pytest.mark.model
def test_measured_is_predicted_when_the_model_is_real(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = bench(capsys, "warm", "--model", "smollm2-135m", "--generated", "4", "20")
    assert result["model"] == "smollm2-135m"
    assert [(r["lazy"], r["predicted"], r["warmed"]) for r in result["cold"]] == [(1, 1, 0), (2, 2, 0)]
    assert all(record["tokens_equal"] for record in result["cold"])


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["warm", "--rows", "0"], "--rows is 0; it must be at least 1"),
        (["warm", "--generated", "8", "1"], "--generated is 1; an answer of at least 2 tokens"),
        (["warm", "--seconds-per-graph", "-1"], "--seconds-per-graph is -1.0; it must be a number of seconds"),
        (["warm", "--seconds-per-graph", "nan"], "--seconds-per-graph is nan"),
        (["warm", "--prompt-tokens", "9000"], "prompt and answer are 9,008 tokens"),
        (["warm", "--picture", "warm.png"], "--picture warm.png is no SVG file; give it a name"),
        (["warm", "--graph-backend", "cuda", "--device", "cpu"], "--graph-backend cuda does not run on cpu"),
        (["warm", "--model", "no such model"], "'no such model' is no file or folder here"),
        (["stalls", "--generated", "1"], "--generated is 1"),
        (["stalls", "--repeats", "0"], "--repeats is 0"),
        (["stalls", "--record-seconds", "inf"], "--record-seconds is inf"),
    ],
)
def test_error_is_one_line_when_flags_cannot_be(
    capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert main(["bench", *flags]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"nanoserve: {says}")
    assert err.count("\n") == 1


def test_error_is_one_line_when_a_file_stands_where_a_folder_should(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert main(["bench", "warm", "--csv", str(taken)]) == 2
    assert capsys.readouterr().err.startswith(f"nanoserve: --csv: folder {taken} cannot be made: File exists")


def test_parser_loads_no_torch_when_it_offers_the_measurements() -> None:
    code = "import sys; from nanoserve.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_measurement_ends_quietly_when_its_reader_has_read_enough() -> None:
    code = "import sys; from nanoserve.cli import main; sys.exit(main(['bench', 'warm', '--generated', '2']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("measurement", ["warm", "stalls", "engine", "serve", "peer"])
def test_flags_have_a_help_text_each(measurement: str) -> None:
    args = build_parser().parse_args(["bench", measurement])
    assert isinstance(args, argparse.Namespace)
    done = subprocess.run(
        [sys.executable, "-c", f"from nanoserve.cli import main; main(['bench', '{measurement}', '--help'])"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for name in set(vars(args)) - {"run", "command", "measurement"}:
        assert f"--{name.replace('_', '-')}" in done.stdout


# --- pictures ------------------------------------------------------------------------------------------------------


def test_committed_picture_is_the_one_the_command_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawn = tmp_path / "warm.svg"
    bench(capsys, "warm", "--device", "cpu", "--picture", drawn)
    assert (ROOT / "docs/warmup.svg").read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8")


@pytest.mark.parametrize("budgets", [[1], [64, 65, 66, 67], [1000, 2000]])
@pytest.mark.parametrize(("rows", "width", "multiple"), [(1, 128, 128), (256, 131072, 16), (5, 100, 64)])
def test_picture_stays_on_its_canvas_when_the_deployment_is_another(
    budgets: list[int], rows: int, width: int, multiple: int
) -> None:
    serving = Serving(rows, width, multiple, seconds_per_graph=0.0, trim_rows=4, trim_width=64)
    paid, held = paid_table(serving, [16, 64]), budget_table(serving, heads=8, budgets_mb=budgets)
    counts = {"generated": 8, "lazy": 0, "predicted": 0, "warmed": 0}
    markup = draw("a <subject> & more", serving, Table("cold", "Cold", "of it", (), [counts]), paid, held)
    root = ElementTree.fromstring(markup)
    assert len(markup) < 100_000
    assert "a <subject> & more" in texts(markup)
    for element in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(element.get(name, "nan")) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= float(root.get("width", "")) + 0.01
        assert 0 <= y <= y + h <= float(root.get("height", "")) + 0.01


@given(st.floats(1e-6, 1e9), st.integers(1, 10))
def test_ticks_reach_the_maximum_in_few_round_steps(maximum: float, count: int) -> None:
    marks = ticks(maximum, count)
    assert marks[0] == 0
    assert marks[-1] >= maximum * (1 - 1e-6)
    assert 2 <= len(marks) <= count + 1
    assert marks == sorted(set(marks))


def test_canvas_escapes_and_labels_what_it_is_given() -> None:
    canvas = Canvas(10, 10, title='<"&', description="what it shows")
    canvas.text(1, 1, "a < b & c")
    root = ElementTree.fromstring(canvas.markup())
    assert root.findtext(f"{SVG}title") == '<"&'
    assert root.get("aria-labelledby") == "title description"
    assert texts(canvas.markup()) == ["a < b & c"]
