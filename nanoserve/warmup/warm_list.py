"""The warm list on disk: which shapes an engine replayed, so that the next start records those first."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoserve.buckets import DecodeShape, GraphKey, Shape
from nanoserve.errors import ConfigError

FORMAT = 1


def load_warm_list(path: Path) -> dict[Shape, int]:
    """Shapes and how often each was replayed; empty if there is no such file yet.

    Raises ConfigError, naming the file, if it is not a warm list.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"--warm-list {path}: there is no folder {path.parent}; create it") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--warm-list {path} cannot be read: {error}") from error
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']}, {FORMAT} is supported")
        return {_shape(entry): _count(entry["replays"]) for entry in document["shapes"]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--warm-list {path} is no warm list ({error!r}); delete it or name another file") from error


def _shape(entry: Mapping[str, Any]) -> Shape:
    kind = entry.get("kind", "decode")
    if kind == "decode":
        return DecodeShape(_count(entry["rows"]), _count(entry["width"]))
    if kind not in ("body", "head", "head_full"):
        raise ValueError(f"{kind!r} is no kind of graph")
    return GraphKey(kind, _count(entry["rows"]), None)


def _entry(shape: Shape, replays: int) -> dict[str, Any]:
    named = {"kind": shape.kind} if isinstance(shape, GraphKey) else {"width": shape.width}
    return {"rows": shape.rows, **named, "replays": replays}


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no count")
    return value


def save_warm_list(path: Path, replays: Mapping[Shape, int]) -> None:
    """Write the shapes that were replayed, most often first. Raises OSError; a reader never sees half a file."""
    shapes = [
        _entry(shape, count)
        for shape, count in sorted(replays.items(), key=lambda item: item[1], reverse=True)
        if count
    ]
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps({"format": FORMAT, "shapes": shapes}, indent=1) + "\n")
    draft.replace(path)
