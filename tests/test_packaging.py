"""The wheel: it holds what the checkout holds, installs into a clean environment, and its command works from there."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from tests.checkout import ROOT, project, read, run
from tests.serving import served

PACKAGES = ("nanoserve", "server", "web")


@dataclass(frozen=True)
class Installed:
    """A clean environment that holds the wheel; its `bin` and its site folder."""

    bin: Path
    site: Path

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run code from a folder that is not the checkout."""
        return run(self.bin / "python", "-c", code, cwd=self.bin)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy of the checkout and installed with pip. Nothing is downloaded: setuptools builds in this
    environment, and a .pth file lends the clean one this environment's packages, after its own."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", work, source, cwd=work)
    assert built.returncode == 0, built.stderr
    (wheel,) = work.glob("*.whl")

    clean = work / "clean"
    venv.create(clean, symlinks=True)
    done = run(*pip, "--python", clean / "bin/python", "install", "--no-deps", "--no-index", wheel, cwd=work)
    assert done.returncode == 0, done.stderr
    (site,) = clean.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(clean / "bin", site)


def version_in_source() -> str:
    found = re.search(r'__version__ = "(.+)"', read("nanoserve/__init__.py"))
    assert found is not None
    return found[1]


def test_every_package_folder_is_listed() -> None:
    folders = {file.parent for name in PACKAGES for file in (ROOT / name).rglob("*.py")}
    wanted = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(project()["tool"]["setuptools"]["packages"]) == wanted | {"web"}


def test_wheel_holds_every_file_of_its_packages_and_nothing_else(installed: Installed) -> None:
    def files(root: Path) -> set[str]:
        found = (file for name in PACKAGES for file in (root / name).rglob("*") if file.is_file())
        return {str(file.relative_to(root)) for file in found if "__pycache__" not in file.parts}

    assert files(installed.site) == files(ROOT)
    assert (installed.site / "web/index.html").stat().st_size > 0
    owned = {line.split("/")[0] for line in record_of(installed).splitlines()} - {".."}
    assert owned == {*PACKAGES, f"nanoserve-{version_in_source()}.dist-info"}


def record_of(installed: Installed) -> str:
    (record,) = installed.site.glob("nanoserve-*.dist-info/RECORD")
    return record.read_text()


def test_wheel_states_version_and_license(installed: Installed) -> None:
    (folder,) = installed.site.glob("nanoserve-*.dist-info")
    metadata = importlib.metadata.PathDistribution(folder)
    assert metadata.version == version_in_source()
    assert metadata.metadata["License-Expression"] == "Apache-2.0"
    assert (folder / "licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_installed_command_prints_help_when_asked(installed: Installed) -> None:
    done = run(installed.bin / "nanoserve", "--help", cwd=installed.bin)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_import_brings_in_no_torch_when_only_the_package_is_imported(installed: Installed) -> None:
    done = installed.python(
        "import sys, nanoserve\n"
        "from nanoserve import SamplingParams\n"
        "assert SamplingParams(max_tokens=3).max_tokens == 3\n"
        "print(nanoserve.__file__)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'starlette'} & set(sys.modules)))\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(installed.site / "nanoserve/__init__.py"), "[]"]


@pytest.mark.model
def test_installed_command_serves_the_page_when_started_elsewhere(installed: Installed, tmp_path: Path) -> None:
    command = (installed.bin / "nanoserve", "serve")
    with served("--max-model-len", "256", command=command, cwd=tmp_path, ready="/") as server:
        page = requests.get(server.url, timeout=10).content
        assert server.stop() == 0, server.said
    assert page == (ROOT / "web/index.html").read_bytes()
