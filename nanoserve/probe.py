"""What the machine has to give: memory and cores, and how threads share them. Reads the operating system, so that
`memory` need not."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def free_host_bytes() -> int:
    """Memory this process may still take without swapping: the system's or the control group's, whichever is less."""
    available = _meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def cores() -> int:
    """Cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def share_cores() -> None:
    """Let OpenMP's workers sleep between operations, unless the operator has said otherwise. Spinning, which is the
    default, makes steps take several times as long beside anything else that wants the cores, the event loop included
    (docs/LOG.md). Read once, when torch is imported: no effect after that.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def give_back_freed_memory() -> None:
    """Return to the system what the C library keeps of freed memory, where it is glibc: after a load, a copy or two of
    the largest layers."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _read_int(path: str) -> int | None:
    """None where the file is missing or says "max"."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
