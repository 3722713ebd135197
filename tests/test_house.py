"""The house rules, read off the source: imports point downward, the integer modules and the server know no torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the top down. A module may import from its own rank's package or from any later rank.
RANKS: list[list[str]] = [
    ["serve", "nanoserve.cli", "nanoserve.__main__"],
    ["nanoserve.simulate"],
    ["nanoserve.bench"],
    ["server"],
    ["nanoserve.llm"],
    ["nanoserve.build"],
    ["nanoserve.readiness"],
    ["nanoserve.runners"],
    ["nanoserve.choices"],
    ["nanoserve.async_engine"],
    [
        "nanoserve.admission",
        "nanoserve.boot",
        "nanoserve.completion",
        "nanoserve.engine_thread",
        "nanoserve.live",
        "nanoserve.stream",
    ],
    ["nanoserve.output", "nanoserve.intake"],
    ["nanoserve.stepper"],
    ["nanoserve.engine"],
    ["nanoserve.paged_runner"],
    ["nanoserve.runner"],
    ["nanoserve.relay"],
    ["nanoserve.step"],
    ["nanoserve.scheduler"],
    ["nanoserve.turns", "nanoserve.budget", "nanoserve.prefix"],
    ["nanoserve.sequence"],
    ["nanoserve.warmup"],
    ["nanoserve.graphs", "nanoserve.backends"],
    ["nanoserve.gates"],
    ["nanoserve.models"],
    ["nanoserve.cache", "nanoserve.history"],
    ["nanoserve.kernels"],
    ["nanoserve.inputs", "nanoserve.slots"],
    ["nanoserve.ops"],
    ["nanoserve.memory", "nanoserve.buckets"],
    ["nanoserve.blocks"],
    ["nanoserve.tokens"],
    ["nanoserve.source"],
    ["nanoserve.gguf_file"],
    ["nanoserve.config", "nanoserve.request", "nanoserve.metrics", "nanoserve.probe"],
    ["nanoserve.errors"],
    ["nanoserve"],
]
NO_TORCH = ["scheduler", "blocks", "buckets", "memory", "config", "request", "errors", "metrics", "source", "gguf_file"]
NO_TORCH += [
    "tokens",
    "output",
    "intake",
    "live",
    "stream",
    "boot",
    "completion",
    "engine_thread",
    "async_engine",
    "ops",
]
NO_TORCH += ["sequence", "probe", "simulate", "turns", "budget", "admission", "prefix"]


def rank_of(module: str) -> int:
    best: tuple[int, int] | None = None
    for rank, names in enumerate(RANKS):
        for name in names:
            if (module == name or module.startswith(name + ".")) and (best is None or len(name) > best[0]):
                best = (len(name), rank)
    assert best is not None, f"{module} has no rank in the house: add it to RANKS and docs/ARCHITECTURE.md"
    return best[1]


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> list[Path]:
    files = [*(ROOT / "nanoserve").rglob("*.py"), *(ROOT / "server").rglob("*.py"), ROOT / "serve.py"]
    return sorted(path for path in files if path.exists())


def runtime_imports(tree: ast.Module) -> list[tuple[str, bool]]:
    """(module, is it at import time) for every import outside `if TYPE_CHECKING`."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "relative imports hide the direction of an import"
                found.append((child.module or "", top))
                found.extend((f"{child.module}.{alias.name}", top) for alias in child.names)
            inner = top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            visit(child, inner)

    visit(tree, True)
    return found


def known_modules() -> set[str]:
    return {module_of(path) for path in source_files()}


@pytest.mark.parametrize("path", source_files(), ids=lambda path: module_of(path))
def test_imports_point_downward(path: Path) -> None:
    module = module_of(path)
    if module == "nanoserve":
        return  # lazy exports only; checked by test_server_imports_without_torch
    known = known_modules()
    for target, _ in runtime_imports(ast.parse(path.read_text())):
        if target in known and target.split(".")[0] in ("nanoserve", "server", "serve"):
            assert rank_of(target) >= rank_of(module), f"{module} imports {target}, which lies above it"


@pytest.mark.parametrize("name", NO_TORCH)
def test_integer_and_text_modules_never_import_torch(name: str) -> None:
    path = ROOT / "nanoserve" / f"{name}.py"
    if not path.exists():
        path = ROOT / "nanoserve" / name / "__init__.py"
    paths = [path] if path.name != "__init__.py" else sorted(path.parent.rglob("*.py"))
    for each in paths:
        for target, at_import in runtime_imports(ast.parse(each.read_text())):
            heavy = target.split(".")[0] in ("torch", "transformers")
            assert not heavy or (target.startswith("transformers") and not at_import), f"{name} imports {target}"
