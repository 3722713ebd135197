"""A safetensors folder as a `Checkpoint`: one file or shards with an index, read tensor by tensor.

Read and not mapped: pages of a mapped file stay resident beside the weights that were made of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.errors import BadCheckpoint
from nanoserve.source import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsEntry,
    read_safetensors_header,
    shard_of_tensor,
    weight_files,
)

# Buffers that old exporters saved beside the weights; both follow from the config.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsCheckpoint:
    """Headers are checked on construction. Raises BadCheckpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Path] = {}
        self._entries: dict[str, SafetensorsEntry] = {}
        for path in weight_files(folder):
            for name, entry in read_safetensors_header(path).items():
                if name in self._file_of:
                    raise BadCheckpoint(f"{path}: tensor {name!r} is in {self._file_of[name].name} as well")
                self._file_of[name] = path
                if _DERIVED.fullmatch(name):
                    continue
                if entry.dtype not in _FLOATS:
                    raise BadCheckpoint(f"{path}: tensor {name!r} is {entry.dtype}; supported are {', '.join(_FLOATS)}")
                self._entries[name] = entry
        self._shapes = {name: entry.shape for name, entry in self._entries.items()}
        self._check_index()

    def _check_index(self) -> None:
        index = self._folder / INDEX_NAME
        if (self._folder / SINGLE_NAME).exists() or not index.exists():
            return
        for name, shard in shard_of_tensor(index).items():
            found = self._file_of.get(name)
            if found is None or found.name != shard:
                raise BadCheckpoint(f"{self._folder / shard}: tensor {name!r} is missing; {INDEX_NAME} lists it")

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
        entry, dtype = self._entries[name], _FLOATS[self._entries[name].dtype]
        raw = torch.empty(math.prod(entry.shape) * dtype.itemsize, dtype=torch.uint8)
        try:
            with self._file_of[name].open("rb", buffering=0) as file:
                file.seek(entry.offset)
                found = _read_into(file, raw.numpy().data)
        except OSError as error:
            raise BadCheckpoint(f"{self.label(name)} cannot be read: {error.strerror or error}") from error
        if found != len(raw):
            raise BadCheckpoint(f"{self.label(name)} ends after {found} of {len(raw)} bytes; download the file again")
        return raw.view(dtype).view(entry.shape)

    def blocks(self, name: str) -> None:
        """Safetensors holds floats only."""

    def kind(self, name: str) -> str:
        return self._entries[name].dtype


def _read_into(file: FileIO, buffer: memoryview) -> int:
    """Bytes read: a single call gives at most 2 GiB."""
    done = 0
    while done < len(buffer) and (count := file.readinto(buffer[done:])):
        done += count
    return done
