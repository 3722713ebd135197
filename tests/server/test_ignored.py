"""Which unknown fields are said in the log, and how often."""

from __future__ import annotations

import json
import logging

import pytest

from server.ignored import MAX_BODY_BYTES, MAX_NAMES, IgnoredFields
from server.schemas import ChatBody, CompletionBody

LOGGER = "nanoserve.server"


def note(ignored: IgnoredFields, **fields: object) -> None:
    ignored.note_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)


def test_unknown_field_is_said_once_when_it_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    with caplog.at_level(logging.INFO, LOGGER):
        note(ignored, foo=1, user="u", max_tokens=1)
        note(ignored, foo=None)
        note(ignored, user=[], bar={"foo": 1})
    said = [record.getMessage().split("'")[1] for record in caplog.records]
    assert said == ["foo", "user", "bar"]


def test_a_field_of_the_other_route_is_unknown_to_this_one(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    with caplog.at_level(logging.INFO, LOGGER):
        ignored.note({"type": 1, "id": 2, "messages": 3, "echo": 4}, ChatBody, known=frozenset({"type", "id"}))
    assert [record.getMessage().split("'")[1] for record in caplog.records] == ["echo"]


def test_lines_end_when_names_are_many_and_are_short_when_names_are_long(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    with caplog.at_level(logging.INFO, LOGGER):
        note(ignored, **{"n" * 10_000 + "1": 1, "n" * 10_000 + "2": 2})
        assert len(caplog.records) == 1
        note(ignored, **{f"field-{i}": i for i in range(2 * MAX_NAMES)})
    assert len(caplog.records) == MAX_NAMES
    assert max(len(record.getMessage()) for record in caplog.records) < 200


@pytest.mark.parametrize(("level", "padding"), [(logging.WARNING, 0), (logging.INFO, MAX_BODY_BYTES)])
def test_nothing_is_said_when_nobody_reads_it_or_the_body_is_large(
    caplog: pytest.LogCaptureFixture, level: int, padding: int
) -> None:
    with caplog.at_level(level, LOGGER):
        note(IgnoredFields(), foo="x" * padding)
    assert caplog.records == []
