"""What the documents claim about the repository is so: links, make targets, flags, file sizes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT, read, run

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PIP_FLAGS = {"--no-deps", "--extra-index-url"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_of_a_document_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (document.parent / target).exists()]


def test_readme_opens_with_the_two_commands() -> None:
    block = re.search(r"```\w*\n(.*?)```", read("README.md"), re.DOTALL)
    assert block is not None
    assert re.findall(r"^make (\w+)", block[1], re.MULTILINE) == ["serve", "test"]


def test_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", read("README.md"), re.MULTILINE))
    assert {"serve", "test", "lint", "clean"} <= named <= targets


def test_readme_flags_are_the_flags_of_the_command() -> None:
    code = "from nanoserve.cli import main; main(['serve', '--help'])"
    done = run(sys.executable, "-c", code, COLUMNS="1000")
    assert done.returncode == 0, done.stderr
    known = flags(done.stdout) - {"--help"}
    named = flags(read("README.md")) - PIP_FLAGS
    assert not named - known, "README.md names flags that the command does not have"
    assert not known - named, "the command has flags that README.md does not name"


def flags(text: str) -> set[str]:
    """The flags a text names, a switch once: as the name that turns it on."""
    return {f"--{name}" for name in re.findall(r"(?<![\w-])--(?:no-(?!deps))?([a-z][a-z-]+)", text)}


def test_no_python_file_is_longer_than_the_readme_promises() -> None:
    promise = re.search(r"no file is longer than (\d+) lines", read("README.md"))
    assert promise is not None
    files = [*(ROOT / "nanoserve").rglob("*.py"), *(ROOT / "server").rglob("*.py"), ROOT / "serve.py"]
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: length for name, length in lengths.items() if length > int(promise[1])} == {}
