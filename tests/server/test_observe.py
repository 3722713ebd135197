"""Health, metrics, live steps, the page's files and the API description."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoserve.metrics import GRAPH_KEYS, Metrics
from server.prometheus import JSON, OPENMETRICS, PLAIN, negotiate, render
from server.schemas import LIMITS, ChatBody, CompletionBody
from tests.server.fake_engine import Boot, ScriptedEngine
from tests.server.support import CHAT, HELLO, Running, error_of, serving, wait_until

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.6,*/*;q=0.2"
)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


# --- readiness


def test_socket_answers_503_with_a_reason_when_the_engine_boots() -> None:
    engine = ScriptedEngine(boot=Boot([("loading", 40, 100, None), ("warming", 3, 9, 12.4)], 60))
    with serving(engine, ready=False) as server:
        wait_until(lambda: engine.stage == "loading")
        assert server.get("/livez").status_code == 200
        health = server.get("/health")
        assert health.status_code == 503
        assert health.json()["progress"] == {"stage": "loading", "done": 40, "total": 100, "eta_seconds": None}
        assert "retry-after" not in health.headers
        refused = server.post(CHAT, HELLO)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "not_ready")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert server.post(CHAT, HELLO | {"n": 0}).status_code == 400
        graphs = server.get("/metrics").json()["graphs"]
        assert set(graphs) == set(GRAPH_KEYS)
        assert graphs["hit_rate"] is None
        engine.set_stage("warming", 3, 9, 12.4)
        assert server.get("/readyz").headers["retry-after"] == "12"


@pytest.mark.parametrize(
    ("stage", "status", "served"),
    [("ready", 200, 200), ("degraded", 200, 200), ("draining", 503, 503), ("failed", 503, 503), ("warming", 503, 503)],
)
def test_health_is_200_exactly_when_a_request_is_served(stage: str, status: int, served: int) -> None:
    with serving() as server:
        server.engine.set_stage(stage)
        health = server.get("/health")
        assert (health.status_code, health.json()["status"], health.json()["ready"]) == (status, stage, status == 200)
        assert server.post(CHAT, HELLO).status_code == served
        assert server.get("/livez").status_code == 200


# --- metrics


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/json", JSON),
        (BROWSER, JSON),
        ("text/plain", PLAIN),
        ("text/plain, */*", PLAIN),
        ("text/plain;q=0.5, */*", JSON),
        ("text/plain;q=0.5, application/json;q=0.5", PLAIN),
        ("text/plain;q=0", JSON),
        ("text/plain;q=nonsense, */*;q=0.1", JSON),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", OPENMETRICS),
        (PROMETHEUS, PLAIN),
    ],
)
def test_metrics_format_follows_accept(accept: str, expected: str) -> None:
    assert negotiate(None, accept) == expected


def test_metrics_are_json_or_text_when_asked(server: Running) -> None:
    plain = server.get("/metrics", headers={"accept": PROMETHEUS})
    assert plain.headers["content-type"] == PLAIN
    assert "nanoserve_requests_running 0\n" in plain.text
    assert server.get("/metrics").headers["vary"] == "Accept"
    assert server.get("/metrics").json()["requests"]["running"] == 0
    assert server.get("/metrics?format=prometheus", headers={"accept": JSON}).headers["content-type"] == PLAIN
    assert server.get("/metrics?format=json", headers={"accept": PROMETHEUS}).json()["version"]
    response = server.get("/metrics?format=xml")
    assert (response.status_code, error_of(response)["param"]) == (400, "format")


def sample_metrics() -> dict[str, Any]:
    metrics = Metrics('1"x\\y')
    metrics.latency.ttft_seconds.add(0.25)
    metrics.graph_stats = lambda: {"read": "rectangle", "backend": "eager", "replays": 7, "warmed": 3}
    shape = {"warmed": True, "replays": 7, "real_rows": 9, "pad_rows": 1, "seconds_total": 0.5}
    keys = [("decode", 2, 128), ("body", 4, None), ("head", 4, None), ("head_full", 4, None)]
    metrics.graph_shapes = lambda: [{"kind": kind, "rows": rows, "width": width, **shape} for kind, rows, width in keys]
    return metrics.snapshot()


@pytest.mark.parametrize("openmetrics", [False, True])
def test_text_has_one_type_line_before_all_samples_of_a_family(openmetrics: bool) -> None:
    lines = render(sample_metrics(), openmetrics=openmetrics).splitlines()
    assert ("# EOF" in lines) == openmetrics
    family, seen, series = "", set(), set()
    for line in lines:
        if line.startswith("# TYPE "):
            family = line.split()[2]
            assert family not in seen
            seen.add(family)
        elif line != "# EOF":
            name, value = line.rsplit(" ", 1)
            assert name.startswith(family)
            assert name not in series, "a scrape with two samples of one series is refused"
            series.add(name)
            float(value)
    assert 'nanoserve_build_info{version="1\\"x\\\\y"} 1' in lines
    assert "nanoserve_graphs_replays_total 7" in lines
    assert 'nanoserve_shape_replays_total{kind="decode",rows="2",width="128"} 7' in lines
    assert 'nanoserve_ttft_seconds{quantile="0.5"} 0.25' in lines
    assert "nanoserve_ttft_seconds_count 1" in lines
    assert "None" not in "\n".join(lines)


# --- steps


def test_steps_are_boot_and_step_events_in_every_stage() -> None:
    engine = ScriptedEngine(boot=Boot([("loading", 0, 0, None)], 0.3))
    with serving(engine, ready=False) as server:
        wait_until(lambda: engine.stage == "loading")
        with server.get("/steps", stream=True) as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = (line for line in response.iter_lines(decode_unicode=True) if line.startswith("data: "))
            events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
    assert [event["type"] for event in events] == ["boot", "boot", "steps"]
    assert [event["stage"] for event in events[:2]] == ["loading", "ready"]


def test_steps_subscription_ends_when_its_reader_leaves(server: Running) -> None:
    with server.get("/steps", stream=True) as response:
        lines = response.iter_lines()  # held: the connection closes with the iterator
        next(lines)
        assert server.engine.subscribers == 1
    wait_until(lambda: server.engine.subscribers == 0)


def test_steps_end_when_the_server_closes() -> None:
    with serving() as server:
        response = server.get("/steps", stream=True)
        lines = response.iter_lines()
        next(lines)
        assert server.server.loop is not None
        server.server.loop.call_soon_threadsafe(server.server.begin_drain)
        assert [line for line in lines if line.startswith(b"data: ")]
        response.close()


def test_head_is_answered_at_once_when_the_route_streams(server: Running) -> None:
    assert server.session.head(server.url + "/steps", timeout=30).status_code == 200


# --- files


def test_page_is_served_with_a_strict_policy(server: Running) -> None:
    page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"
    assert server.get("/index.html").content == page.content


def test_file_is_not_sent_again_when_its_tag_is_known(server: Running) -> None:
    first = server.get("/style.css")
    assert first.headers["content-type"] == "text/css; charset=utf-8"
    again = server.get("/style.css", headers={"if-none-match": f'"x", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert server.get("/style.css", headers={"if-none-match": '"other"'}).status_code == 200


def test_favicon_is_the_drawing(server: Running) -> None:
    assert server.get("/favicon.ico").headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize("path", ["/__init__.py", "/../pyproject.toml", "/web/index.html", "/app.js/", "/none.js"])
def test_nothing_but_the_pages_files_is_served(server: Running, path: str) -> None:
    with server.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert b" 404 " in connection.makefile("rb").readline()


# --- the description


def test_openapi_describes_the_routes_and_limits_that_exist(server: Running) -> None:
    document = server.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            status = server.session.request(method, server.url + path, timeout=30, stream=True)
            assert status.status_code != 405, path
            status.close()
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatBody"]["properties"]) == set(ChatBody.__struct_fields__)
    assert set(schemas["CompletionBody"]["properties"]) == set(CompletionBody.__struct_fields__)
    assert schemas["ChatBody"]["required"] == ["messages"]
    temperature = schemas["ChatBody"]["properties"]["temperature"]["anyOf"][0]
    assert temperature == {"type": "number", "minimum": 0.0, "maximum": LIMITS["temperature"].high}
    assert schemas["ChatBody"]["properties"]["n"]["anyOf"][0]["type"] == "integer"
    assert {"type": "boolean"} in schemas["ChatBody"]["properties"]["logprobs"]["anyOf"]
