"""Framing: what three kinds of client make of the same bytes."""

from __future__ import annotations

import json

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from server.sse import frame
from tests.server.fake_engine import Script
from tests.server.support import CHAT, HELLO, Running

NASTY = ["a\nb", "c\rd", "e\r\nf", "\v\f\x1c\x1d\x1e", "\x85", "\u2028", "\u2029", "✅", "data: x\n\n", "\0"]


def spec_parse(text: str) -> list[str]:
    """The data of each event by the WHATWG rules: lines end in CR, LF or CRLF and in nothing else."""
    events, data = [], []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if line == "" and data:
            events.append("\n".join(data))
            data = []
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
    return events


def text_of(datas: list[str]) -> str:
    chunks = [json.loads(data) for data in datas if data != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.fixture
def nasty(server: Running) -> Running:
    server.engine.script = lambda request: Script(tokens=tuple(NASTY), delay=0.002)
    return server


def open_stream(server: Running) -> requests.Response:
    return server.post(CHAT, HELLO | {"stream": True}, stream=True)


def test_headers_are_those_of_an_uncached_utf8_event_stream(server: Running) -> None:
    with open_stream(server) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.content


def test_spec_parser_reads_the_text_when_it_holds_line_ends(nasty: Running) -> None:
    with open_stream(nasty) as response:
        datas = spec_parse(response.content.decode())
    assert datas[-1] == "[DONE]"
    assert text_of(datas) == "".join(NASTY)


def test_splitting_at_blank_lines_reads_the_text_when_it_holds_line_ends(nasty: Running) -> None:
    with open_stream(nasty) as response:
        raw = response.content
    assert b"\r" not in raw
    events = raw.decode().split("\n\n")
    assert events[-1] == ""
    assert text_of([event.removeprefix("data: ") for event in events[:-1]]) == "".join(NASTY)


def test_requests_iter_lines_reads_the_text_when_it_holds_line_ends(nasty: Running) -> None:
    with open_stream(nasty) as response:
        lines = [line for line in response.iter_lines(decode_unicode=True) if line]
    assert all(line.startswith("data: ") for line in lines)
    assert text_of([line.removeprefix("data: ") for line in lines]) == "".join(NASTY)


@given(st.text())
def test_frame_is_one_line_for_every_splitter_when_text_is_anything(text: str) -> None:
    raw = frame({"text": text}).decode()
    assert raw.endswith("\n\n")
    assert len(raw[:-2].splitlines()) == 1
    assert json.loads(raw.removeprefix("data: ")) == {"text": text}
