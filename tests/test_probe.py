"""What the machine says of itself, against what the operating system says."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from nanoserve.probe import cores, free_host_bytes


def test_free_memory_is_positive_and_no_more_than_the_machine_has() -> None:
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total


def test_cores_are_those_this_process_may_run_on() -> None:
    assert cores() == len(psutil.Process().cpu_affinity() or [])


def test_openmp_sleeps_between_operations_when_the_operator_said_nothing() -> None:
    show = "import os, nanoserve; nanoserve.LLM; print(os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, wanted in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")):
        done = subprocess.run([sys.executable, "-c", show], env=environment | given, capture_output=True, text=True)
        assert done.stdout.strip() == wanted, done.stderr
