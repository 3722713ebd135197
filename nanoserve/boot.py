"""What a boot is to those who wait for it: its progress while it runs, and what it leaves behind. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nanoserve.engine import Engine
    from nanoserve.intake import Intake

BootStage = Literal["starting", "loading", "warming", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class BootProgress:
    """`done` of `total` units of a stage (bytes loaded, graphs recorded); None where they are not known yet."""

    stage: BootStage
    done: int | None = None
    total: int | None = None
    eta_seconds: float | None = None


class Timeline:
    """Seconds of each stage of a boot, in order. A stage begins where the one before ended."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._at = clock()
        self.seconds: dict[str, float] = {}

    def end(self, stage: str) -> None:
        now = self._clock()
        self.seconds[stage] = now - self._at
        self._at = now

    def describe(self) -> str:
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in self.seconds.items())
        return f"booted in {sum(self.seconds.values()):.2f} s: {stages}"


Report = Callable[[BootProgress], None]


@dataclass(frozen=True, slots=True)
class Booted:
    """A finished boot.

    kv_pool       what was decided, JSON-ready, for /health
    weights       what they are and how many bytes, JSON-ready, for /health
    boot_seconds  of each stage, in order
    warmup        what was decided, done and is left to do, JSON-ready, as of the call; cheap
    degraded      why the engine serves less than it promises as of the call, or None
    close         called once when the engine ends
    """

    engine: Engine
    intake: Intake
    kernels: str
    kv_pool: dict[str, Any]
    weights: Mapping[str, Any] = field(default_factory=dict)
    boot_seconds: Mapping[str, float] = field(default_factory=dict)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    warmup: Callable[[], dict[str, Any]] = dict
    degraded: Callable[[], str | None] = lambda: None
    close: Callable[[], None] = lambda: None


Boot = Callable[[Report], Booted]
"""Build an engine, reporting on the way. Runs on the engine thread; imports torch."""
