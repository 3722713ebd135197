"""GraphSet and the eager backend: recordings, replays, refusals and what is counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanoserve.backends import EagerBackend
from nanoserve.buckets import DecodePlan, DecodeRow, ShapeSet, pad_plan, plan_decode
from nanoserve.errors import GateError
from nanoserve.graphs import GraphKey, GraphSet, Origin
from tests.bound_plans import SHAPE, SINK, bench, small_cache

KEY = GraphKey("decode", *SHAPE)


def real_plan(rows: int) -> DecodePlan:
    return plan_decode([DecodeRow(row, 3, row) for row in range(rows)], ShapeSet((4,), (16,)), 99)


class Program:
    """Counts its runs and returns the number of the run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self) -> int:
        self.runs += 1
        return self.runs


def capture(
    graphs: GraphSet[int],
    program: Program,
    *,
    key: GraphKey = KEY,
    origin: Origin = "warm",
    rows: tuple[int, ...] = (),
) -> None:
    ticks = itertools.count(10.0, 0.5)
    graphs.capture(key, program, origin=origin, rows=rows, clock=lambda: next(ticks))


@pytest.fixture
def graphs() -> GraphSet[int]:
    return GraphSet(EagerBackend(), read="rectangle")


def test_eager_recording_runs_the_program_once_and_replays_call_it_again() -> None:
    program = Program()
    replay = EagerBackend().record(program)
    assert program.runs == 1
    assert [replay(), replay()] == [2, 3]


def test_key_is_in_the_set_when_its_graph_was_recorded(graphs: GraphSet[int]) -> None:
    assert KEY not in graphs
    capture(graphs, Program())
    assert KEY in graphs
    assert GraphKey("decode", 4, 32) not in graphs
    assert GraphKey("body", 4, 16) not in graphs
    assert len(graphs) == 1
    assert graphs.entries()[0].record_seconds == 0.5


def test_recording_is_refused_when_the_key_has_a_graph(graphs: GraphSet[int]) -> None:
    capture(graphs, Program())
    again = Program()
    with pytest.raises(GateError, match="is recorded already"):
        capture(graphs, again)
    assert again.runs == 0


def test_no_entry_is_left_when_recording_raises(graphs: GraphSet[int]) -> None:
    def broken() -> int:
        raise RuntimeError("the device is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        graphs.capture(KEY, broken, origin="warm", rows=(), clock=lambda: 0.0)
    assert KEY not in graphs
    capture(graphs, Program())


class Narrowing(EagerBackend):
    """Narrows a recording to one that returns its result and the rows."""

    def narrow(self, replay: Callable[[], Any], rows: int) -> Callable[[], Any]:
        return lambda: (replay(), rows)


def test_graph_is_narrowed_when_its_kind_is_recorded_for_more_rows() -> None:
    graphs: GraphSet[Any] = GraphSet(Narrowing(), read="paged")
    programs = {GraphKey("body", rows, None): Program() for rows in (4, 8, 2)}
    programs[GraphKey("head", 2, None)] = Program()
    for key, program in programs.items():
        capture(graphs, program, key=key)
    assert [program.runs for program in programs.values()] == [1, 1, 0, 1]
    assert graphs.rehearse(GraphKey("body", 2, None)) == [(2, 2)], "the first one's second run"


def test_rectangle_is_recorded_when_a_graph_of_more_rows_has_another_width() -> None:
    graphs: GraphSet[Any] = GraphSet(Narrowing(), read="rectangle")
    program = Program()
    capture(graphs, Program(), key=GraphKey("decode", 8, 16))
    capture(graphs, program, key=GraphKey("decode", 4, 32))
    assert program.runs == 1


def test_recording_and_narrowing_are_timed_apart_and_nothing_is_kept(graphs: GraphSet[int]) -> None:
    for made, narrowing in ((graphs, None), (GraphSet[Any](Narrowing(), read="paged"), 0.5)):
        clock = itertools.count(10.0, 0.5).__next__
        assert made.time_recording(KEY, Program(), clock=clock) == (0.5, narrowing)
        assert KEY not in made


def test_replay_is_counted_with_its_real_and_pad_rows(graphs: GraphSet[int]) -> None:
    capture(graphs, Program())
    assert graphs.replay(KEY, real_plan(3)) == 2
    assert graphs.replay(KEY, real_plan(4)) == 3
    graphs.add_seconds(KEY, 0.25)
    graphs.add_seconds(KEY, 0.5)
    assert graphs.shapes() == [
        {
            "kind": "decode",
            "rows": 4,
            "width": 16,
            "warmed": True,
            "replays": 2,
            "real_rows": 7,
            "pad_rows": 1,
            "seconds_total": 0.75,
        }
    ]


def test_replay_is_refused_and_not_counted_when_no_graph_is_recorded(graphs: GraphSet[int]) -> None:
    with pytest.raises(KeyError):
        graphs.replay(KEY, real_plan(3))
    assert graphs.stats()["replays"] == 0


def test_replay_is_refused_and_not_run_when_the_graph_froze_other_rows(graphs: GraphSet[int]) -> None:
    program = Program()
    capture(graphs, program, origin="cold", rows=(0, 1, 2))
    assert graphs.replay(KEY, real_plan(3)) == 2
    with pytest.raises(GateError, match=r"froze rows \(0, 1, 2\); this step runs rows \(0, 1\)"):
        graphs.replay(KEY, real_plan(2))
    assert program.runs == 2
    assert graphs.stats()["replays"] == 1


def test_rehearsal_runs_the_graph_and_counts_nothing(graphs: GraphSet[int]) -> None:
    capture(graphs, Program())
    assert graphs.rehearse(KEY) == [2]
    assert graphs.stats()["replays"] == 0
    assert graphs.shapes()[0]["real_rows"] == graphs.shapes()[0]["pad_rows"] == 0


def test_warm_plan_replays_as_all_padding(graphs: GraphSet[int]) -> None:
    capture(graphs, Program())
    graphs.replay(KEY, pad_plan(SHAPE, 99))
    assert graphs.shapes()[0]["pad_rows"] == 4


def test_recordings_are_counted_by_who_waited_for_them(graphs: GraphSet[int]) -> None:
    for rows, origin in ((1, "warm"), (2, "cold"), (3, "background"), (4, "warm"), (5, "cold"), (6, "cold")):
        capture(graphs, Program(), key=GraphKey("decode", rows, 16), origin=origin)
    graphs.warmup_seconds, graphs.predicted_seconds = 1.5, 1.25
    assert graphs.stats() == {
        "read": "rectangle",
        "backend": "eager",
        "warmed": 2,
        "captured": 6,
        "cold_captures": 3,
        "background_captures": 1,
        "replays": 0,
        "warmup_seconds": 1.5,
        "predicted_seconds": 1.25,
    }
    assert [shape["warmed"] for shape in graphs.shapes()] == [True, False, False, True, False, False]


# --- the recording in the middle of a run -----------------------------------------------------------------------------


def kv_of_two_steps(replay_unguarded: bool) -> tuple[list[float], list[int]]:
    """A graph recorded in step 1 that froze its rows' slots, replayed in step 2, when another sequence has one of them.

    Returns layer 0's keys by slot after step 2, and the slots that step 2 was to write.
    """
    on, kv = bench(), small_cache()
    graphs: GraphSet[None] = GraphSet(EagerBackend(), read="rectangle")
    first = on.real()
    frozen = torch.tensor(first.plan.write_slots)
    ones = torch.ones(SHAPE.rows, 1, 1)
    graphs.capture(KEY, lambda: kv.write(0, frozen, ones, ones), origin="cold", rows=first.plan.rows, clock=lambda: 0.0)
    # Row 2 has finished; its slot 15 is another sequence's now, and the two rows left write elsewhere.
    kv.write(0, torch.tensor([15]), 7 * ones[:1], 7 * ones[:1])
    on.expected[:] = [[*on.expected[0], 47], [*on.expected[1], 100]]
    for row, slots in enumerate(on.expected):
        on.slots.write(row, 0, slots)
    on.slots.clear(2)
    second = plan_decode(
        [DecodeRow(row, len(slots) - 1, slots[-1]) for row, slots in enumerate(on.expected)],
        ShapeSet((4,), (16,)),
        SINK,
    )
    graphs.rehearse(KEY) if replay_unguarded else graphs.replay(KEY, second)
    return kv.snapshot(0)[0].flatten().tolist(), [47, 100]


def test_recording_of_a_running_step_writes_into_other_sequences_slots_when_nothing_guards_it() -> None:
    keys, wanted = kv_of_two_steps(replay_unguarded=True)
    assert keys[15] == 1.0, "the other sequence's 7 is gone"
    assert [keys[slot] for slot in wanted] == [0.0, 0.0], "and this step's tokens are nowhere"


def test_recording_of_a_running_step_is_refused_when_other_rows_would_replay_it() -> None:
    with pytest.raises(GateError, match=r"froze rows \(0, 1, 2\); this step runs rows \(0, 1\)"):
        kv_of_two_steps(replay_unguarded=False)


def test_recording_over_nothing_writes_each_steps_own_slots_when_it_is_replayed() -> None:
    """What it froze are windows, on buffers that hold whatever the step at hand wrote."""
    on, kv = bench(), small_cache()
    graphs: GraphSet[None] = GraphSet(EagerBackend(), read="rectangle")
    warm = on.warm()
    ones = torch.ones(SHAPE.rows, 1, 1)
    graphs.capture(
        KEY,
        lambda: kv.write(0, warm.step.write_slots, ones, ones),
        origin="warm",
        rows=warm.plan.rows,
        clock=lambda: 0.0,
    )
    first = on.real()
    graphs.replay(KEY, first.plan)
    keys = kv.snapshot(0)[0].flatten()
    assert torch.nonzero(keys).flatten().tolist() == sorted({*first.plan.write_slots[:3], SINK})


def test_seconds_are_unknown_when_nothing_was_warmed(graphs: GraphSet[int]) -> None:
    assert graphs.stats()["warmup_seconds"] is None
    assert graphs.stats()["predicted_seconds"] is None
