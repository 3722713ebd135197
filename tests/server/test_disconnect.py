"""Clients that vanish: by reset, at every stage of a request, streaming or not, on HTTP and on the WebSocket."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.server.fake_engine import Script
from tests.server.support import CHAT, HELLO, TEXT, Running, serving, wait_until

KEY = "secret-key"
ENDLESS = HELLO | {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serving(api_keys=(KEY,), allowed_origins=("https://a.example",)) as running:
        running.session.headers["authorization"] = f"Bearer {KEY}"
        yield running


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN, as a killed client with unread data does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def begin(server: Running, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    headers = f"authorization: Bearer {KEY}\r\norigin: https://a.example\r\n"
    connection = server.send_raw(path, body, headers)
    wait_until(lambda: bool(server.engine.running))
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [Script(queue_seconds=60), Script(delay=60), Script(delay=0.001)])
@pytest.mark.parametrize("leave", [reset, socket.socket.close])
def test_generation_is_gone_when_the_client_leaves(server: Running, stream: bool, script: Script, leave: Any) -> None:
    server.engine.script = lambda request: script
    leave(begin(server, ENDLESS | {"stream": stream}))
    server.wait_idle()
    assert server.engine.aborted == [server.engine.requests[0].request_id]
    server.engine.script = lambda request: Script()
    assert server.post(CHAT, HELLO).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_every_generation_is_gone_when_a_client_with_prompts_and_choices_leaves(server: Running, stream: bool) -> None:
    server.engine.script = lambda request: Script(delay=0.01)
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    connection = begin(server, body, TEXT)
    wait_until(lambda: len(server.engine.running) == 3)
    reset(connection)
    server.wait_idle()
    assert len(server.engine.aborted) == 3


def test_generation_is_gone_when_a_client_closes_in_the_middle_of_its_stream(server: Running) -> None:
    server.engine.script = lambda request: Script(delay=0.005)
    with server.post(CHAT, ENDLESS | {"stream": True}, stream=True) as response:
        lines = response.iter_lines()
        assert next(lines).startswith(b"data: ")
    server.wait_idle()
    assert len(server.engine.aborted) == 1


def test_generations_are_gone_when_their_websocket_drops(server: Running) -> None:
    server.engine.script = lambda request: Script(delay=0.01)
    headers = {"authorization": f"Bearer {KEY}"}
    with connect(server.ws_url, additional_headers=headers) as websocket:
        for name in "ab":
            websocket.send(json.dumps({"type": "generate", "id": name, **ENDLESS}))
        wait_until(lambda: len(server.engine.running) == 2)
        reset(websocket.socket)
    server.wait_idle()
    assert len(server.engine.aborted) == 2


def test_log_has_no_traceback_when_a_client_leaves_in_the_middle_of_its_body(
    server: Running, logged: list[str]
) -> None:
    connection = server.connect()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    connection.sendall(f'{head}content-length: 1000\r\n\r\n{{"mess'.encode())
    wait_until(lambda: bool(server.server.server_state.tasks))
    reset(connection)
    wait_until(lambda: not server.server.server_state.tasks)
    assert logged == []


@pytest.mark.parametrize("framing", ["content-length: 1000", "transfer-encoding: chunked"])
def test_body_that_never_ends_is_a_408_and_the_connection_closes(framing: str) -> None:
    with serving(body_seconds=0.2) as server:
        connection = server.connect()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
        connection.sendall((head + ("" if "length" in framing else "6\r\n") + '{"mess').encode())
        answer = b""
        while part := connection.recv(65536):  # until the server closes
            answer += part
        connection.close()
        assert server.post(CHAT, HELLO).status_code == 200
    head_bytes, _, body = answer.partition(b"\r\n\r\n")
    assert head_bytes.startswith(b"HTTP/1.1 408")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "body_timeout")
    assert "6" in error["message"]
    assert "0.2 s" in error["message"]


def test_nothing_is_aborted_when_the_client_stays(server: Running) -> None:
    server.post(CHAT, HELLO)
    server.stream(CHAT, HELLO)
    assert server.engine.aborted == []


def test_stream_ends_without_a_traceback_when_the_client_stops_reading(logged: list[str]) -> None:
    with serving(send_timeout_seconds=0.2) as server:
        server.engine.script = lambda request: Script(tokens=("x" * 100_000,), delay=0.001)
        connection = server.send_raw(CHAT, ENDLESS | {"stream": True})
        wait_until(lambda: bool(server.engine.aborted), 10)
        connection.close()
        server.wait_idle()
    assert not [message for message in logged if "Exception" in message]


def test_all_choices_are_gone_when_a_client_with_four_leaves_in_the_middle(server: Running) -> None:
    server.engine.script = lambda request: Script(delay=0.01)
    connection = begin(server, ENDLESS | {"n": 4, "stream": True})
    assert b" 200 " in connection.makefile("rb").readline()
    reset(connection)
    server.wait_idle()
    assert len(server.engine.aborted) == 1
    assert server.get("/metrics").json()["kv"]["blocks_used"] == 0
