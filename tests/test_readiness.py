"""The warm part of a boot: what is planned, proved and said, with every budget and ceiling, and how it fails."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from nanoserve.backends import EagerBackend
from nanoserve.buckets import DecodeShape
from nanoserve.errors import ConfigError, GateError, OutOfMemory
from nanoserve.graphs import GraphKey, Origin
from nanoserve.readiness import boot_line, describe_shapes, price_plan
from nanoserve.warmup import load_warm_list, save_warm_list
from tests.tiny_engines import FREE_BYTES, LeakyOps, SlowBackend, SlowOps, Tiny, prompts, tiny_engine

T = TypeVar("T")
# 4 heads, fp32: a shape's scores are rows * width * 16 bytes. 1, 2, 4 rows x 16, 32, 48, 64 tokens.
ALL = 12


def shapes_of(tiny: Tiny) -> list[DecodeShape]:
    assert tiny.engine.runner.shapes is not None
    return tiny.engine.runner.shapes.shapes()


# --- all of it -------------------------------------------------------------------------------------------------------


def test_everything_is_covered_and_nothing_degraded_when_nothing_is_trimmed() -> None:
    tiny = tiny_engine()
    ready = tiny.ready()
    summary = ready.summary()
    assert json.loads(json.dumps(summary))["self_test"]["rows"] == [2, 4]
    assert summary["graphs"] == ALL
    assert summary["uncovered"] == []
    assert summary["trimmed"] == summary["background_left"] == 0
    assert summary["seconds"] > 0
    assert summary["predicted_seconds"] > 0
    assert summary["predicted_bytes"] == 4 * 4 * 64 * 4
    assert (summary["row_ceiling"], summary["width_ceiling"]) == (4, 64)
    assert (summary["budget_seconds"], summary["budget_bytes"]) == (None, FREE_BYTES)
    assert summary["self_test"]["verdict"] == "passed"
    assert ready.degraded() is None
    graphs = tiny.graphs()
    assert (graphs["warmup_seconds"], graphs["predicted_seconds"]) == (
        ready.report.seconds,
        summary["predicted_seconds"],
    )


def test_boot_line_says_graphs_seconds_bytes_and_coverage() -> None:
    ready = tiny_engine().ready()
    line = boot_line(ready)
    assert line.startswith(f"warmed 12 graphs in {ready.report.seconds:.2f} s (predicted ")
    assert line.endswith(" s), 0.0 MB of scores at the widest; every shape covered; padding self-test passed")


def test_boot_line_is_logged_after_the_priced_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nanoserve"):
        ready = tiny_engine().ready()
    assert [record.message for record in caplog.records] == [ready.plan.describe(), boot_line(ready)]


def test_progress_is_warming_from_the_first_report_to_the_last() -> None:
    tiny = tiny_engine()
    tiny.ready()
    assert {progress.stage for progress in tiny.reports} == {"warming"}
    assert tiny.reports[0].total is None
    assert [progress.done for progress in tiny.reports[1:]] == list(range(ALL + 1))
    assert all(progress.total == ALL for progress in tiny.reports[1:])
    assert tiny.reports[-1].eta_seconds == 0.0


def test_pool_is_resident_when_the_door_opens() -> None:
    tiny = tiny_engine(layers=3)
    tiny.ready()
    assert tiny.engine.runner.cache.resident_layers == 3


# --- ceilings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "free_bytes", "rows", "width", "graphs"),
    [
        ({"warm_rows": 2}, FREE_BYTES, 2, 64, 8),
        ({"warm_width": 40}, FREE_BYTES, 4, 40, 6),
        ({"warm_rows": 1, "warm_width": 16}, FREE_BYTES, 1, 16, 1),
        ({}, 4 * 4 * 40 * 4, 4, 40, 6),
        ({"warm_rows": 2}, 4 * 4 * 40 * 4, 2, 64, 8),
        ({}, 0, 4, 0, 0),
    ],
    ids=["rows", "width", "both", "memory", "memory for fewer rows", "no memory"],
)
def test_trimmed_shapes_are_said_everywhere_when_a_ceiling_is_low(
    fields: dict[str, Any], free_bytes: int, rows: int, width: int, graphs: int
) -> None:
    tiny = tiny_engine(**fields)
    ready = tiny.ready(free_bytes=free_bytes)
    summary = ready.summary()
    assert (summary["row_ceiling"], summary["width_ceiling"], summary["graphs"]) == (rows, width, graphs)
    assert summary["trimmed"] == len(summary["uncovered"]) == ALL - graphs
    assert tiny.graphs()["warmed"] == graphs
    left = describe_shapes(tiny.engine.uncovered())
    assert ready.degraded() == f"{left} without a graph; a step that meets one records it"
    assert f"uncovered now: {left}; trimmed: {left}" in boot_line(ready)
    assert summary["background_left"] == 0, "what a ceiling trims is never recorded unasked"


def test_no_shape_that_memory_does_not_hold_is_recorded_for_its_price() -> None:
    tiny = tiny_engine(ops=(ops := WidestSeen()))
    price_plan(tiny.engine, tiny.config, tiny.facts, free_bytes=4 * 4 * 40 * 4)
    assert 0 < ops.cells <= 4 * 32


class WidestSeen(SlowOps):
    """Remembers the biggest rectangle it read."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)
        self.cells = 0

    def new_rectangle(self, slots: torch.Tensor, context_lens: torch.Tensor) -> Any:
        self.cells = max(self.cells, slots.numel())
        return super().new_rectangle(slots, context_lens)


def test_start_is_an_error_when_shapes_are_strict_and_some_are_not_warmed() -> None:
    tiny = tiny_engine(strict_shapes=True, warm_rows=2)
    with pytest.raises(ConfigError) as caught:
        tiny.ready()
    assert str(caught.value).startswith(
        "--strict-shapes, and the warm-up leaves 4 shapes (rows 4 to 4, width 16 to 64) without a graph; raise "
    )
    assert tiny.graphs()["captured"] == 0


def test_start_is_an_error_when_shapes_are_strict_and_seconds_are_few() -> None:
    with pytest.raises(ConfigError, match="--strict-shapes, and the warm-up leaves 12 shapes"):
        tiny_engine(strict_shapes=True, warmup_seconds=0).ready()


def test_start_goes_on_when_shapes_are_strict_and_all_are_warmed() -> None:
    tiny = tiny_engine(strict_shapes=True)
    tiny.ready()
    tiny.run(prompts(4, 9, max_tokens=30))
    assert tiny.graphs()["hit_rate"] == 1.0


# --- a budget of seconds, on kernels whose cost is known -------------------------------------------------------------


def slow(base: float = 0.004, cell: float = 4e-5, **fields: Any) -> Tiny:
    """Recording a shape takes base + cell * rows * width seconds, and little else."""
    ops = SlowOps(base, cell)
    return tiny_engine(ops=ops, backend=SlowBackend(ops), paranoid=False, **fields)


def test_prediction_is_within_a_quarter_when_cost_is_known() -> None:
    ready = slow(base=0.02, cell=1e-4).ready()
    assert ready.report.prediction_error is not None
    assert abs(ready.report.prediction_error) < 0.25
    assert ready.report.predicted_seconds > ALL * 0.02


def test_narrow_shapes_are_warm_and_the_rest_waits_for_idle_gaps_when_seconds_are_few() -> None:
    tiny = slow(base=0.02, cell=1e-6, warmup_seconds=0.15)
    ready = tiny.ready()
    kept, left = ready.plan.shapes, list(tiny.engine.background)
    assert 1 <= len(kept) < ALL
    assert max(shape.width for shape in kept) <= min(shape.width for shape in left)
    assert set(kept) | set(left) == set(shapes_of(tiny))
    assert ready.plan.predicted_seconds <= 0.15
    assert ready.degraded() is None, "what idle gaps will record is not given up"
    assert f"in idle gaps: {describe_shapes(left)}" in boot_line(ready)
    assert f"uncovered now: {describe_shapes(tiny.engine.uncovered())}" in boot_line(ready)
    for done in range(len(left)):
        assert ready.summary()["background_left"] == len(left) - done
        assert len(ready.summary()["uncovered"]) == len(left) - done
        tiny.engine.capture_in_background()
    assert tiny.graphs()["background_captures"] == len(left)
    assert (tiny.graphs()["cold_captures"], tiny.graphs()["warmed"]) == (0, len(kept))
    assert ready.summary()["uncovered"] == []
    assert ready.degraded() is None


def test_nothing_is_priced_or_recorded_when_the_budget_is_zero() -> None:
    recordings = []
    tiny = tiny_engine(backend=SlowBackend(before=lambda: recordings.append(1)), warmup_seconds=0)
    ready = tiny.ready()
    assert recordings == []
    assert ready.self_test.verdict == "skipped"
    assert len(tiny.engine.background) == ALL
    assert ready.degraded() is None


# --- the warm list ---------------------------------------------------------------------------------------------------


def test_served_shapes_are_warmed_first_when_the_engine_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    first = tiny_engine(warm_list=str(path))
    ready = first.ready()
    assert ready.plan.shapes[0] == DecodeShape(4, 64)
    first.run(prompts(2, 5, max_tokens=20))
    ready.close()
    served = load_warm_list(path)
    assert served == {DecodeShape(2, 16): 11, DecodeShape(2, 32): 8}
    again = tiny_engine(warm_list=str(path)).ready()
    assert again.plan.shapes[:3] == (DecodeShape(2, 32), DecodeShape(2, 16), DecodeShape(4, 64))
    assert len(again.plan.shapes) == ALL


def test_served_shapes_are_the_ones_kept_when_seconds_are_few(tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    save_warm_list(path, {DecodeShape(4, 64): 5})
    tiny = slow(base=0.02, cell=1e-6, warmup_seconds=0.04, warm_list=str(path))
    assert tiny.ready().plan.shapes == (DecodeShape(4, 64),)


def test_old_list_is_kept_when_nothing_was_served(tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    save_warm_list(path, {DecodeShape(4, 64): 5})
    tiny_engine(warm_list=str(path)).ready().close()
    assert load_warm_list(path) == {DecodeShape(4, 64): 5}


def test_start_is_refused_when_the_warm_list_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    path.write_text('{"format": 1, "shapes": [{"rows"')
    tiny = tiny_engine(warm_list=str(path))
    with pytest.raises(ConfigError, match="is no warm list"):
        tiny.ready()
    assert tiny.graphs()["captured"] == 0
    assert path.read_text().startswith('{"format"')


def test_shutdown_goes_on_when_the_warm_list_cannot_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tiny = tiny_engine(warm_list=str(folder / "warm.json"))
    ready = tiny.ready()
    tiny.run(prompts(1, 5, max_tokens=4))
    folder.rmdir()
    with caplog.at_level(logging.WARNING, "nanoserve"):
        ready.close()
    assert "the warm list could not be saved to" in caplog.text


def test_nothing_is_saved_when_no_file_was_named(tmp_path: Path) -> None:
    tiny = tiny_engine()
    ready = tiny.ready()
    tiny.run(prompts(1, 5, max_tokens=4))
    ready.close()
    assert list(tmp_path.iterdir()) == []


# --- verdicts and failures -------------------------------------------------------------------------------------------


def test_engine_is_degraded_when_the_self_test_fails() -> None:
    ready = tiny_engine(ops=LeakyOps()).ready()
    assert ready.summary()["self_test"]["verdict"] == "failed"
    degraded = ready.degraded()
    assert degraded is not None
    assert degraded.startswith("the padding self-test failed: padding changes logits by")
    assert boot_line(ready).endswith("padding self-test failed")


def test_self_test_is_skipped_and_said_so_when_it_has_no_time() -> None:
    ready = tiny_engine(self_test_seconds=0).ready()
    assert boot_line(ready).endswith("padding self-test skipped")
    assert ready.degraded() is None


class Failing(EagerBackend):
    """Raises `error` at recording number `at`."""

    def __init__(self, error: RuntimeError, at: int) -> None:
        self._error = error
        self._left = at

    def record(self, program: Callable[[], T]) -> Callable[[], T]:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().record(program)


@pytest.mark.parametrize("at", [0, 12], ids=["pricing", "warming"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:131] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["cuda", "cpu"],
)
def test_start_names_the_flags_to_lower_when_memory_runs_out(error: RuntimeError, at: int) -> None:
    with pytest.raises(OutOfMemory) as caught:
        tiny_engine(backend=Failing(error, at)).ready()
    message = str(caught.value)
    assert message.startswith("the warm-up ran out of memory (")
    assert message.endswith("; lower --kv-memory, --warm-width, --warm-rows or --max-sequences")
    assert "\n" not in message


def test_other_errors_of_the_device_are_not_taken_for_memory() -> None:
    with pytest.raises(RuntimeError, match="on fire"):
        tiny_engine(backend=Failing(RuntimeError("the device is on fire"), 8)).ready()


def test_start_fails_when_the_slot_table_moved_before_the_warm_up() -> None:
    tiny = tiny_engine()
    tiny.engine.runner.slots.to("meta")
    with pytest.raises(GateError, match="the slot table moved"):
        tiny.ready()


@pytest.mark.parametrize(
    ("origin", "rows", "message"),
    [("background", (0, 1), r"froze rows \(0, 1\)"), ("cold", (), "1 graphs were recorded after ready")],
)
def test_start_fails_when_the_set_holds_a_graph_that_is_not_warm(
    origin: Origin, rows: tuple[int, ...], message: str
) -> None:
    tiny = tiny_engine(warm_rows=1)
    graphs: Any = tiny.engine.runner.graphs
    graphs.capture(GraphKey("decode", 2, 16), lambda: None, origin=origin, rows=rows, clock=lambda: 0.0)
    with pytest.raises(GateError, match=message):
        tiny.ready()


def test_shapes_are_described_by_count_and_range() -> None:
    assert describe_shapes([]) == "no shapes"
    listed = [DecodeShape(8, 512), DecodeShape(4, 2048)]
    assert describe_shapes(listed) == "2 shapes (rows 4 to 8, width 512 to 2,048)"
