"""A real server on a free port, in a thread of the test process, around a scripted engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import requests

from server.app import App, create_app
from server.config import ServerConfig
from server.run import Server, bind, page_address
from tests.server.fake_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


@dataclass
class Running:
    """A serving server. `session` keeps connections; `post` and `get` are plain requests to it."""

    app: App
    engine: ScriptedEngine
    server: Server
    port: int
    session: requests.Session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/ws"

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.session.get(self.url + path, timeout=30, **options)

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        return self.session.post(self.url + path, json=body, timeout=30, **options)

    def post_raw(self, path: str, body: bytes, content_type: str = "application/json") -> requests.Response:
        return self.session.post(self.url + path, data=body, headers={"content-type": content_type}, timeout=30)

    def stream(self, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        """The JSON payloads of a streamed answer; checks the framing and the single [DONE] at the end."""
        with self.post(path, {**body, "stream": True}, stream=True, **options) as response:
            assert response.status_code == 200, response.text
            raw = response.content
        return payloads(raw)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send_raw(self, path: str, body: dict[str, Any], headers: str = "") -> socket.socket:
        """A connection that has sent a whole POST and read nothing."""
        connection = self.connect()
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def wait_idle(self, seconds: float = 2.0) -> None:
        """As long as a client that went away may take to be gone."""
        wait_until(lambda: not self.engine.running, seconds)


def payloads(raw: bytes) -> list[dict[str, Any]]:
    """A /v1 stream's JSON objects. Every event is one `data:` line, comments aside, and [DONE] comes last and once."""
    events = [event for event in raw.decode().split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events
    datas = [event.removeprefix("data: ") for event in events]
    assert datas[-1] == "[DONE]"
    assert datas.count("[DONE]") == 1
    return [json.loads(data) for data in datas[:-1]]


@contextmanager
def serving(engine: ScriptedEngine | None = None, *, ready: bool = True, **config: Any) -> Iterator[Running]:
    engine = engine or ScriptedEngine()
    options = ServerConfig(**{"port": 0, "drain_seconds": 0.2, **config})
    sockets = bind(options)
    port = sockets[0].getsockname()[1]
    app = create_app(engine, options)
    server = Server(app, page_address(options, port))
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    with requests.Session() as session:
        try:
            wait_until(lambda: server.started)
            if ready:
                wait_until(lambda: engine.stage == "ready")
            yield Running(app, engine, server, port, session)
        finally:
            if server.loop is not None and thread.is_alive():
                server.loop.call_soon_threadsafe(server.begin_drain)
            thread.join(10)
    assert not thread.is_alive(), "the server did not end"
    assert engine.left, "the lifespan did not run to its end"


def error_of(response: requests.Response) -> dict[str, Any]:
    """The error object, checked for the one shape all routes share."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return dict(body["error"])
