"""The product's engine and server over a tiny model, in a thread of the test process: every part is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from nanoserve.async_engine import AsyncEngine
from nanoserve.backends import EagerBackend
from nanoserve.boot import Booted, Report
from nanoserve.build import build_engine
from nanoserve.config import EngineConfig
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.metrics import Metrics
from tests.server.support import Running, serving


class Watched(AsyncEngine):
    """Says of itself what the server's test helper asks an engine for."""

    left = False
    booted: Booted | None = None

    @property
    def stage(self) -> str:
        return str(self.snapshot().health["status"])

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        self.left = True


@contextmanager
def warm_server(
    folder: Path, *, ops: ReferenceOps | None = None, backend: EagerBackend | None = None, **fields: Any
) -> Iterator[tuple[Running, Watched]]:
    """Entered as soon as the port answers: the boot goes on behind it. `fields` are EngineConfig's.

    By default 12 shapes: rows 1, 2, 4; widths 16, 32, 48, 64.
    """
    defaults = {"device": "cpu", "max_sequences": 4, "max_model_len": 64, "block_size": 4, "width_multiple": 16}
    config = EngineConfig(model=str(folder), threads=1, **{**defaults, "self_test_seconds": 30.0, **fields})
    metrics = Metrics("test")

    def boot(report: Report) -> Booted:
        engine.booted = build_engine(config, metrics, report, bar=False, ops=ops, backend=backend)
        return engine.booted

    engine = Watched(boot, metrics, model_names=("tiny",), version="test")
    with serving(cast(Any, engine), ready=False) as running:
        yield running, engine
