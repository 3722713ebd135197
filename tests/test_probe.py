"""What the machine says of itself, against what the operating system says."""

from __future__ import annotations

import psutil

from nanoserve.probe import cores, free_host_bytes


def test_free_memory_is_positive_and_no_more_than_the_machine_has() -> None:
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total


def test_cores_are_those_this_process_may_run_on() -> None:
    assert cores() == len(psutil.Process().cpu_affinity() or [])
