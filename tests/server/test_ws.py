"""The WebSocket protocol through the `websockets` client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

from nanoserve.errors import QueueFull
from tests.server.fake_engine import Script
from tests.server.support import HELLO, Running, serving, wait_until

ANSWER = "".join(Script().tokens)
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}


class Socket:
    """A connection that speaks frames as dicts."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, kind: str, **fields: Any) -> None:
        self.connection.send(json.dumps({"type": kind, **fields}))

    def receive(self) -> dict[str, Any]:
        return dict(json.loads(self.connection.recv(timeout=30)))

    def until(self, last: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        frames = [self.receive()]
        while not last(frames[-1]):
            frames.append(self.receive())
        return frames

    def until_end(self, identity: str) -> list[dict[str, Any]]:
        """All frames up to the one that ends `identity`."""
        return self.until(lambda frame: frame["type"] in ("done", "error") and frame.get("id") == identity)


@contextmanager
def opened(server: Running, **options: Any) -> Iterator[Socket]:
    with connect(server.ws_url, subprotocols=["nanoserve.v1"], **options) as connection:
        yield Socket(connection)


def test_generation_is_start_tokens_and_one_done(server: Running) -> None:
    server.engine.script = lambda request: Script(delay=0.002)
    with opened(server) as socket:
        assert socket.connection.subprotocol == "nanoserve.v1"
        socket.send("generate", id="a", **HELLO)
        frames = socket.until_end("a")
    assert frames[0] == {"type": "start", "id": "a", "prompt_tokens": 5, "choices": 1}
    tokens = frames[1:-1]
    assert {frame["type"] for frame in tokens} == {"token"}
    assert "".join(frame["text"] for frame in tokens) == ANSWER
    assert sum(frame["tokens"] for frame in tokens) == len(Script().tokens)
    done = frames[-1]
    assert (done["type"], done["finish_reason"], done["finish_reasons"]) == ("done", "stop", ["stop"])
    assert done["usage"]["completion_tokens"] == len(Script().tokens)
    assert set(done["nanoserve"]) == {"graph", "timings"}


def test_socket_opens_when_no_subprotocol_is_offered(server: Running) -> None:
    with connect(server.ws_url) as connection:
        assert connection.subprotocol is None


def test_prompt_is_a_completion_when_sent(server: Running) -> None:
    with opened(server) as socket:
        socket.send("generate", id="a", prompt="x", max_tokens=2, echo=True)
        frames = socket.until_end("a")
    assert "".join(frame["text"] for frame in frames[1:-1]) == "xThe capital "
    assert frames[-1]["finish_reason"] == "length"


def test_choices_are_told_apart_by_index_when_n_is_three(server: Running) -> None:
    with opened(server) as socket:
        socket.send("generate", id="a", n=3, max_tokens=2, **HELLO)
        frames = socket.until_end("a")
    texts = ["", "", ""]
    for frame in frames[1:-1]:
        texts[frame["index"]] += frame["text"]
    assert texts == [f"{i}:The {i}:capital " for i in range(3)]
    assert frames[-1]["finish_reasons"] == ["length"] * 3


def test_internal_reasons_are_used_when_a_generation_times_out(server: Running) -> None:
    server.engine.script = lambda request: Script(finish="timeout")
    with opened(server) as socket:
        socket.send("generate", id="a", **HELLO)
        assert socket.until_end("a")[-1]["finish_reason"] == "timeout"


def test_logprobs_come_with_the_tokens_when_asked_for(server: Running) -> None:
    with opened(server) as socket:
        socket.send("generate", id="a", logprobs=True, top_logprobs=1, max_tokens=1, **HELLO)
        token = socket.until_end("a")[1]
    assert token["logprobs"]["content"][0]["token"] == "The "


def test_generations_run_side_by_side_when_128_are_started(server: Running) -> None:
    server.engine.script = lambda request: Script(delay=0.05)
    with opened(server) as socket:
        for i in range(128):
            socket.send("generate", id=str(i), **HELLO)
        wait_until(lambda: len(server.engine.running) == 128)
        socket.send("generate", id="more", **HELLO)
        refused = socket.until(lambda frame: frame["type"] == "error")[-1]
        assert (refused["id"], refused["error"]["code"]) == ("more", "too_many_generations")
        ended: set[str] = set()
        texts: dict[str, str] = {}
        while len(ended) < 128:
            frame = socket.receive()
            if frame["type"] == "token":
                texts[frame["id"]] = texts.get(frame["id"], "") + frame["text"]
            elif frame["type"] == "done":
                assert frame["id"] not in ended
                ended.add(frame["id"])


def test_cancel_ends_the_generation_with_a_true_reason(server: Running) -> None:
    server.engine.script = lambda request: Script(delay=0.01)
    with opened(server) as socket:
        socket.send("generate", id="a", **ENDLESS, **HELLO)
        socket.until(lambda frame: frame["type"] == "token")
        socket.send("cancel", id="a")
        assert socket.until_end("a")[-1]["finish_reason"] == "cancelled"
        socket.send("generate", id="a", max_tokens=1, **HELLO)
        assert socket.until_end("a")[-1]["finish_reason"] == "length"
    assert len(server.engine.aborted) == 1


def test_cancel_is_not_lost_when_it_comes_right_behind_generate(server: Running) -> None:
    server.engine.script = lambda request: Script(delay=0.05)
    with opened(server) as socket:
        socket.send("generate", id="a", **ENDLESS, **HELLO)
        socket.send("cancel", id="a")
        assert socket.until_end("a")[-1]["finish_reason"] == "cancelled"


def test_unknown_cancel_and_unknown_type_are_ignored(server: Running) -> None:
    with opened(server) as socket:
        socket.send("cancel", id="nobody")
        socket.send("cancel")
        socket.send("dance", id="x", extra={})
        socket.send("generate", id="a", unknown_field=1, **HELLO)
        assert socket.receive()["type"] == "start"
        assert socket.until_end("a")[-1]["type"] == "done"


def test_duplicate_id_is_refused_without_ending_its_owner(server: Running) -> None:
    server.engine.script = lambda request: Script(delay=0.02)
    with opened(server) as socket:
        socket.send("generate", id="a", **HELLO)
        socket.send("generate", id="a", **HELLO)
        frames = socket.until_end("a")
        errors = [frame for frame in frames if frame["type"] == "error"]
        assert [(frame["error"]["code"], "id" in frame) for frame in errors] == [("duplicate_id", False)]
        assert frames[-1]["type"] == "done"
        assert "".join(frame["text"] for frame in frames if frame["type"] == "token") == ANSWER


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "x", **HELLO}, "messages"),
        ({}, "messages"),
        ({"temperature": 9, **HELLO}, "temperature"),
        ({"n": "x", **HELLO}, "n"),
        ({"model": "nope", **HELLO}, "model"),
        ({"prompt": [[5000]]}, "prompt"),
    ],
)
def test_bad_generate_is_one_error_with_its_id(server: Running, fields: dict[str, Any], param: str) -> None:
    with opened(server) as socket:
        socket.send("generate", id="a", **fields)
        frame = socket.receive()
        assert (frame["type"], frame["id"], frame["error"]["param"]) == ("error", "a", param)
        socket.send("generate", id="a", **HELLO)
        assert socket.until_end("a")[-1]["type"] == "done"


@pytest.mark.parametrize(
    "raw",
    [
        *("", "{", "[]", "null", "5", "{}", "[" * 50_000, '{"type":5}', '{"type":"generate"}'),
        *('{"type":"generate","id":7}', '{"type":"generate","id":""}', '{"type":"subscribe"}'),
        *('{"type":"subscribe","channel":["x"]}', b"\x00\x01", b'{"type":"generate"}'),
    ],
)
def test_bad_frame_is_an_error_and_the_socket_lives_on(server: Running, raw: str | bytes) -> None:
    with opened(server) as socket:
        socket.connection.send(raw)
        frame = socket.receive()
        assert frame["type"] == "error"
        assert "id" not in frame
        assert frame["error"]["type"] == "invalid_request_error"
        socket.send("generate", id="a", **HELLO)
        assert socket.until_end("a")[-1]["type"] == "done"


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull("full"), "queue_full"), (RuntimeError("secret"), "internal_error")]
)
def test_refused_submit_is_an_error_with_its_id(server: Running, error: Exception, code: str) -> None:
    server.engine.submit_error = error
    with opened(server) as socket:
        socket.send("generate", id="a", **HELLO)
        frame = socket.receive()
    assert (frame["type"], frame["id"], frame["error"]["code"]) == ("error", "a", code)
    assert "secret" not in json.dumps(frame)


def test_failed_generation_ends_in_an_error_and_no_done(server: Running) -> None:
    server.engine.script = lambda request: Script(fail_after=2)
    with opened(server) as socket:
        socket.send("generate", id="a", **HELLO)
        assert socket.until_end("a")[-1]["error"]["code"] == "generation_failed"
        socket.send("generate", id="b", **HELLO)
        assert "a" not in {frame.get("id") for frame in socket.until_end("b")}


def test_live_events_come_while_subscribed(server: Running) -> None:
    with opened(server) as socket:
        socket.send("subscribe", channel="live")
        first = socket.receive()
        assert first["type"] == "live"
        assert first["event"]["type"] == "boot"
        assert first["event"]["stage"] == "ready"
        steps = socket.until(lambda frame: frame["type"] == "live" and frame["event"]["type"] == "steps")[-1]
        assert {"hits", "misses", "running", "waiting", "tokens_per_second", "shapes"} <= set(steps["event"])
        socket.send("subscribe", channel="live")
        socket.send("unsubscribe", channel="live")
        wait_until(lambda: server.engine.subscribers == 0)


def test_subscription_ends_when_the_socket_closes(server: Running) -> None:
    with opened(server) as socket:
        socket.send("subscribe", channel="live")
        socket.receive()
        assert server.engine.subscribers == 1
    wait_until(lambda: server.engine.subscribers == 0)


def test_pings_are_answered_when_the_client_reads_late() -> None:
    with serving(ping_seconds=0.1) as server, opened(server) as socket:
        server.engine.script = lambda request: Script(delay=0.05)
        socket.send("generate", id="a", **HELLO)
        assert socket.until_end("a")[-1]["type"] == "done"
        assert socket.connection.ping().wait(2)


def test_message_over_the_limit_closes_the_socket_with_1009() -> None:
    with serving(max_message_bytes=1000) as server, opened(server) as socket:
        socket.connection.send("x" * 2000)
        with pytest.raises(ConnectionClosedError) as caught:
            socket.connection.recv(timeout=30)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


def until_closed(socket: Socket) -> tuple[list[dict[str, Any]], int | None]:
    """Every frame that still comes, and the close code."""
    frames = []
    while True:
        try:
            frames.append(socket.receive())
        except ConnectionClosed as closed:
            return frames, closed.rcvd.code if closed.rcvd else None


@pytest.mark.parametrize("bad", ["bad", b"bad", '{"type":"generate","id":"a"}'])
def test_socket_is_closed_when_a_flood_of_bad_frames_goes_unread(bad: str | bytes, logged: list[str]) -> None:
    with serving() as server, opened(server, max_queue=1) as socket:
        try:
            for _ in range(60_000):
                socket.connection.send(bad)
        except ConnectionClosed:
            pass
        _, code = until_closed(socket)
        assert code in (1008, None)  # None: the close frame could not get past what was never read
        assert server.get("/livez").status_code == 200
    assert not [message for message in logged if "xception" in message]


def test_generations_end_and_the_socket_closes_with_1001_when_the_server_drains() -> None:
    with serving(drain_seconds=0.1) as server, opened(server) as socket:
        server.engine.script = lambda request: Script(delay=0.02)
        socket.send("subscribe", channel="live")
        for name in "ab":
            socket.send("generate", id=name, **ENDLESS, **HELLO)
        wait_until(lambda: len(server.engine.running) == 2)
        assert server.server.loop is not None
        server.server.loop.call_soon_threadsafe(server.server.begin_drain)
        frames, code = until_closed(socket)
    assert code == 1001
    done = [frame for frame in frames if frame["type"] == "done"]
    assert sorted((frame["id"], frame["finish_reason"]) for frame in done) == [("a", "draining"), ("b", "draining")]


def test_new_generation_is_refused_while_draining() -> None:
    with serving(drain_seconds=1) as server, opened(server) as socket:
        server.engine.script = lambda request: Script(delay=0.02)
        socket.send("generate", id="a", **ENDLESS, **HELLO)
        socket.until(lambda frame: frame["type"] == "token")
        assert server.server.loop is not None
        server.server.loop.call_soon_threadsafe(server.server.begin_drain)
        wait_until(lambda: server.engine.stage == "draining")
        socket.send("generate", id="b", **HELLO)
        assert socket.until_end("b")[-1]["error"]["code"] == "draining"
