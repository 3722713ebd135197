"""The padding self-test: it passes on kernels that are right and fails on each kind that is wrong."""

from __future__ import annotations

import itertools

import pytest
import torch

from nanoserve.buckets import DecodeShape, ShapeSet
from nanoserve.graphs import GraphKey
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.warmup import CostModel, SelfTestReport, padding_self_test
from nanoserve.warmup.selftest import PROMPT_TOKENS
from tests.tiny_engines import LeakyOps, NanOps, StrayOps, Tiny, prompts, tiny_engine

SINK = 4 * 64


def self_test(tiny: Tiny, *, seconds: float = 30.0, slots: list[int] | None = None) -> SelfTestReport:
    runner = tiny.engine.runner
    graphs, shapes = runner.graphs, runner.shapes
    assert graphs is not None
    assert shapes is not None
    return padding_self_test(
        runner,
        shapes,
        lambda shape: GraphKey("decode", *shape) in graphs,
        slots=slots or list(range(PROMPT_TOKENS + 1)),
        vocab_size=96,
        seconds=seconds,
    )


def warmed(ops: ReferenceOps | None = None, *, rows: tuple[int, ...] = (1, 2, 4), layers: int = 1) -> Tiny:
    tiny = tiny_engine(ops=ops, layers=layers)
    tiny.engine.warm_decode([DecodeShape(count, 16) for count in rows], cost=CostModel(0.0, 0.0))
    return tiny


@pytest.mark.parametrize("slots", [list(range(6)), list(range(SINK - 6, SINK))], ids=["first", "last"])
def test_verdict_is_passed_when_kernels_are_right(slots: list[int]) -> None:
    """At both ends of the pool."""
    report = self_test(warmed(layers=2), slots=slots)
    assert (report.verdict, report.rows, report.reason) == ("passed", (2, 4), None)
    assert report.max_difference is not None
    assert report.max_difference < 1e-5
    assert report.summary()["verdict"] == "passed"


def test_verdict_is_failed_when_rows_see_each_other() -> None:
    report = self_test(warmed(LeakyOps()))
    assert report.verdict == "failed"
    assert report.rows == (2, 4)
    assert report.reason is not None
    assert report.reason.startswith("padding changes logits by ")
    assert report.reason.endswith(" of the largest; the limit is 1.0e-03")


def test_verdict_is_failed_when_padding_makes_logits_nan() -> None:
    """NaN compares as smaller than nothing: it must be looked for."""
    report = self_test(warmed(NanOps()))
    assert (report.verdict, report.max_difference) == ("failed", None)
    assert report.reason == "a row's logits are not finite"


def test_verdict_is_failed_when_a_pad_row_writes_outside_the_sink() -> None:
    report = self_test(warmed(StrayOps(SINK)))
    assert report.verdict == "failed"
    assert report.reason == f"a warm plan changed K/V slot {SINK - 1}; only slots from the sink {SINK} on may change"


def test_verdict_is_skipped_when_no_time_is_given() -> None:
    report = self_test(warmed(), seconds=0.0)
    assert (report.verdict, report.rows, report.reason) == ("skipped", (), "no time was given")


def test_verdict_is_skipped_when_time_ran_out_before_anything_was_compared() -> None:
    """To say passed of nothing would be a lie."""
    report = self_test(warmed(), seconds=1e-9)
    assert (report.verdict, report.rows) == ("skipped", ())
    assert report.reason == "1e-09 s were too few; raise --self-test-seconds"


def test_verdict_names_the_rows_compared_when_time_ran_out_on_the_way() -> None:
    tiny = warmed()
    runner = tiny.engine.runner
    assert runner.shapes is not None
    ticks = itertools.count()
    report = padding_self_test(
        runner,
        runner.shapes,
        lambda shape: shape.width == 16,
        slots=list(range(6)),
        vocab_size=96,
        seconds=1.0,
        clock=lambda: float(next(ticks)),
    )
    assert (report.verdict, report.rows) == ("passed", (2,))


@pytest.mark.parametrize("rows", [(1,), (2, 4), ()], ids=["alone", "never alone", "none"])
def test_verdict_is_skipped_when_there_is_nothing_to_compare(rows: tuple[int, ...]) -> None:
    report = self_test(warmed(rows=rows))
    assert (report.verdict, report.reason) == ("skipped", "there is no warm row bucket to compare a row alone with")


def test_verdict_is_skipped_when_the_narrowest_width_does_not_hold_the_prompt() -> None:
    tiny = tiny_engine(max_model_len=8, width_multiple=4)
    tiny.engine.warm_decode([DecodeShape(1, 4), DecodeShape(2, 4)], cost=CostModel(0.0, 0.0))
    assert self_test(tiny).verdict == "skipped"


@pytest.mark.parametrize("ops", [ReferenceOps(), StrayOps(SINK)], ids=["passed", "failed"])
def test_engine_serves_the_same_tokens_and_counts_nothing_when_the_test_has_run(ops: ReferenceOps) -> None:
    tested, plain = warmed(), warmed()
    self_test(tested)
    assert tested.graphs()["replays"] == 0
    assert torch.equal(
        tested.engine.runner.slots.read((0, 1, 2, 3), width=64), plain.engine.runner.slots.read((0, 1, 2, 3), width=64)
    )
    answers = []
    for tiny in (tested, plain):
        sequences = prompts(3, 5, max_tokens=8)
        tiny.run(sequences)
        answers.append([sequence.output_ids for sequence in sequences])
    assert answers[0] == answers[1]


def test_shapes_without_a_warm_graph_are_not_compared() -> None:
    tiny = warmed(rows=(1, 4))
    assert tiny.engine.runner.shapes == ShapeSet((1, 2, 4), (16, 32, 48, 64))
    assert self_test(tiny).rows == (4,)


# --- the paged read ---------------------------------------------------------------------------------------------------


class LeakyHead(ReferenceOps):
    """Logits that depend on how many rows a head has."""

    def logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().logits(x, weight) + 0.1 * (x.shape[0] - 1)


class LeakyBody(ReferenceOps):
    """Hidden states that depend on how many rows a body has."""

    def rope(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rope(x, positions, cos, sin) * (1 + x.shape[0] / 8)


def paged(shapes: list[GraphKey] | None = None, ops: ReferenceOps | None = None) -> SelfTestReport:
    tiny = tiny_engine(ops=ops, attention_read="paged", max_sequences=3, max_step_rows=7)
    runner = tiny.engine.runner
    assert runner.shapes is not None
    tiny.engine.warm_decode(shapes or runner.shapes.shapes(), cost=CostModel(0.0, 0.0))
    graphs = runner.graphs
    assert graphs is not None
    return padding_self_test(
        runner, runner.shapes, graphs.__contains__, slots=list(range(6)), vocab_size=96, seconds=30.0
    )


def test_bodies_and_heads_of_either_kind_are_compared_when_the_read_is_paged() -> None:
    report = paged()
    assert (report.verdict, report.rows) == ("passed", (1, 2, 3, 4, 7)), "a lone row has a full head too"
    for kind in ("head", "head_full"):
        alone = [GraphKey("body", 1, None), GraphKey("head", 1, None)]
        report = paged([*alone, GraphKey(kind, 3, None)], LeakyHead())  # type: ignore[arg-type]
        assert (report.verdict, report.rows) == ("failed", (3,))


def test_bodies_are_told_from_heads_when_only_they_are_wrong() -> None:
    heads = [GraphKey(kind, rows, None) for kind in ("head", "head_full") for rows in (1, 2, 3)]
    assert paged([GraphKey("body", 1, None), *heads], LeakyBody()).verdict == "passed"
    report = paged([GraphKey("body", 1, None), *heads, GraphKey("body", 7, None)], LeakyBody())
    assert (report.verdict, report.rows) == ("failed", (1, 2, 3, 7))


@pytest.mark.parametrize("missing", ["body", "head"])
def test_verdict_is_skipped_when_a_lone_rows_graphs_are_not_all_warm(missing: str) -> None:
    shapes = [GraphKey(kind, rows, None) for kind in ("body", "head", "head_full") for rows in (1, 2)]
    report = paged([shape for shape in shapes if shape[:2] != (missing, 1)])
    assert (report.verdict, report.reason) == ("skipped", "there is no warm row bucket to compare a row alone with")
