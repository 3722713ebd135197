"""CUDA graphs over the reference kernels: recorded on a side stream into one pool, replayed on any step's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanoserve.backends import CudaBackend
from nanoserve.buckets import DecodeShape
from nanoserve.request import SamplingParams
from nanoserve.warmup import (
    CostModel,
    biggest_first,
    check_no_cold_captures,
    check_warm_graphs_unbound,
    lazy_captures,
)
from tests.tiny_engines import Tiny, prompts, tiny_engine, traffic

pytestmark = pytest.mark.gpu

FREE = CostModel(0.0, 0.0)


def cuda_engine(**fields: Any) -> Tiny:
    return tiny_engine(device="cuda", **fields)


@pytest.fixture
def precise() -> Iterator[None]:
    """Without TF32, so that shapes may not differ by more than the order of a sum."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_backend_is_cuda_and_the_self_test_passes_when_the_device_is_one(precise: None) -> None:
    tiny = cuda_engine(layers=2)
    ready = tiny.ready()
    assert tiny.graphs()["backend"] == "cuda"
    assert (ready.self_test.verdict, ready.self_test.rows) == ("passed", (2, 4))
    assert ready.report.graphs == 12
    assert ready.report.arena_bytes is not None
    assert ready.report.arena_bytes >= ready.report.predicted_bytes


@pytest.mark.parametrize("layers", [1, 3])
def test_tokens_are_the_eager_ones_over_random_traffic_when_all_was_warmed(layers: int, precise: None) -> None:
    eager = traffic(cuda_engine(layers=layers, capture_decode=False), requests=200, seed=7)
    tiny = cuda_engine(layers=layers)
    tiny.ready()
    run = traffic(tiny, requests=200, seed=7)
    assert run.answers == eager.answers
    graphs = tiny.graphs()
    assert (graphs["cold_captures"], graphs["hit_rate"], graphs["replays"]) == (0, 1.0, run.decode_steps)


def test_tokens_are_the_eager_ones_when_graphs_are_recorded_in_the_middle_of_a_run(precise: None) -> None:
    """A recording between two steps disturbs no running sequence, and freezes none."""
    eager = traffic(cuda_engine(layers=2, capture_decode=False), requests=100, seed=8)
    tiny = cuda_engine(layers=2, warmup_seconds=0)
    tiny.ready()
    run = traffic(tiny, requests=100, seed=8)
    assert run.answers == eager.answers
    graphs = tiny.engine.runner.graphs
    assert graphs is not None
    assert graphs.count("cold") == tiny.metrics.counters.misses > 0
    check_warm_graphs_unbound(graphs)


@pytest.mark.parametrize(("generated", "captures"), [(8, 1), (32, 2), (64, 3), (128, 5)])
def test_client_meets_the_predicted_recordings_when_cold_and_none_when_warmed(generated: int, captures: int) -> None:
    fields = {"max_sequences": 2, "max_model_len": 16 + generated, "block_size": 16, "width_multiple": 32}
    cold, warm = cuda_engine(**fields), cuda_engine(**fields)
    warm.ready()
    answers = []
    for tiny in (cold, warm):
        sequences = prompts(2, 16, max_tokens=generated, block_size=16)
        tiny.run(sequences)
        answers.append([sequence.tokens for sequence in sequences])
    assert answers[0] == answers[1]
    predicted = lazy_captures(steps=generated, start_width=16, width_multiple=32)
    assert cold.graphs()["cold_captures"] == predicted == captures
    assert warm.engine.runner.graphs is not None
    check_no_cold_captures(warm.engine.runner.graphs)


def test_sampled_rows_follow_this_steps_parameters_when_replayed(precise: None) -> None:
    tiny, eager = cuda_engine(), cuda_engine(capture_decode=False)
    tiny.ready()
    params = SamplingParams(temperature=1.3, top_k=20, top_p=0.95)
    answers = []
    for engine in (tiny, eager):
        sequences = [*prompts(1, 6, max_tokens=16), *prompts(2, 6, max_tokens=16, params=params, seed=3)]
        engine.run(sequences)
        answers.append([sequence.output_ids for sequence in sequences])
    assert answers[0] == answers[1]


def test_live_rows_are_unchanged_when_all_other_memory_is_nan(precise: None) -> None:
    tiny = cuda_engine(layers=2)
    tiny.ready()
    runner, slots = tiny.engine.runner, list(range(8, 14))
    shapes = [DecodeShape(rows, width) for rows in (1, 2, 4) for width in (16, 64)]
    runner.probe_prefill([5, 6, 7, 8, 9], slots[:5])
    clean = [runner.probe_decode(shape, slots) for shape in shapes]
    kept = [runner.cache.read(layer, slots) for layer in range(2)]
    with torch.inference_mode():
        runner.cache.poison(float("nan"))
        for layer, (k, v) in enumerate(kept):
            runner.cache.write(layer, torch.tensor(slots, device="cuda"), k, v)
    for shape, before in zip(shapes, clean, strict=True):
        after = runner.probe_decode(shape, slots)
        assert after.isfinite().all()
        assert torch.equal(after, before)


def test_arena_is_shared_and_sized_by_its_biggest_member_when_that_is_recorded_first() -> None:
    tiny = cuda_engine(layers=2, max_sequences=8, max_model_len=256, width_multiple=64)
    runner = tiny.engine.runner
    assert runner.shapes is not None
    shapes = biggest_first(runner.shapes.shapes())
    tiny.engine.warm_decode(shapes[:1], cost=FREE)
    assert runner.graphs is not None
    first = runner.graphs.backend.arena_bytes()
    report = tiny.engine.warm_decode(shapes[1:], cost=FREE)
    assert first is not None
    assert report.arena_bytes is not None
    # Outputs of every graph stay; what a forward needs on the way is shared.
    assert first <= report.arena_bytes < len(shapes) * first / 4


def test_recording_leaves_the_callers_stream_current() -> None:
    device = torch.device("cuda")
    backend = CudaBackend(device)
    before = torch.cuda.current_stream(device)
    source = torch.arange(4.0, device=device)
    replay = backend.record(lambda: source * 2)
    assert torch.cuda.current_stream(device) == before
    source.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    assert replay().tolist() == [10.0, 12.0, 14.0, 16.0]
    assert backend.arena_bytes()


def test_no_graph_is_left_when_a_program_cannot_be_captured() -> None:
    """A program that waits for the device cannot be a graph; the next recording must work all the same."""
    backend = CudaBackend(torch.device("cuda"))
    source = torch.arange(4.0, device="cuda")
    with pytest.raises(RuntimeError):
        backend.record(lambda: float(source.sum()))
    replay = CudaBackend(torch.device("cuda")).record(lambda: source + 1)
    assert replay().tolist() == [1.0, 2.0, 3.0, 4.0]
