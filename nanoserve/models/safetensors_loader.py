"""A safetensors folder as a `Checkpoint`: one file or shards with an index, memory-mapped, read tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoserve.errors import BadCheckpoint
from nanoserve.source import INDEX_NAME, SINGLE_NAME, read_safetensors_header, shard_of_tensor, weight_files

# Buffers that old exporters saved beside the weights; both follow from the config.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """Open while it is a context manager's; headers are checked on construction. Raises BadCheckpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        for path in weight_files(folder):
            for name, entry in read_safetensors_header(path).items():
                if name in self._file_of:
                    raise BadCheckpoint(f"{path}: tensor {name!r} is in {self._file_of[name].name} as well")
                self._file_of[name] = path
                if _DERIVED.fullmatch(name):
                    continue
                if entry.dtype not in _FLOATS:
                    raise BadCheckpoint(f"{path}: tensor {name!r} is {entry.dtype}; supported are {', '.join(_FLOATS)}")
                self._shapes[name] = entry.shape
        self._check_index()

    def _check_index(self) -> None:
        index = self._folder / INDEX_NAME
        if (self._folder / SINGLE_NAME).exists() or not index.exists():
            return
        for name, shard in shard_of_tensor(index).items():
            found = self._file_of.get(name)
            if found is None or found.name != shard:
                raise BadCheckpoint(f"{self._folder / shard}: tensor {name!r} is missing; {INDEX_NAME} lists it")

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.clear()
        self._stack.close()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def where(self) -> str:
        files = set(self._file_of.values())
        return str(files.pop() if len(files) == 1 else self._folder)

    def label(self, name: str) -> str:
        return f"{self._file_of[name]}: tensor {name!r}"

    def fetch(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            tensor: Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{self.label(name)} cannot be read ({error}); download the file again") from error
        return tensor

    def blocks(self, name: str) -> None:
        """Safetensors holds floats only."""
