"""The warm list's file: a round trip, and one line about anything that is no warm list."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.buckets import DecodeShape, GraphKey
from nanoserve.errors import ConfigError
from nanoserve.warmup import load_warm_list, save_warm_list

counts = st.integers(1, 1 << 40)


paged = st.builds(GraphKey, st.sampled_from(["body", "head", "head_full"]), counts, st.none())


@given(st.dictionaries(st.one_of(st.builds(DecodeShape, counts, counts), paged), counts, max_size=8))
def test_shapes_come_back_when_they_were_saved(tmp_path_factory: pytest.TempPathFactory, replays: dict) -> None:
    path = tmp_path_factory.mktemp("list") / "warm.json"
    save_warm_list(path, replays)
    assert load_warm_list(path) == replays
    assert os.listdir(path.parent) == ["warm.json"]


def test_shapes_are_listed_most_often_first_and_unused_ones_left_out(tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    save_warm_list(path, {DecodeShape(1, 128): 3, DecodeShape(4, 128): 0, DecodeShape(2, 256): 9})
    assert json.loads(path.read_text()) == {
        "format": 1,
        "shapes": [{"rows": 2, "width": 256, "replays": 9}, {"rows": 1, "width": 128, "replays": 3}],
    }


def test_list_is_empty_when_there_is_no_file_yet(tmp_path: Path) -> None:
    assert load_warm_list(tmp_path / "none.json") == {}


def test_start_is_refused_when_the_folder_is_missing(tmp_path: Path) -> None:
    """At shutdown, when the list would be saved, nobody is there any more to be told."""
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; create it"):
        load_warm_list(tmp_path / "nowhere" / "warm.json")


GOOD = {"rows": 1, "width": 128, "replays": 3}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "1",
        '"shapes"',
        "[" * 100_000,
        json.dumps({"shapes": [GOOD]}),
        json.dumps({"format": 2, "shapes": [GOOD]}),
        json.dumps({"format": 1}),
        json.dumps({"format": 1, "shapes": 7}),
        json.dumps({"format": 1, "shapes": [1]}),
        json.dumps({"format": 1, "shapes": [{"rows": 1, "width": 128}]}),
        *(
            json.dumps({"format": 1, "shapes": [GOOD | {key: value}]})
            for key in GOOD
            for value in (None, "3", 0, -1, 1.5, float("inf"), float("nan"), True, [])
        ),
    ],
    ids=lambda content: content[:60],
)
def test_start_is_refused_when_the_file_is_no_warm_list(tmp_path: Path, content: str) -> None:
    path = tmp_path / "warm.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"--warm-list .*warm\.json is no warm list .*; delete it or name another"):
        load_warm_list(path)


@given(st.binary(max_size=60))
def test_start_is_refused_when_the_file_holds_any_other_bytes(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("list") / "warm.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--warm-list"):
        load_warm_list(path)


def test_start_is_refused_when_the_file_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_warm_list(tmp_path)


def test_old_list_is_whole_when_saving_fails(tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    save_warm_list(path, {DecodeShape(1, 128): 3})
    before = path.read_text()
    (tmp_path / f"warm.json.{os.getpid()}.tmp").mkdir()
    with pytest.raises(OSError, match=r"warm\.json"):
        save_warm_list(path, {DecodeShape(2, 128): 3})
    assert path.read_text() == before
