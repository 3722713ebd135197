"""Stepper: the step loop of a caller that waits for every step: the offline API, benchmarks.

Where steps run beside their caller, the one after the running one is planned and started before the running one's
tokens are taken, as in `AsyncEngine`: the compute threads go from one to the next without a gap.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

from nanoserve.engine import Engine
from nanoserve.sequence import NewToken, StepPlan


class StepEnds:
    """A pipe that a started step writes to at its end (`write_fd`); closed with its last reference, or by `close`."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """`settle` returns once no started step runs: one that did would write to whatever has the number next."""
        self._settle = settle
        self._read_fd, self.write_fd = os.pipe()

    def __del__(self) -> None:
        self.close()

    def wait(self) -> None:
        """Return once one more step has ended than this has returned for."""
        os.read(self._read_fd, 8)

    def forget(self) -> None:
        """Ends so far are waited for by nobody."""
        while select.select([self._read_fd], [], [], 0)[0]:
            os.read(self._read_fd, 64)

    def close(self) -> None:
        """A second call does nothing."""
        if self.write_fd >= 0:
            self._settle()
            os.close(self._read_fd)
            os.close(self.write_fd)
            self._read_fd = self.write_fd = -1


class Stepper:
    """Steps of one engine, for one thread. Nothing else may step it meanwhile, except between a `rest` and a `step`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ends = StepEnds(engine.settle) if engine.starts else None
        self._running: tuple[StepPlan, Any] | None = None

    def step(self, meanwhile: Callable[[StepPlan | None], None] | None = None, *, ahead: bool = True) -> list[NewToken]:
        """Run the next step; the tokens that count. Empty if there is nothing to do.

        meanwhile  called with the step's plan (None: there is none) before its tokens are taken; beside the step, where
                   steps run beside their caller
        ahead      whether the step after it may be started; the next call, or `rest`, then takes its tokens

        Raises what the engine or `meanwhile` raises; the step it fell into is then as if it had not been planned.
        """
        engine, ends = self._engine, self._ends
        try:
            running, self._running = self._running, None
            if running is None and (plan := engine.plan()) is not None and ends is not None:
                running = plan, engine.start(plan, ends.write_fd)
            elif running is not None:
                plan = running[0]
            if meanwhile is not None:
                meanwhile(plan)
            if plan is None:
                return []
            if running is None or ends is None:
                return engine.commit(plan, engine.launch(plan))
            if ahead and (following := engine.plan_ahead()) is not None:
                self._running = following, engine.start(following, ends.write_fd, ahead=True)
            ends.wait()
            return engine.commit(plan, engine.finish_step(running[1]))
        except BaseException:
            self._abandon()
            raise

    @property
    def is_ahead(self) -> bool:
        """Whether a step was started ahead and its tokens have not been taken."""
        return self._running is not None

    def rest(self) -> list[NewToken]:
        """End what was started ahead, so that no step is in flight; its tokens that count."""
        return self.step(ahead=False) if self.is_ahead else []

    def _abandon(self) -> None:
        self._running = None
        self._engine.settle()
        if self._ends is not None:
            self._ends.forget()
        self._engine.abandon()
