"""Building the native library: where, when, and what a machine without the means is told."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nanoserve.errors import KernelBuildError
from nanoserve.kernels import native_build, native_lib

EVERYTHING = frozenset().union(*native_build._NEEDS.values())


def test_the_fastest_instruction_set_the_cpu_has_is_picked() -> None:
    assert native_build.pick_isa(frozenset()) == "generic"
    assert native_build.pick_isa(frozenset({"avx2", "fma", "f16c"})) == "avx2"
    assert native_build.pick_isa(EVERYTHING - {"avx512_bf16"}) == "avx512"
    assert native_build.pick_isa(EVERYTHING) == "avx512_bf16"
    assert native_build.pick_isa(EVERYTHING, "generic") == "generic"


def test_an_instruction_set_the_cpu_lacks_is_refused_when_asked_for() -> None:
    with pytest.raises(KernelBuildError, match="this CPU runs generic: choose one of them or unset it"):
        native_build.pick_isa(frozenset(), "avx512")


def test_a_missing_compiler_names_the_remedy() -> None:
    with pytest.raises(KernelBuildError, match="no C compiler among cc, gcc, clang: install one"):
        native_build.find_compiler({"PATH": "/nowhere"})
    with pytest.raises(KernelBuildError, match="no C compiler among /no/cc"):
        native_build.find_compiler({"PATH": os.defpath, "CC": "/no/cc"})


def test_the_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    assert native_build.cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/nanoserve")
    assert native_build.cache_folder({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "nanoserve"


def test_a_private_folder_serves_once_when_the_cache_folder_cannot_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    unusable = tmp_path / "file" / "under"
    with native_build.built("generic", folder=unusable) as path:
        library = native_lib.NativeLibrary(path)
    assert library.isa == "generic"
    assert not path.parent.exists()
    assert f"{unusable} cannot be written" in caplog.text
    assert "compiled at every start: make it writable, or set XDG_CACHE_HOME" in caplog.text


def test_no_compiler_is_needed_when_the_library_is_there(tmp_path: Path) -> None:
    (tmp_path / native_build.library_name("generic", native_build.cpu_flags(), {"PATH": "/nowhere"})).write_text("made")
    with native_build.built("generic", folder=tmp_path, environ={"PATH": "/nowhere"}) as path:
        assert path.read_text() == "made"


def test_another_compiler_builds_another_library() -> None:
    names = {native_build.library_name("generic", frozenset(), environ) for environ in ({}, {"CC": "clang"})}
    assert len(names) == 2


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    fake = tmp_path / "cc"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.c:1: error: no such thing"\nexit 1\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    environ = {"CC": str(fake), "PATH": os.defpath}
    with pytest.raises(KernelBuildError, match="no such thing"):
        with native_build.built("generic", folder=tmp_path / "cache", environ=environ):
            pass
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("isa", native_build.ISAS)
def test_every_instruction_set_compiles_whether_or_not_this_cpu_has_it(isa: str) -> None:
    if native_build.platform.machine() not in ("x86_64", "AMD64") and isa != "generic":
        pytest.skip(f"{isa} is an x86-64 instruction set")
    with native_build.built(isa) as path:
        assert path.is_file()


def test_two_processes_that_race_both_load_a_whole_library(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from nanoserve.kernels import native_lib;"
        "print(native_lib.load('generic', Path(sys.argv[1])).path)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert paths == {str(next(tmp_path.iterdir()))}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "native.so").write_text("not a library")
    with pytest.raises(KernelBuildError, match="cannot be loaded"):
        native_lib.NativeLibrary(tmp_path / "native.so")
