"""Who gets in: keys, origins, CORS, sizes, and the one error shape on every route."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest
import requests
from starlette.routing import Route
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from server.middleware import same_host
from tests.server.support import CHAT, HELLO, Running, error_of, serving

KEY = "k-ünï-42"
ORIGIN = "https://a.example"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serving(api_keys=("other-key", KEY), allowed_origins=(ORIGIN,), max_body_bytes=10_000) as running:
        yield running


def bearer(key: str) -> dict[str, bytes]:
    return {"authorization": f"Bearer {key}".encode()}


def key_subprotocol(key: str) -> str:
    return "nanoserve.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def routes(server: Running) -> list[tuple[str, str]]:
    found = [route for route in server.app.routes if isinstance(route, Route)]
    methods = ["POST" if "POST" in (route.methods or ()) else "GET" for route in found]
    return [(method, route.path.replace("{model_id:path}", "x")) for method, route in zip(methods, found, strict=True)]


def test_every_route_but_health_and_the_page_needs_the_key(server: Running) -> None:
    page = {"/", "/favicon.ico", "/index.html", "/app.js", "/style.css"}
    assert page <= server.app.open_paths
    seen = set()
    for method, path in routes(server):
        for headers in ({}, bearer("wrong"), {"authorization": KEY.encode()}, {"authorization": b"Basic xyz"}):
            response = requests.request(method, server.url + path, headers=headers, timeout=30)
            if path in server.app.open_paths:
                assert response.status_code in (200, 304), path
            else:
                seen.add(path)
                assert response.status_code == 401, path
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
    assert seen == {
        CHAT,
        "/v1/completions",
        "/v1/models",
        "/v1/models/x",
        "/ws",
        "/steps",
        "/metrics",
        "/openapi.json",
    }
    assert not server.engine.requests


@pytest.mark.parametrize("key", ["other-key", KEY])
def test_routes_open_when_any_of_the_keys_is_given(server: Running, key: str) -> None:
    assert server.post(CHAT, HELLO, headers=bearer(key)).status_code == 200
    assert server.get("/metrics", headers={"authorization": f"bearer {key}".encode()}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1//chat/completions", "/V1/chat/completions", "/v1/chat/completions/", "//v1/chat/completions"),
        *("/v1/./chat/completions", "/health/../v1/chat/completions", "/v1/chat%2Fcompletions", "/health/"),
        *("/Health", "/health;x", "/%2e%2e/pyproject.toml", "/v1", "/WS"),
    ],
)
def test_other_spellings_need_the_key_and_lead_nowhere(server: Running, path: str) -> None:
    def ask(headers: str) -> bytes:
        with server.connect() as connection:
            content = json.dumps(HELLO).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}"
            )
            connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            return connection.makefile("rb").readline()

    assert b" 401 " in ask("")
    # An escaped slash is decoded by the HTTP server: the same route, and the same key opens it.
    assert (b" 200 " if "%2F" in path else b" 404 ") in ask("authorization: Bearer other-key\r\n")


def test_health_says_little_when_no_key_is_given(server: Running) -> None:
    assert server.get("/health").json() == {"status": "ready", "ready": True}
    assert set(server.get("/health", headers=bearer(KEY)).json()) > {"status", "ready", "model", "progress"}


# --- WebSocket


@pytest.mark.parametrize("path", ["/ws", "/ws?api_key=other-key", "/ws?token=other-key"])
@pytest.mark.parametrize("key", [None, "wrong"])
def test_websocket_is_refused_before_accept_when_the_key_is_missing_or_wrong(
    server: Running, path: str, key: str | None
) -> None:
    url = server.ws_url.removesuffix("/ws") + path
    subprotocols = ["nanoserve.v1"] + ([key_subprotocol(key)] if key else [])
    with pytest.raises(InvalidStatus) as caught, connect(url, subprotocols=subprotocols):
        pass
    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == "invalid_api_key"


def test_websocket_opens_when_the_key_comes_by_header_or_subprotocol(server: Running) -> None:
    with connect(server.ws_url, additional_headers={"authorization": "Bearer other-key"}) as websocket:
        assert websocket.subprotocol is None
        assert websocket.response is not None
        assert websocket.response.headers["x-request-id"].startswith("req-")
    for key in ("other-key", KEY):
        with connect(server.ws_url, subprotocols=["nanoserve.v1", key_subprotocol(key)]) as websocket:
            assert websocket.subprotocol == "nanoserve.v1"


@pytest.mark.parametrize("junk", ["nanoserve.key.", "nanoserve.key.A", "nanoserve.key.!!!!"])
def test_websocket_is_refused_when_the_key_is_no_base64(server: Running, junk: str) -> None:
    with server.connect() as connection:
        lines = [
            "GET /ws HTTP/1.1",
            "host: x",
            "upgrade: websocket",
            "connection: upgrade",
            "sec-websocket-version: 13",
        ]
        lines += ["sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", f"sec-websocket-protocol: nanoserve.v1, {junk}"]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert b" 401 " in connection.makefile("rb").readline()


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "file://", "https://"])
def test_websocket_is_refused_when_the_origin_is_foreign(server: Running, origin: str) -> None:
    headers = {"authorization": "Bearer other-key"}
    with pytest.raises(InvalidStatus) as caught, connect(server.ws_url, additional_headers=headers, origin=origin):
        pass
    assert caught.value.response.status_code == 403
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == "origin_not_allowed"


def test_websocket_opens_when_the_origin_is_ours_or_allowed(server: Running) -> None:
    headers = {"authorization": "Bearer other-key"}
    for origin in (ORIGIN, server.url):
        with connect(server.ws_url, additional_headers=headers, origin=origin):
            pass


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://a.example", "a.example", True),
        ("http://a.example", "A.EXAMPLE:80", True),
        ("https://a.example", "a.example:443", True),
        ("https://a.example", "a.example:80", False),
        ("http://a.example:8000", "a.example:8000", True),
        ("http://a.example:8000", "a.example", False),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://a.example.evil", "a.example", False),
        ("http://a.example:port", "a.example", False),
        ("null", "null", False),
        ("", "", False),
    ],
)
def test_origin_equals_host_when_name_and_port_do(origin: str, host: str, same: bool) -> None:
    assert same_host(origin, host) is same


# --- CORS


def test_preflight_is_answered_without_a_key_when_the_origin_is_allowed(server: Running) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-foo"}
    response = requests.options(server.url + CHAT, headers={"origin": ORIGIN, **asked}, timeout=30)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["access-control-allow-headers"] == "authorization,x-foo"
    assert "POST" in response.headers["access-control-allow-methods"]
    foreign = requests.options(server.url + CHAT, headers={"origin": "https://evil.example", **asked}, timeout=30)
    assert "access-control-allow-origin" not in foreign.headers
    assert "access-control-allow-methods" not in foreign.headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", CHAT, 401), ("GET", "/v1/nothing", 401), ("GET", "/health", 200), ("DELETE", "/health", 405)],
)
def test_cors_headers_are_on_every_response_when_the_origin_is_allowed(
    server: Running, method: str, path: str, status: int
) -> None:
    response = requests.request(method, server.url + path, headers={"origin": ORIGIN}, timeout=30)
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    assert "Origin" in response.headers["vary"]


def test_cors_headers_are_on_413_and_500_when_the_origin_is_allowed(server: Running) -> None:
    headers = {"origin": ORIGIN, **bearer("other-key")}
    big = requests.post(server.url + CHAT, json={"x": "y" * 20_000}, headers=headers, timeout=30)
    assert (big.status_code, error_of(big)["code"]) == (413, "body_too_large")
    server.engine.submit_error = RuntimeError("boom")
    broken = requests.post(server.url + CHAT, json=HELLO, headers=headers, timeout=30)
    assert (broken.status_code, error_of(broken)["code"]) == (500, "internal_error")
    assert {r.headers["access-control-allow-origin"] for r in (big, broken)} == {ORIGIN}


def test_any_origin_is_allowed_when_the_list_has_a_star() -> None:
    with serving(allowed_origins=("*",)) as server:
        response = server.get("/health", headers={"origin": "https://any.example"})
        assert response.headers["access-control-allow-origin"] == "https://any.example"
        with connect(server.ws_url, origin="https://any.example"):
            pass


def test_no_cors_headers_are_sent_when_no_origin_is_allowed() -> None:
    with serving() as server:
        response = server.get("/health", headers={"origin": "https://any.example"})
        assert not [name for name in response.headers if name.lower().startswith("access-control")]


# --- sizes, methods, ids


def test_body_is_refused_when_a_chunked_one_exceeds_the_limit(server: Running) -> None:
    headers = {"content-type": "application/json", **bearer("other-key")}
    response = requests.post(server.url + CHAT, data=(b" " * 1000 for _ in range(30)), headers=headers, timeout=30)
    assert response.status_code == 413
    assert "the limit is 10,000" in error_of(response)["message"]


@pytest.mark.parametrize("size", [70_000, 300_000, 5_000_000])
def test_headers_are_refused_when_they_exceed_the_limit(server: Running, size: int) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: ")
        try:
            for _ in range(size // 10_000):
                connection.sendall(b"y" * 10_000)
            connection.sendall(b"\r\n\r\n")
            reply = connection.recv(65_536)
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
    # A client that goes on sending may lose the reply with its connection; it never gets a 200.
    assert reply == b"" or (b" 431 " in reply and b"headers_too_large" in reply)
    assert server.get("/livez").status_code == 200


@pytest.mark.parametrize("start", [b"0\r\nx-trailer: ", b"2;extension="], ids=["trailer", "chunk extension"])
def test_connection_ends_when_a_body_goes_on_without_growing(server: Running, start: bytes) -> None:
    """What follows a body's last chunk, or a chunk's length, has no end of its own, and the parser may keep it all."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer other-key\r\n"
    with server.connect() as connection:
        connection.sendall(head.encode() + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n" + start)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(b"y" * 10_000_000)
    assert server.get("/livez").status_code == 200


def test_body_is_taken_when_it_comes_in_more_chunks_than_headers_may_have_bytes() -> None:
    with serving() as server:
        body = json.dumps({**HELLO, "user": "x" * 200_000}).encode()
        chunks = (body[i : i + 100] for i in range(0, len(body), 100))
        headers = {"content-type": "application/json"}
        assert requests.post(server.url + CHAT, data=chunks, headers=headers, timeout=30).status_code == 200


def test_reply_names_the_limit_when_headers_are_a_little_too_large(server: Running) -> None:
    response = requests.get(server.url + "/health", headers={"x-big": "y" * 66_000}, timeout=30)
    assert response.status_code == 431
    assert error_of(response)["code"] == "headers_too_large"


@pytest.mark.parametrize(("method", "path", "allow"), [("GET", CHAT, "POST"), ("POST", "/health", "GET, HEAD")])
def test_method_is_refused_naming_the_right_ones(server: Running, method: str, path: str, allow: str) -> None:
    response = requests.request(method, server.url + path, headers=bearer("other-key"), timeout=30)
    assert response.status_code == 405
    assert response.headers["allow"] == allow
    assert allow in error_of(response)["message"]


def test_unknown_route_is_a_404_naming_what_exists(server: Running) -> None:
    response = requests.post(server.url + "/v1/embeddings", json={}, headers=bearer("other-key"), timeout=30)
    assert response.status_code == 404
    assert "POST /v1/chat/completions" in error_of(response)["message"]


def test_request_id_is_ours_and_the_clients_is_echoed_bounded(server: Running) -> None:
    first, second = server.get("/health"), server.get("/nothing", headers={"x-request-id": "mine" * 100 + "\x80 "})
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert "x-client-request-id" not in first.headers
    assert second.headers["x-client-request-id"] == ("mine" * 100)[:128]


def test_websocket_path_asks_for_the_upgrade_when_it_is_requested_plainly(server: Running) -> None:
    response = server.get("/ws", headers=bearer("other-key"))
    assert (response.status_code, response.headers["upgrade"]) == (426, "websocket")
    assert error_of(response)["code"] == "upgrade_required"


def test_key_never_appears_in_metrics_or_errors(server: Running) -> None:
    headers = bearer("other-key")
    for path in ("/metrics", "/metrics?format=prometheus", "/health", "/v1/nothing", "/openapi.json"):
        assert "other-key" not in requests.get(server.url + path, headers=headers, timeout=30).text


@pytest.mark.parametrize(
    "raw", [b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\nx: \x7f\r\n\r\n", b"\x16\x03\x01\x02\r\n"]
)
def test_error_has_our_shape_when_the_request_is_no_http(server: Running, raw: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(raw)
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
