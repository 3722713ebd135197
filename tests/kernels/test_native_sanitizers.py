"""Random legal programs under the sanitizers: no read or write out of bounds, no undefined behaviour, no race."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nanoserve.kernels import native_build
from tests.kernels.conftest import FLAGS, runnable

DRIVER = Path(__file__).with_name("driver.c")


def build_driver(isa: str, sanitizer: str, folder: Path) -> Path:
    compiler = native_build.find_compiler()
    units, _ = native_build.source_files()
    made = folder / f"driver-{isa}"
    flags = [*native_build.ISA_FLAGS[isa], f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    settings = ["-std=c11", "-O1", "-g1", "-fno-var-tracking", "-ffp-contract=off", f"-I{native_build.SOURCES}"]
    command = [compiler, *settings, *flags, *map(str, units), str(DRIVER), "-o", str(made), "-lm", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    assert done.returncode == 0, done.stderr
    return made


def run_driver(isa: str, sanitizer: str, folder: Path, count: int) -> None:
    done = subprocess.run(
        [build_driver(isa, sanitizer, folder), "1", str(count)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_random_programs_stay_in_bounds(tmp_path: Path) -> None:
    run_driver(native_build.pick_isa(FLAGS), "address,undefined", tmp_path, 40)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", [isa for isa in native_build.ISAS if runnable(isa)])
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_many_random_programs_are_clean(isa: str, sanitizer: str, tmp_path: Path) -> None:
    run_driver(isa, sanitizer, tmp_path, 200 if isa != "generic" else 30)
