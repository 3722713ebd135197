"""Compiles csrc/ into one shared object per instruction set, at first use, into the user's cache folder.

The file's name is a digest of sources, flags, compiler and CPU, so a changed source or a home folder that moved to
another machine builds anew. Two processes that race build twice and rename once each: whoever loads the file finds a
whole one. No torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoserve.errors import KernelBuildError

SOURCES = Path(__file__).parent / "csrc"
COMMON_FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra")
_AVX512 = ("-DNS_ISA_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c")
ISA_FLAGS: Mapping[str, tuple[str, ...]] = {
    "generic": (),
    "avx2": ("-DNS_ISA_AVX2", "-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-DNS_ISA_AVX512_BF16", "-mavx512bf16"),
}
ISAS = tuple(ISA_FLAGS)
"""From the slowest to the fastest."""
_AVX512_NEEDS = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
_NEEDS = {
    "generic": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": _AVX512_NEEDS,
    "avx512_bf16": _AVX512_NEEDS | {"avx512_bf16"},
}
ISA_VARIABLE = "NANOSERVE_NATIVE_ISA"


@dataclass(frozen=True, slots=True)
class Compiler:
    """`command` is absolute; `version` is its first line about itself."""

    command: str
    version: str


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What Linux says the CPU can do; nothing elsewhere, where the generic kernels run."""
    try:
        text = path.read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def pick_isa(flags: frozenset[str], wanted: str | None = None) -> str:
    """The fastest instruction set the CPU has, or the one asked for (`NANOSERVE_NATIVE_ISA`).

    Raises KernelBuildError if that is unknown or the CPU lacks it.
    """
    possible = [isa for isa in ISAS if _NEEDS[isa] <= flags]
    if not wanted:
        return possible[-1]
    if wanted not in possible:
        raise KernelBuildError(
            f"{ISA_VARIABLE} is {wanted!r}; this CPU runs {', '.join(possible)}: choose one of them or unset it"
        )
    return wanted


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler:
    """$CC, else cc, gcc or clang from PATH. Raises KernelBuildError naming the remedy."""
    names = [environ["CC"]] if environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        command = shutil.which(name, path=environ.get("PATH"))
        if command is None:
            continue
        answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout:
            return Compiler(command, answer.stdout.splitlines()[0])
    raise KernelBuildError(
        f"no C compiler among {', '.join(names)}: install one (Debian, Ubuntu: apt install gcc; macOS: "
        "xcode-select --install), or point CC at it"
    )


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/nanoserve`, else `~/.cache/nanoserve`; a private folder for temporary files without a home."""
    base = environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "nanoserve"
    home = Path(environ.get("HOME") or Path("~").expanduser())
    if os.access(home, os.W_OK):
        return home / ".cache" / "nanoserve"
    return Path(tempfile.gettempdir()) / f"nanoserve-{os.getuid()}"


def source_files(folder: Path = SOURCES) -> tuple[list[Path], list[Path]]:
    """(units to compile, headers), sorted. Raises KernelBuildError if there are none."""
    units, headers = sorted(folder.glob("*.c")), sorted(folder.glob("*.h"))
    if not units:
        raise KernelBuildError(f"no C sources in {folder}; install nanoserve again")
    return units, headers


def library_path(isa: str, compiler: Compiler, flags: frozenset[str], folder: Path) -> Path:
    digest = hashlib.sha256()
    units, headers = source_files()
    for path in (*units, *headers):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    settings = (*COMMON_FLAGS, *ISA_FLAGS[isa], compiler.version, platform.machine(), *sorted(flags))
    digest.update("\0".join(settings).encode())
    return folder / f"native-{isa}-{digest.hexdigest()[:20]}.so"


def build(isa: str, *, folder: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The library of one instruction set, compiled if it is not there yet (seconds).

    Raises KernelBuildError without a compiler, if it fails, or if the folder cannot be written.
    """
    compiler = find_compiler(environ)
    target_folder = folder or cache_folder(environ)
    target = library_path(isa, compiler, cpu_flags(), target_folder)
    if target.is_file():
        return target
    try:
        target_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target_folder) as work:
            made = _compile(compiler, isa, Path(work))
            os.replace(made, target)
    except OSError as error:
        raise KernelBuildError(
            f"{target_folder} cannot be written ({error.strerror or error}): make it writable, or set XDG_CACHE_HOME"
        ) from error
    return target


def _compile(compiler: Compiler, isa: str, work: Path) -> Path:
    """Every unit at once, then one link."""
    units, _ = source_files()
    flags = [*COMMON_FLAGS, *ISA_FLAGS[isa]]
    objects = [work / f"{unit.stem}.o" for unit in units]
    # The slowest first, so that two cores end together.
    order = sorted(zip(units, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)
    running = [_start([compiler.command, *flags, "-c", str(unit), "-o", str(made)]) for unit, made in order]
    _finish(running)
    library = work / "native.so"
    shared = "-dynamiclib" if sys.platform == "darwin" else "-shared"
    _finish([_start([compiler.command, shared, "-o", str(library), *map(str, objects), "-lm", "-lpthread"])])
    return library


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(running: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for all, so that none outlives the folder it writes to; then report the first failure."""
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode == 0:
            continue
        lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
        reason = lines[0] if lines else f"exit status {process.returncode}"
        raise KernelBuildError(f"the C compiler failed on the native kernels: {reason}")
