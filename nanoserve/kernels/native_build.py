"""Compiles csrc/ into one shared object per instruction set, at first use, into the user's cache folder.

The file's name is a digest of sources, flags, CPU and $CC, so a changed source or a home folder that moved to another
machine builds anew, and a library that is there needs no compiler. Two processes that race build twice and rename once
each: whoever loads the file finds a whole one. No torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
log = logging.getLogger("nanoserve")
ISA_VARIABLE = "NANOSERVE_NATIVE_ISA"


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


def find_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """The path of $CC, else of cc, gcc or clang in PATH. Raises KernelBuildError naming the remedy."""
    names = [environ["CC"]] if environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        command = shutil.which(name, path=environ.get("PATH"))
        if command is None:
            continue
        # A name proves nothing: macOS has a cc that only says how to install one.
        if subprocess.run([command, "--version"], capture_output=True, check=False).returncode == 0:
            return command
    raise KernelBuildError(
        f"no C compiler among {', '.join(names)}: install one (Debian, Ubuntu: apt install gcc; macOS: "
        "xcode-select --install), or point CC at it"
    )


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/nanoserve`, else `~/.cache/nanoserve`."""
    base = environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "nanoserve"
    return Path(environ.get("HOME") or Path("~").expanduser()) / ".cache" / "nanoserve"


def source_files(folder: Path = SOURCES) -> tuple[list[Path], list[Path]]:
    """(units to compile, headers), sorted. Raises KernelBuildError if there are none."""
    units, headers = sorted(folder.glob("*.c")), sorted(folder.glob("*.h"))
    if not units:
        raise KernelBuildError(f"no C sources in {folder}; install nanoserve again")
    return units, headers


def library_name(isa: str, flags: frozenset[str], environ: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    units, headers = source_files()
    for path in (*units, *headers):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    settings = (*COMMON_FLAGS, *ISA_FLAGS[isa], environ.get("CC", ""), platform.machine(), *sorted(flags))
    digest.update("\0".join(settings).encode())
    return f"native-{isa}-{digest.hexdigest()[:20]}.so"


@contextmanager
def built(isa: str, *, folder: Path | None = None, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """The library of one instruction set, to be loaded within the context; compiled if it is not there yet (seconds).

    Where the cache folder cannot be used, it is built in a private one that ends with the context: a loaded library
    does not need its file. Raises KernelBuildError without a compiler, or if it fails.
    """
    cache = folder or cache_folder(environ)
    name = library_name(isa, cpu_flags(), environ)
    if (cache / name).is_file():
        yield cache / name
        return
    compiler = find_compiler(environ)
    with ExitStack() as stack:
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix=".build-", dir=cache))
        except OSError as error:
            log.warning(
                "%s cannot be written (%s), so the native kernels are compiled at every start: make it writable, or "
                "set XDG_CACHE_HOME",
                cache,
                error.strerror or error,
            )
            yield _compile(compiler, isa, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nanoserve-"))))
            return
        os.replace(_compile(compiler, isa, Path(work)), cache / name)
    yield cache / name


def _compile(compiler: str, isa: str, work: Path) -> Path:
    """Every unit at once, then one link."""
    units, _ = source_files()
    flags = [*COMMON_FLAGS, *ISA_FLAGS[isa]]
    objects = [work / f"{unit.stem}.o" for unit in units]
    # The slowest first, so that two cores end together.
    order = sorted(zip(units, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)
    running = [_start([compiler, *flags, "-c", str(unit), "-o", str(made)]) for unit, made in order]
    _finish(running)
    library = work / "native.so"
    shared = "-dynamiclib" if sys.platform == "darwin" else "-shared"
    _finish([_start([compiler, shared, "-o", str(library), *map(str, objects), "-lm", "-lpthread"])])
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
