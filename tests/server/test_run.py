"""The process: binding, exit codes, signals."""

from __future__ import annotations

import base64
import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import requests
from uvicorn.protocols.websockets import websockets_sansio_impl
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from nanoserve.errors import ConfigError, PortTaken
from server.config import ServerConfig
from server.run import bind, exposure_warning, log_config, page_address, serve
from tests.checkout import ROOT
from tests.server.fake_engine import Script, ScriptedEngine
from tests.server.support import CHAT, HELLO, error_of, payloads, serving, wait_until
from tests.serving import SCRIPTED, Served, served


def process(*flags: str, ready: str | None = "/health") -> AbstractContextManager[Served]:
    """The scripted server as a process of its own."""
    return served(*flags, command=SCRIPTED, ready=ready)


def endless(url: str) -> bytes:
    body = {"messages": [{"role": "user", "content": "long"}], "stream": True}
    return requests.post(url + CHAT, json=body, timeout=30).content


def running(child: Served) -> int:
    return int(child.get("/metrics")["requests"]["running"])


# --- binding


def test_bind_gives_listening_sockets_on_one_port() -> None:
    sockets = bind(ServerConfig(host="localhost", port=0))
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        with socket.create_connection(("127.0.0.1", sockets[0].getsockname()[1]), timeout=30):
            pass
    finally:
        for sock in sockets:
            sock.close()


def test_bind_names_the_port_when_it_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is taken .* --port"):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("192.0.2.1", 0)])
def test_bind_names_the_address_when_it_is_none_of_ours(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=host.replace(".", r"\.")):
        bind(ServerConfig(host=host, port=port))


@pytest.mark.parametrize("port", [-1, 65_536])
def test_bind_names_the_limit_when_the_port_is_no_port(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port is {port}; the limit is 65535"):
        bind(ServerConfig(port=port))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("0.0.0.0", "http://127.0.0.1:8000/"),
        ("::", "http://[::1]:8000/"),
        ("::1", "http://[::1]:8000/"),
        ("my.host", "http://my.host:8000/"),
    ],
)
def test_page_address_is_one_a_browser_can_open(host: str, address: str) -> None:
    assert page_address(ServerConfig(host=host), 8000) == address


def test_warning_is_given_when_a_wider_address_asks_for_no_key() -> None:
    assert "--api-key" in str(exposure_warning(ServerConfig(host="0.0.0.0")))
    assert exposure_warning(ServerConfig(host="0.0.0.0", api_keys=("k",))) is None
    for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1"):
        assert exposure_warning(ServerConfig(host=host)) is None


def test_exit_code_is_3_with_one_line_and_no_engine_when_the_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve(engine, ServerConfig(port=taken.getsockname()[1])) == 3
    assert not engine.entered
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "options",
    [
        {"api_keys": ("",)},
        {"api_keys": (" k",)},
        {"allowed_origins": ("example.org",)},
        {"allowed_origins": ("http://[bad",)},
        {"drain_seconds": -1.0},
        {"drain_seconds": float("nan")},
        {"drain_seconds": float("inf")},
        {"ping_seconds": 1e30},
    ],
)
def test_config_is_refused_when_a_value_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**options)


# --- exit codes


def test_process_ends_with_the_boots_own_code_when_it_fails() -> None:
    with process("--boot-failure", "it is broken", "--boot-seconds", "0.02", ready=None) as child:
        code, errors = child.end(), child.errors
    assert code == 5
    assert errors == "nanoserve: it is broken\n"


def test_process_prints_the_page_address_when_ready() -> None:
    with process("--boot-seconds", "0.01") as child:
        child.signal(signal.SIGTERM)
        code, output, errors = child.end(), child.output, child.errors
    assert code == 0
    assert output.splitlines() == [
        f"nanoserve listens on {child.url}/ and loads the model behind it",
        f"nanoserve is ready: {child.url}/",
    ]
    assert errors == ""


def test_process_ends_at_once_when_it_is_told_to_while_booting() -> None:
    with process("--boot-seconds", "30", ready="/livez") as child:
        child.signal(signal.SIGTERM)
        started = time.monotonic()
        assert child.end() == 0
        assert time.monotonic() - started < 15, "not once it has booted"


# --- signals with open streams


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_streams_end_truly_and_the_code_is_0_when_a_signal_comes(number: signal.Signals) -> None:
    with process("--boot-seconds", "0.01", "--drain-seconds", "2.5") as child, ThreadPoolExecutor(5) as pool:
        streams = [pool.submit(endless, child.url) for _ in range(5)]
        with connect(child.url.replace("http", "ws") + "/ws") as websocket:
            websocket.send('{"type":"generate","id":"a","prompt":"long","max_tokens":2000}')
            websocket.recv(timeout=30)
            child.wait(lambda: running(child) == 6, "all run", 30)
            child.signal(number)
            child.wait(lambda: child.get("/health")["status"] == "draining", "the drain is said", 30)
            refused = requests.post(child.url + CHAT, json={"messages": [{"role": "user", "content": "x"}]}, timeout=30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            frames, close_code = _rest(websocket)
        code, errors = child.end(), child.errors
        last = [payloads(stream.result())[-1] for stream in streams]
    assert [chunk["error"]["code"] for chunk in last] == ["draining"] * 5
    assert '"finish_reason":"draining"' in frames[-1]
    assert close_code in (1001, 1012)
    assert (code, errors) == (0, "")


def _rest(websocket: ClientConnection) -> tuple[list[str], int | None]:
    frames: list[str] = []
    while True:
        try:
            frames.append(str(websocket.recv(timeout=30)))
        except ConnectionClosed as closed:
            return frames, closed.rcvd.code if closed.rcvd else None


def test_second_signal_is_taken_for_the_first_when_it_comes_at_once() -> None:
    with process("--boot-seconds", "0.01", "--drain-seconds", "1.5") as child, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(endless, child.url)
        child.wait(lambda: running(child) == 1, "the stream runs", 30)
        started = time.monotonic()
        child.signal(signal.SIGINT)
        child.signal(signal.SIGTERM)  # another one, since two of a kind may arrive as one
        code, errors = child.end(), child.errors
        assert payloads(stream.result())[-1]["error"]["code"] == "draining"
    assert (code, errors) == (0, "")
    assert time.monotonic() - started > 1.4


def test_streams_end_at_once_when_a_second_signal_comes_later() -> None:
    with process("--boot-seconds", "0.01", "--drain-seconds", "60") as child, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(endless, child.url)
        child.wait(lambda: running(child) == 1, "the stream runs", 30)
        child.signal(signal.SIGTERM)
        child.wait(lambda: child.get("/health")["status"] == "draining", "the drain is said", 30)
        time.sleep(1.1)
        child.signal(signal.SIGTERM)
        started = time.monotonic()
        code, errors = child.end(), child.errors
        assert payloads(stream.result())[-1]["error"]["code"] == "draining"
    assert (code, errors) == (0, "")
    assert time.monotonic() - started < 20, "not when the drain is over"


def test_process_ends_without_a_traceback_when_a_stream_is_never_read() -> None:
    with process("--boot-seconds", "0.01", "--drain-seconds", "0.1", "--flood") as child:
        with socket.create_connection(("127.0.0.1", child.port)) as connection:
            body = b'{"prompt":"x","stream":true,"max_tokens":100000,"ignore_eos":true}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            child.wait(lambda: running(child) == 1, "the stream runs", 30)
            time.sleep(0.5)
            child.signal(signal.SIGTERM)
            code, errors = child.end(), child.errors
    assert code == 0
    assert "Traceback" not in errors


def test_whole_answers_are_refused_truly_when_the_server_drains() -> None:
    with serving(drain_seconds=0.1) as server, ThreadPoolExecutor(1) as pool:
        server.engine.script = lambda request: Script(delay=60)
        answer = pool.submit(server.post, CHAT, HELLO)
        wait_until(lambda: bool(server.engine.running))
        assert server.server.loop is not None
        server.server.loop.call_soon_threadsafe(server.server.begin_drain)
        response = answer.result()
    assert (response.status_code, error_of(response)["code"]) == (503, "draining")


def test_exit_code_survives_when_a_daemon_thread_is_busy_at_the_end() -> None:
    script = (
        "import sys, threading\n"
        "from server.run import end_process\n"
        "def spin():\n"
        "    while True: sum(range(1000))\n"
        "threading.Thread(target=spin, daemon=True).start()\n"
        "print('said', end='')\n"
        "end_process(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (7, "said", "")


def test_key_is_not_in_the_log_when_the_level_is_debug() -> None:
    key = "very-secret-key"
    encoded = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    with process("--boot-seconds", "0.01", "--api-key", key, "--log-level", "debug") as child:
        requests.get(f"{child.url}/metrics?api_key={key}", headers={"authorization": f"Bearer {key}"}, timeout=30)
        url = child.url.replace("http", "ws") + f"/ws?key={key}"
        with connect(url, additional_headers={"authorization": f"Bearer {key}"}):
            pass
        with connect(url, subprotocols=["nanoserve.v1", f"nanoserve.key.{encoded}"]):
            pass
        child.signal(signal.SIGTERM)
        code, output, errors = child.end(), child.output, child.errors
    assert code == 0
    assert key not in output + errors
    assert encoded not in output + errors


# --- what an import costs


def test_server_and_engine_front_import_without_torch_and_transformers() -> None:
    check = (
        "import sys, server.app, server.run, nanoserve.async_engine\n"
        "heavy = sorted({'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, env=environment, check=True, timeout=60)


def test_root_logger_is_left_alone_when_the_server_is_imported() -> None:
    check = "import logging, server.run; assert not logging.getLogger().handlers"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    "text", ["ASGI callable returned without completing handshake.", "Invalid UTF-8 sequence received from client."]
)
def test_what_a_client_did_is_no_error_in_the_log_while_other_errors_are(text: str) -> None:
    """The texts are uvicorn's own, and so looked for in its source."""
    assert text in inspect.getsource(websockets_sansio_impl)
    keep = log_config("info")["filters"]["ours"]["()"]()

    def said(message: str) -> bool:
        return bool(keep.filter(logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, message, None, None)))

    assert (said(text), said("Exception in ASGI application")) == (False, True)
