"""A boot behind an open port: what clients see while a slow device warms up, and in the idle gaps afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoserve.engine import Engine
from nanoserve.warmup import load_warm_list
from tests.server.support import TEXT, Running, error_of, wait_until
from tests.serving import served
from tests.tiny_engines import LeakyOps, SlowBackend, SlowOps
from tests.tiny_folder import write_served_model
from tests.tiny_server import warm_server

PROMPT = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("boot") / "tiny", num_hidden_layers=1)


def health(server: Running) -> dict[str, Any]:
    return dict(server.get("/health").json())


def wait_ready(server: Running, seconds: float = 30.0) -> dict[str, Any]:
    wait_until(lambda: server.get("/health").status_code == 200, seconds)
    return health(server)


# --- while the device warms up ---------------------------------------------------------------------------------------


def test_clients_see_a_truthful_countdown_when_the_device_is_slow_and_then_an_answer(folder: Path) -> None:
    """12 shapes of 0.05 s and 0.5 ms per row and 16 tokens of width: about 1.2 s."""
    ops = SlowOps(base=0.05, cell=5e-4)
    with warm_server(folder, ops=ops, backend=SlowBackend(ops)) as (server, _):
        seen: list[tuple[int, int, float]] = []
        refusals = []
        while (response := server.get("/health")).status_code == 503:
            assert server.get("/livez").status_code == 200
            body = response.json()
            progress = body["progress"]
            assert body["ready"] is False
            if body["status"] == "warming" and progress["total"]:
                seen.append((progress["done"], progress["total"], progress["eta_seconds"]))
                refused = server.post(TEXT, PROMPT)
                if refused.status_code == 503:
                    refusals.append(refused)
                assert 1 <= int(response.headers["retry-after"]) <= 120
            time.sleep(0.03)
        assert response.status_code == 200
        ready = response.json()

        assert len(seen) >= 4
        assert {total for _, total, _ in seen} == {12}
        assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
        etas = [eta for _, _, eta in seen]
        assert etas[0] > 0.5
        assert etas[-1] < etas[0] / 2
        thirds = [etas[i * len(etas) // 3 : (i + 1) * len(etas) // 3] for i in range(3)]
        means = [sum(third) / len(third) for third in thirds]
        assert means == sorted(means, reverse=True)

        assert len(refusals) >= 3
        for refused in refusals:
            error = error_of(refused)
            assert (error["code"], error["type"]) == ("not_ready", "server_error")
            assert "of 12); wait until /health is 200" in error["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 120

        warmup = ready["warmup"]
        assert ready["status"] == "ready"
        assert (warmup["graphs"], warmup["uncovered"]) == (12, [])
        assert abs(warmup["seconds"] - warmup["predicted_seconds"]) < 0.25 * warmup["predicted_seconds"]
        answer = server.post(TEXT, PROMPT).json()
        assert answer["nanoserve"]["graph"]["replays"] == 7
        graphs = server.get("/metrics").json()["graphs"]
        assert (graphs["cold_captures"], graphs["hit_rate"], graphs["warmed"]) == (0, 1.0, 12)


def test_health_has_the_pools_plan_and_the_warm_ups_beside_it_when_ready(folder: Path) -> None:
    with warm_server(folder) as (server, _):
        body = wait_ready(server)
    assert body["status"] == "ready"
    assert body["kernels"] == "reference"
    assert body["kv_pool"]["num_blocks"] == 64
    assert body["kv_pool"]["limited_by"] == "max_sequences x max_model_len"
    warmup = body["warmup"]
    assert (warmup["row_ceiling"], warmup["width_ceiling"], warmup["graphs"]) == (4, 64, 12)
    assert warmup["budget_bytes"] > 0
    assert warmup["predicted_bytes"] == 4 * 4 * 64 * 4
    assert warmup["self_test"]["verdict"] == "passed"
    assert warmup["self_test"]["rows"] == [2, 4]


def test_health_says_degraded_and_serves_when_the_list_was_trimmed(folder: Path) -> None:
    with warm_server(folder, warm_rows=2) as (server, _):
        body = wait_ready(server)
        assert body["status"] == "degraded"
        assert body["message"].startswith("4 shapes (rows 4 to 4, width 16 to 64) without a graph; a step that meets")
        assert body["warmup"]["uncovered"] == [[4, 16], [4, 32], [4, 48], [4, 64]]
        assert server.post(TEXT, PROMPT).status_code == 200


def test_health_says_degraded_and_why_when_the_self_test_fails(folder: Path) -> None:
    with warm_server(folder, ops=LeakyOps()) as (server, _):
        body = wait_ready(server)
    assert body["status"] == "degraded"
    assert body["message"].startswith("the padding self-test failed: padding changes logits by ")
    assert body["warmup"]["self_test"]["verdict"] == "failed"


def test_boot_ends_in_failure_when_shapes_are_strict_and_trimmed(folder: Path) -> None:
    with warm_server(folder, strict_shapes=True, warm_rows=2) as (_, engine):
        wait_until(lambda: engine.stage == "failed")
    assert "--strict-shapes" in str(engine.snapshot().health["message"])


# --- idle gaps -------------------------------------------------------------------------------------------------------


class Gate:
    """Holds recording number `hold` and later until `open` is set, and notes at the start of each who was waiting."""

    def __init__(self, hold: int) -> None:
        self.engine: Callable[[], Engine | None] = lambda: None
        self.open = threading.Event()
        self.held = threading.Event()
        self.work: list[bool] = []
        self._hold = hold

    def __call__(self) -> None:
        engine = self.engine()
        self.work.append(engine is not None and engine.scheduler.has_work)
        if len(self.work) > self._hold:
            self.held.set()
            assert self.open.wait(20), "a test left the gate shut"


def test_background_recordings_wait_for_requests_and_are_counted_apart(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    gate = Gate(hold=1)
    options = {"warmup_seconds": 0, "warm_list": str(path), "max_sequences": 1}
    with warm_server(folder, backend=SlowBackend(before=gate), **options) as (server, engine):
        gate.engine = lambda: engine.booted.engine if engine.booted else None
        body = wait_ready(server)
        assert body["status"] == "ready", "what idle gaps will record is not given up"
        assert body["warmup"]["graphs"] == 0
        assert gate.held.wait(10)
        answers: list[Any] = []
        client = threading.Thread(target=lambda: answers.append(server.post(TEXT, {**PROMPT, "max_tokens": 40}).json()))
        client.start()
        assert engine.booted is not None
        scheduler = engine.booted.engine.scheduler
        wait_until(lambda: scheduler.has_work)
        assert engine.booted.engine.background, "some are left, which must not come before the request"
        gate.open.set()
        client.join(20)
        wait_until(lambda: health(server)["warmup"]["background_left"] == 0)
        graphs = server.get("/metrics").json()["graphs"]
        assert answers[0]["usage"]["completion_tokens"] == 40
        assert graphs["captured"] == graphs["cold_captures"] + graphs["background_captures"] == 4
        assert sum(gate.work) == graphs["cold_captures"], "none was recorded in the background while a request waited"
        assert graphs["background_captures"] >= 2
        assert graphs["warmed"] == 0
        assert health(server)["status"] == "ready"
        assert health(server)["warmup"]["uncovered"] == []
    assert sum(load_warm_list(path).values()) == 39


# --- the real model --------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_real_model_is_ready_in_time_and_wholly_covered_on_the_reference_kernels() -> None:
    """20 s on two cores that have nothing else to do, from the start of the process to the first 200."""
    started = time.monotonic()
    with served("--kernels", "reference") as server:
        took = time.monotonic() - started
        warmup = server.get("/health")["warmup"]
        answer = server.post(TEXT, {"prompt": "Once", "max_tokens": 8, "temperature": 0}).json()
        graphs = server.get("/metrics")["graphs"]
        log = server.errors
    assert (warmup["uncovered"], warmup["trimmed"], warmup["self_test"]["verdict"]) == ([], 0, "passed")
    assert f"warmed {warmup['graphs']} graphs in " in log
    assert "every shape covered; padding self-test passed" in log
    assert answer["nanoserve"]["graph"]["eager_steps"] == 1
    assert (graphs["cold_captures"], graphs["hit_rate"]) == (0, 1.0)
    assert took < 20.0
