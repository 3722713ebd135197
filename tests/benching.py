"""Running measurements as the command line does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.cli import main


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A measurement sets torch's threads; the next test gets them back. In force where it is imported."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bench(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[str, dict[str, Any]]:
    """What `nanoserve bench …` prints, and the object in its last line."""
    assert main(["bench", *map(str, argv)]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])
