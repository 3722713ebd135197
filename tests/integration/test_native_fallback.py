"""The server on a machine without the means for native kernels: it serves, and one line says what that costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoserve.errors import KernelBuildError
from nanoserve.kernels import native_build
from tests.serving import Served, served
from tests.tiny_folder import write_served_model

FLAGS = ("--device", "cpu", "--max-model-len", "64", "--max-sequences", "2", "--warmup-seconds", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("fallback"))


def answers(server: Served, folder: Path) -> bool:
    body = {"model": folder.name, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return bool(response.json()["usage"]["completion_tokens"] == 3)


@pytest.mark.parametrize(
    ("environ", "cause"),
    [
        ({"PATH": "/nowhere", "CC": ""}, "no C compiler among cc, gcc, clang: install one"),
        ({"CC": "/bin/false"}, "no C compiler among /bin/false: install one"),
    ],
    ids=["no compiler", "broken compiler"],
)
def test_reference_kernels_serve_and_one_line_says_so_when_nothing_compiles(
    environ: dict[str, str], cause: str, folder: Path, tmp_path: Path
) -> None:
    with served("--model", str(folder), *FLAGS, environ={**environ, "XDG_CACHE_HOME": str(tmp_path)}) as server:
        assert server.get("/health")["kernels"] == "reference"
        assert answers(server, folder)
        lines = [line for line in server.errors.splitlines() if "native kernels" in line]
    assert len(lines) == 1, server.said
    assert f"not available, so answers take several times as long: {cause}" in lines[0]


def test_native_kernels_serve_when_the_cache_folder_is_unusable(folder: Path, tmp_path: Path) -> None:
    try:
        native_build.find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    (tmp_path / "file").write_text("")
    with served("--model", str(folder), *FLAGS, environ={"XDG_CACHE_HOME": str(tmp_path / "file")}) as server:
        health = server.get("/health")
        assert health["kernels"].startswith("native (")
        assert health["weights"]["layers"] == "F32"
        assert answers(server, folder)
        assert "compiled at every start: make it writable, or set XDG_CACHE_HOME" in server.errors
