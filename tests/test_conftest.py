"""The suite's own rules: what is skipped where something is missing, and what CI refuses to skip."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT, run

SUITE = """
import pytest

@pytest.mark.model
def test_model():
    pytest.skip("no weights today")

@pytest.mark.browser
def test_browser():
    pass

def test_plain():
    pytest.skip("not on this machine")
"""
MODULE = "import pytest\npytest.skip('whole module', allow_module_level=True)\n"
PROFILE = """
from hypothesis import settings

def test_profile():
    assert settings().deadline is None
    print(f"derandomize={settings().derandomize}")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def outcome(suite: Path, text: str, *, ci: bool, **environment: str) -> tuple[int, str]:
    """Exit code and output of pytest over one test file."""
    (suite / "test_it.py").write_text(text)
    command = (sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "test_it.py")
    done = run(*command, cwd=suite, **environment, **({"CI": "true"} if ci else {}))
    return done.returncode, done.stdout


def counts(output: str) -> dict[str, int]:
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", output)}


def test_tests_are_skipped_with_reasons_when_the_machine_lacks_chromium(suite: Path) -> None:
    code, output = outcome(suite, SUITE, ci=False, PATH="/absent")
    assert (code, counts(output)) == (0, {"skipped": 3})
    assert "browser: none of chromium" in output


def test_skipped_model_and_browser_tests_fail_when_ci_is_set(suite: Path) -> None:
    code, output = outcome(suite, SUITE, ci=True, PATH="/absent")
    assert (code, counts(output)) == (1, {"failed": 1, "error": 1, "skipped": 1})
    assert "a model test must not be skipped with CI=true" in output
    assert "a browser test must not be skipped with CI=true" in output


@pytest.mark.parametrize(("ci", "code"), [(False, 5), (True, 2)])
def test_module_that_skips_itself_is_an_error_only_when_ci_is_set(suite: Path, ci: bool, code: int) -> None:
    assert outcome(suite, MODULE, ci=ci)[0] == code


@pytest.mark.parametrize("ci", [False, True])
def test_property_tests_are_reproducible_when_ci_is_set(suite: Path, ci: bool) -> None:
    code, output = outcome(suite, PROFILE, ci=ci)
    assert code == 0
    assert f"derandomize={ci}" in output
