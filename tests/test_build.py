"""The composition root: what a config becomes, in which order, and what it refuses."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.backends import EagerBackend
from nanoserve.boot import Booted, BootProgress
from nanoserve.build import RECTANGLE_MODEL_LEN, build_engine, describe_plan, prepare
from nanoserve.choices import check_config, choose, pick_backend, pick_device, pick_dtype
from nanoserve.config import EngineConfig
from nanoserve.errors import ConfigError, ModelUnavailable, OutOfMemory
from nanoserve.metrics import Metrics
from nanoserve.readiness import memory_is_enough
from nanoserve.request import Request, SamplingParams, TextPrompt
from tests.tiny_engines import SlowBackend
from tests.tiny_folder import EOS, VOCAB_SIZE, write_served_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("build") / "model", num_hidden_layers=1)


def config_for(folder: Path, **fields: Any) -> EngineConfig:
    defaults = {
        "device": "cpu",
        "kernels": "reference",
        "max_sequences": 2,
        "max_model_len": 64,
        "block_size": 4,
        "width_multiple": 32,
    }
    return EngineConfig(model=str(folder), **{**defaults, "threads": 1, "self_test_seconds": 30.0, **fields})


def build(folder: Path, reports: list[BootProgress] | None = None, **fields: Any) -> tuple[Booted, Metrics]:
    metrics = Metrics("test")
    report = reports.append if reports is not None else lambda progress: None
    return build_engine(config_for(folder, **fields), metrics, report, bar=False), metrics


def answer(booted: Booted, text: str, max_tokens: int) -> list[int]:
    request = Request("r", TextPrompt(text), SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    (sequence,) = booted.intake.sequences(request)
    booted.engine.add(sequence)
    while booted.engine.scheduler.has_work:
        booted.engine.step()
    return sequence.output_ids


# --- from config to a warm engine ------------------------------------------------------------------------------------


def test_engine_is_warm_and_serves_without_a_recording_when_built(folder: Path) -> None:
    reports: list[BootProgress] = []
    booted, metrics = build(folder, reports)
    assert len(answer(booted, "hello", 40)) == 40
    graphs = metrics.snapshot()["graphs"]
    assert (graphs["warmed"], graphs["captured"], graphs["cold_captures"], graphs["hit_rate"]) == (4, 4, 0, 1.0)
    assert (graphs["read"], graphs["backend"]) == ("rectangle", "eager")
    assert booted.kernels == "reference"
    assert booted.degraded() is None


def test_stages_are_reported_in_order_weights_first_then_the_warm_up(folder: Path) -> None:
    """`ready` is for whoever serves to say."""
    reports: list[BootProgress] = []
    build(folder, reports)
    stages = [progress.stage for progress in reports]
    assert stages == sorted(stages), "loading comes before warming"
    assert set(stages) == {"loading", "warming"}
    loading = [progress for progress in reports if progress.stage == "loading" and progress.total is not None]
    assert loading[-1].done == loading[-1].total
    assert reports[-1] == BootProgress("warming", 4, 4, 0.0)


def test_health_gets_the_pools_plan_and_the_warm_ups_beside_it(folder: Path) -> None:
    booted, _ = build(folder)
    assert booted.kv_pool["num_blocks"] == 2 * 64 // 4
    assert booted.kv_pool["max_model_len"] == 64
    assert booted.kv_pool["max_sequences"] == 2
    summary = booted.warmup()
    assert (summary["graphs"], summary["uncovered"], summary["trimmed"]) == (4, [], 0)
    assert (summary["row_ceiling"], summary["width_ceiling"]) == (2, 64)
    assert summary["self_test"]["verdict"] == "passed"
    assert summary["budget_bytes"] > 0


def test_health_gets_what_the_weights_are_and_how_long_each_stage_took(folder: Path) -> None:
    booted, _ = build(folder)
    assert booted.weights["layers"] == booted.weights["head"] == "F32"
    assert booted.weights["bytes"] > 0
    assert list(booted.boot_seconds) == ["kernels", "weights", "tokenizer", "engine", "warm-up"]
    assert all(seconds >= 0 for seconds in booted.boot_seconds.values())


def test_width_ceiling_is_what_the_deployment_sells_when_the_pool_holds_less_than_asked(folder: Path) -> None:
    """The shapes follow the pool's plan, which is made first."""
    per_block = 4 * 2 * 2 * 16 * 4  # block * (k, v) * kv heads * head size * fp32
    booted, _ = build(folder, kv_memory_bytes=per_block * 11)
    assert booted.kv_pool["num_blocks"] == 10
    assert booted.intake.max_model_len == 40
    shapes = booted.engine.runner.shapes
    assert shapes is not None
    assert shapes.width_ladder == (32, 64)
    assert booted.engine.runner.slots.shape == (2, 64)
    booted, _ = build(folder, kv_memory_bytes=per_block * 8)
    assert booted.engine.runner.shapes is not None
    assert booted.engine.runner.shapes.width_ladder == (32,)


def test_warm_list_is_threaded_to_the_warm_up_and_saved_when_the_engine_ends(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    booted, _ = build(folder, warm_list=str(path))
    answer(booted, "hello", 4)
    booted.close()
    assert path.exists()
    again, _ = build(folder, warm_list=str(path))
    assert again.engine.runner.graphs is not None
    first = again.engine.runner.graphs.entries()[0].key
    assert (first.rows, first.width) == (1, 32)


@pytest.mark.parametrize(
    ("fields", "graphs", "inputs"),
    [
        ({"capture_decode": False}, False, True),
        ({"capture_decode": False, "bucket_decode": False}, False, True),
        ({"capture_decode": False, "bucket_decode": False, "persist_inputs": False}, False, False),
    ],
    ids=["no graphs", "no buckets", "plain"],
)
def test_engine_serves_the_same_answer_when_the_graph_flags_are_off(
    folder: Path, fields: dict[str, bool], graphs: bool, inputs: bool
) -> None:
    warm, _ = build(folder)
    plain, metrics = build(folder, **fields)
    assert (plain.engine.runner.graphs is not None) == graphs
    assert plain.warmup() == {}
    assert plain.degraded() is None
    plain.close()
    assert answer(plain, "what is it?", 20) == answer(warm, "what is it?", 20)
    assert metrics.snapshot()["graphs"]["hit_rate"] is None
    assert metrics.snapshot()["graphs"]["eager_steps"] == 19


def test_graphs_are_recorded_by_the_backend_that_is_handed_in(folder: Path) -> None:
    recordings = []
    backend = SlowBackend(before=lambda: recordings.append(1))
    metrics = Metrics("test")
    build_engine(config_for(folder), metrics, lambda progress: None, bar=False, backend=backend)
    assert len(recordings) >= 4
    assert metrics.snapshot()["graphs"]["warmed"] == 4


def test_sampling_defaults_are_the_models_own(folder: Path, tmp_path: Path) -> None:
    assert build(folder)[0].sampling_defaults == {}
    other = write_served_model(tmp_path / "other", num_hidden_layers=1)
    (other / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 7, "do_sample": true}')
    assert build(other)[0].sampling_defaults == {"temperature": 0.3, "top_k": 7}


def test_intake_knows_the_models_vocabulary_and_ends(folder: Path) -> None:
    prepared = prepare(config_for(folder), Metrics("test"), lambda progress: None, bar=False)
    request = Request("r", TextPrompt("x"), SamplingParams(max_tokens=3))
    (sequence,) = prepared.intake.sequences(request)
    assert sequence.eos_token_ids == frozenset({EOS})
    assert prepared.facts.vocab_size == VOCAB_SIZE
    assert prepared.facts.num_heads == 4
    assert prepared.engine.runner.graphs is not None
    assert len(prepared.engine.runner.graphs) == 0


def test_context_defaults_to_the_models_and_no_more_than_the_rectangle_affords(folder: Path, tmp_path: Path) -> None:
    quiet = {"max_model_len": None, "capture_decode": False}
    assert build(folder, **quiet)[0].intake.max_model_len == 512
    longer = write_served_model(tmp_path / "longer", num_hidden_layers=1, max_position_embeddings=4096)
    assert build(longer, **quiet)[0].intake.max_model_len == RECTANGLE_MODEL_LEN == 2048


def resident_share(tensor: torch.Tensor) -> float:
    """Of a tensor's memory: how many of the pages wholly inside it are in RAM (mincore(2))."""
    page = os.sysconf("SC_PAGE_SIZE")
    start, stop = -(-tensor.data_ptr() // page) * page, (tensor.data_ptr() + tensor.nbytes) // page * page
    pages = (ctypes.c_ubyte * ((stop - start) // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), pages) == 0
    return sum(state & 1 for state in pages) / len(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux which pages are in RAM")
@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("prefault", [False, True])
def test_the_pool_is_resident_at_boot_only_when_it_was_asked_for(kernels: str, prefault: bool, folder: Path) -> None:
    fields: dict[str, Any] = {"kernels": kernels, "block_size": 16, "max_model_len": 512, "max_sequences": 2048}
    config = config_for(folder, **fields, kv_memory_bytes=256 << 20, prefault=prefault)
    prepared = prepare(config, Metrics("test"), lambda progress: None, bar=False)
    store = prepared.engine.runner.cache.store(0)
    assert min(side.nbytes for side in store) > 48 << 20, "more than the C library ever takes from memory it has"
    shares = [resident_share(side) for side in store]
    assert min(shares) == 1.0 if prefault else max(shares) < 0.1


# --- the dry run -----------------------------------------------------------------------------------------------------


def test_dry_run_says_pool_plan_and_what_stays_cold_and_records_no_list(folder: Path) -> None:
    metrics = Metrics("test")
    lines = describe_plan(config_for(folder, warm_rows=1), metrics, lambda progress: None)
    assert lines[0].startswith("K/V pool: 32 blocks of 4 = 128 tokens")
    assert lines[1].startswith("warm-up: 2 of 4 shapes (rows <= 1, width <= 64), 2 trimmed; predicted ")
    assert lines[2] == "without a graph when the door opens: 2 shapes (rows 2 to 2, width 32 to 64)"
    assert len(lines) == 3
    assert metrics.snapshot()["graphs"]["captured"] == 0


def test_dry_run_says_the_pool_only_when_nothing_is_recorded(folder: Path) -> None:
    lines = describe_plan(config_for(folder, capture_decode=False), Metrics("test"), lambda progress: None)
    assert len(lines) == 1


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_sequences": 0}, "--max-sequences is 0; it must be from 1 to 65,536"),
        ({"block_size": -1}, "--block-size is -1; it must be from 1"),
        ({"width_multiple": 0}, "--width-multiple is 0"),
        ({"max_step_rows": 0}, "--max-step-rows is 0"),
        ({"max_queued_tokens": 0}, "--max-queued-tokens is 0"),
        ({"prefill_gap_seconds": -1.0}, "--prefill-gap-seconds is -1.0"),
        ({"request_timeout_seconds": 0.0}, "--request-timeout is 0.0"),
        ({"max_queued": 0}, "--max-queued is 0"),
        ({"threads": 0}, "--threads is 0"),
        ({"threads": 2048}, "--threads is 2048; it must be from 1 to 1,024"),
        ({"warm_rows": 0}, "--warm-rows is 0"),
        ({"warm_width": -5}, "--warm-width is -5"),
        ({"warmup_seconds": -1.0}, "--warmup-seconds is -1.0; it must be a number of seconds, at least 0"),
        ({"warmup_seconds": math.nan}, "--warmup-seconds is nan"),
        ({"self_test_seconds": -0.1}, "--self-test-seconds is -0.1"),
        ({"max_model_len": 1}, "--max-model-len is 1; a prompt and an answer need at least 2 tokens"),
        ({"bucket_decode": False}, "add --no-capture-decode"),
        ({"persist_inputs": False}, "add --no-capture-decode"),
        ({"attention_read": "paged", "capture_decode": False}, "--attention-read paged replays every step"),
    ],
)
def test_config_is_refused_with_the_flag_and_the_remedy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(EngineConfig(**fields))
    assert message in str(caught.value)


@pytest.mark.parametrize(("sequences", "rows"), [(None, 512), (8, 512), (300, 600)])
def test_step_has_rows_for_prompts_when_nobody_says_how_many(sequences: int | None, rows: int) -> None:
    config = EngineConfig(device="cpu", kernels="reference", max_sequences=sequences)
    assert choose(config).config.step_rows == rows


def test_config_is_refused_when_a_step_has_fewer_rows_than_sequences_may_decode() -> None:
    config = EngineConfig(device="cpu", kernels="reference", max_sequences=9)
    assert choose(dataclasses.replace(config, max_step_rows=9)).config.step_rows == 9
    with pytest.raises(ConfigError, match="--max-step-rows is 8; 9 sequences may decode in one step, a row each"):
        choose(dataclasses.replace(config, max_step_rows=8))


def test_config_is_accepted_when_it_is_the_default() -> None:
    check_config(EngineConfig())
    check_config(EngineConfig(warmup_seconds=0.0, self_test_seconds=0.0, warm_rows=1, warm_width=1, threads=1))
    assert dataclasses.replace(EngineConfig(), model="x").capture_decode


def test_start_is_refused_when_the_context_is_longer_than_the_models(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 600; the model was made for 512; lower it"):
        build(folder, max_model_len=600)


def test_start_is_refused_when_the_pool_does_not_fit(folder: Path) -> None:
    with pytest.raises(OutOfMemory, match="raise --kv-memory"):
        build(folder, kv_memory_bytes=100)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...\nmore")]
)
def test_error_names_the_flags_to_lower_when_memory_runs_out(error: Exception) -> None:
    with (
        pytest.raises(
            OutOfMemory, match=r"^the table ran out of memory \(.*(MemoryError|you tried .*)\); lower --flag$"
        ),
        memory_is_enough("the table", "--flag"),
    ):
        raise error
    with pytest.raises(RuntimeError, match="another fault"), memory_is_enough("the table", "--flag"):
        raise RuntimeError("another fault")


def test_start_is_refused_when_there_is_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable):
        build(tmp_path / "nothing")


def test_start_is_refused_when_shapes_are_strict_and_trimmed(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--strict-shapes"):
        build(folder, strict_shapes=True, warm_width=32)


def test_device_is_the_cpu_when_auto_finds_no_accelerator() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_device_is_refused_when_it_is_none() -> None:
    with pytest.raises(ConfigError, match="'toaster' is no device; use auto, cpu or cuda"):
        pick_device("toaster")
    with pytest.raises(ConfigError, match="--device mps: there are no kernels for mps; use auto, cpu or cuda"):
        pick_device("mps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_device_is_refused_when_it_is_not_here() -> None:
    with pytest.raises(ConfigError, match="--device cuda: no CUDA device here"):
        pick_device("cuda")


def test_backend_is_eager_on_the_cpu_and_others_are_refused() -> None:
    assert isinstance(pick_backend(EngineConfig(), CPU), EagerBackend)
    assert isinstance(pick_backend(EngineConfig(graph_backend="eager"), CPU), EagerBackend)
    for name in ("cuda", "native"):
        with pytest.raises(ConfigError, match=f"--graph-backend {name} does not run on cpu; use auto"):
            pick_backend(EngineConfig(graph_backend=name), CPU)  # type: ignore[arg-type]


def test_dtype_is_fp32_on_the_cpu_when_nothing_is_asked_for() -> None:
    assert pick_dtype(EngineConfig(), CPU) == "float32"
    assert pick_dtype(EngineConfig(dtype="bfloat16"), CPU) == "bfloat16"
    assert pick_dtype(EngineConfig(), torch.device("cuda")) == "auto"


def test_dry_run_refuses_what_a_start_would_refuse_when_shapes_are_strict(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--strict-shapes, and the warm-up leaves 4 shapes"):
        describe_plan(config_for(folder, strict_shapes=True, warmup_seconds=0.0), Metrics("test"), lambda _: None)


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_loading_ends_at_its_total_and_positions_at_the_context(folder: Path, kernels: str) -> None:
    reports: list[BootProgress] = []
    fields = {"kernels": kernels, "block_size": 16, "max_model_len": 48}
    prepared = prepare(config_for(folder, **fields), Metrics("test"), reports.append, bar=False)
    loading = [report for report in reports if report.stage == "loading" and report.done]
    assert loading[-1].done == loading[-1].total
    assert max(report.done or 0 for report in loading) == loading[-1].total
    assert prepared.pool.max_model_len == 48
