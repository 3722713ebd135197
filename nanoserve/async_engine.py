"""AsyncEngine: the step loop as a task on the event loop, and the five methods the server sees.

    submit, abort, events, snapshot, drain

Requests, scheduling and text live on the event loop; the engine thread computes. While step N computes, the loop
delivers the text of step N - 1, so a stop string found there costs its sequence one discarded token at most. Boots the
engine on the engine thread, behind a port that is already open. Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nanoserve.admission import Admission, Limits
from nanoserve.boot import Boot, Booted, BootProgress
from nanoserve.completion import Completion
from nanoserve.engine_thread import EngineThread
from nanoserve.errors import ClientError, Draining, EngineFailed, NotReady, QueueFull, StartupError
from nanoserve.live import LiveFeed
from nanoserve.metrics import Metrics
from nanoserve.output import OutputProcessor
from nanoserve.request import Delta, FinishReason, Request
from nanoserve.sequence import NewToken, Sequence, StepPlan
from nanoserve.stream import RequestStream

if TYPE_CHECKING:
    from nanoserve.engine import Engine

log = logging.getLogger("nanoserve")
TICK_SECONDS = 0.1
IDLE_TICK_SECONDS = 1.0
PLAN_AHEAD_AT = 0.7
"""Of a step's expected duration: what is left is for planning the next one."""
SLOWER = 1.1
"""How many times as long as the one before it a step is expected to take at most."""
STUCK_SECONDS = 120.0
"""A step or a recording that takes longer makes the engine unready; no shape of a supported model takes so long."""


def expect(expected: float, took: float) -> float:
    """Seconds of the step after one that was expected to take `expected` (0: nothing was known) and `took`. One slow
    step must not let the next ones end before they are followed."""
    return min(took, expected * SLOWER or took)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """See `server.seam.Snapshot`. The two documents are made when they are read: every request takes a snapshot, and
    few read them."""

    model_names: tuple[str, ...]
    max_model_len: int | None
    created: int
    sampling_defaults: Mapping[str, float]
    make_health: Callable[[], dict[str, Any]]
    make_metrics: Callable[[], dict[str, Any]]

    @property
    def health(self) -> dict[str, Any]:
        return self.make_health()

    @property
    def metrics(self) -> dict[str, Any]:
        return self.make_metrics()


class AsyncEngine:
    """Enter it to boot and serve, leave it to stop; both return at once. All methods belong to the event loop.

    boot         builds the engine, on the engine thread
    model_names  the names a request may use, the first being the reported one
    """

    def __init__(
        self, boot: Boot, metrics: Metrics, *, model_names: tuple[str, ...], version: str, limits: Limits | None = None
    ) -> None:
        self._boot = boot
        self._metrics = metrics
        self._model_names = model_names
        self._version = version
        self._limits = limits or Limits()
        self._admission = Admission(self._limits, metrics)
        self._created = int(time.time())
        self._feed = LiveFeed()
        self._progress = BootProgress("starting")
        self._booted: Booted | None = None
        self._outputs: OutputProcessor | None = None
        self._failure: str | None = None
        self._exit_code: int | None = None
        self._draining = False
        self._drain_until = float("inf")
        self._wake = asyncio.Event()
        self._busy_since: float | None = None
        self._timeouts: dict[str, asyncio.TimerHandle] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._thread: EngineThread | None = None
        self._reader: EngineThread | None = None

    async def __aenter__(self) -> AsyncEngine:
        self._thread = EngineThread()
        self._reader = EngineThread("nanoserve-intake")
        self._tasks = [asyncio.create_task(self._live(self._thread)), asyncio.create_task(self._tick())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._outputs is not None:
            self._outputs.end_all("draining")
        self._feed.close()
        if self._booted is not None:
            self._booted.close()
        for thread in (self._thread, self._reader):
            if thread is not None:
                thread.stop()

    # --- the five ------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> RequestStream:
        """See `server.seam.Engine.submit`."""
        booted, _ = self._require_ready()
        submitted_at = time.monotonic()
        try:
            sequences = await self._sequences(booted, request)
            _, outputs = self._require_ready()  # a long prompt took its time
            self._admission.check(booted.engine.scheduler, sequences)
        except (ClientError, QueueFull):
            self._metrics.counters.rejected += 1
            raise
        stream = RequestStream(request.request_id, sequences[0].prompt_tokens)

        def sink(delta: Delta) -> None:
            stream.push(delta)
            if delta.finished is not None:
                self._forget_timeout(request.request_id)

        outputs.open(request, sequences, sink, submitted_at)
        for sequence in sequences:
            booted.engine.add(sequence)
        timeout = request.timeout_seconds
        if timeout is None:
            timeout = self._limits.request_timeout_seconds
        if timeout is not None:
            left = max(0.0, submitted_at + timeout - time.monotonic())
            self._timeouts[request.request_id] = asyncio.get_running_loop().call_later(
                left, self._end, request.request_id, "timeout"
            )
        self._wake.set()
        return stream

    def abort(self, request_id: str) -> None:
        """See `server.seam.Engine.abort`."""
        self._end(request_id, "cancelled")

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """See `server.seam.Engine.events`."""
        if not self._feed.has_subscribers:
            self._metrics.take_steps_event()  # what happened while nobody watched is not news
        return self._feed.subscribe(self._boot_event())

    def snapshot(self) -> Snapshot:
        """See `server.seam.Engine.snapshot`."""
        booted = self._booted
        return Snapshot(
            model_names=self._model_names,
            max_model_len=booted.intake.max_model_len if booted else None,
            created=self._created,
            sampling_defaults=booted.sampling_defaults if booted else {},
            make_health=self._health,
            make_metrics=self._metrics.snapshot,
        )

    async def drain(self, seconds: float) -> None:
        """See `server.seam.Engine.drain`."""
        self._drain_until = min(self._drain_until, time.monotonic() + seconds)
        if not self._draining:
            self._draining = True
            self._feed.publish(self._boot_event())
        outputs = self._outputs
        if outputs is None:
            return
        # Polled, because a later call may bring the deadline forward.
        while outputs.open_requests and time.monotonic() < self._drain_until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        outputs.end_all("draining")

    def _health(self) -> dict[str, Any]:
        booted = self._booted
        status = self._status()
        return {
            "status": status,
            "ready": status in ("ready", "degraded"),
            "version": self._version,
            "model": self._model_names[0],
            "message": self._failure or (booted.degraded() if booted else None),
            "progress": asdict(self._progress),
            "kv_pool": booted.kv_pool if booted else None,
            "warmup": booted.warmup() if booted else None,
            "kernels": booted.kernels if booted else None,
            "weights": booted.weights if booted else None,
            "boot_seconds": booted.boot_seconds if booted else None,
        }

    # --- admission -----------------------------------------------------------------------------------------

    async def _sequences(self, booted: Booted, request: Request) -> list[Sequence]:
        """Read the prompt; a long one on a thread of its own, since its seconds would be everybody's. Meanwhile its
        choices count as waiting."""
        intake, admission, choices = booted.intake, self._admission, request.params.n
        if self._reader is None or not intake.is_long(request.prompt):
            return intake.sequences(request)
        admission.check_coming(booted.engine.scheduler, choices)
        admission.coming += choices
        try:
            return await self._reader.submit(intake.sequences, request)
        finally:
            admission.coming -= choices

    def _require_ready(self) -> tuple[Booted, OutputProcessor]:
        if self._failure is not None:
            raise EngineFailed(f"the engine has failed: {self._failure}; restart the server")
        if self._draining:
            raise Draining("the server is shutting down; send the request to another one", retry_after_seconds=5)
        if self._booted is None or self._outputs is None:
            progress = self._progress
            done = f", {progress.done} of {progress.total}" if progress.total else ""
            raise NotReady(
                f"the model is not ready (stage {progress.stage}{done}); wait until /health is 200",
                retry_after_seconds=progress.eta_seconds or 2,
            )
        return self._booted, self._outputs

    def _end(self, request_id: str, reason: FinishReason) -> None:
        if self._outputs is not None and request_id in self._outputs:
            self._outputs.end(request_id, reason)
            self._wake.set()

    def _forget_timeout(self, request_id: str) -> None:
        if (handle := self._timeouts.pop(request_id, None)) is not None:
            handle.cancel()

    # --- status and live events ------------------------------------------------------------------------------

    def _status(self) -> str:
        if self._failure is not None or self._stuck():
            return "failed"
        if self._draining:
            return "draining"
        if self._booted is None:
            return self._progress.stage
        return "degraded" if self._booted.degraded() else "ready"

    def _stuck(self) -> bool:
        return self._busy_since is not None and time.monotonic() - self._busy_since > STUCK_SECONDS

    def _boot_event(self) -> dict[str, Any]:
        event: dict[str, Any] = {"type": "boot", **asdict(self._progress)}
        if self._failure is not None:
            event["message"] = self._failure
            if self._exit_code is not None:
                event["exit_code"] = self._exit_code
        elif self._draining:
            event["stage"] = "draining"
        elif self._booted is not None and self._booted.degraded():
            event["stage"] = "degraded"
        return event

    def _report(self, progress: BootProgress) -> None:
        self._progress = progress
        self._feed.publish(self._boot_event())

    async def _tick(self) -> None:
        """Publish what the steps since the last event were: ten times a second at most, once when idle."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            due = now - last >= IDLE_TICK_SECONDS or self._metrics.has_untold_steps
            if self._booted is not None and self._feed.has_subscribers and due:
                self._feed.publish({"type": "steps", **self._metrics.take_steps_event()})
                last = now

    # --- boot and the step loop ------------------------------------------------------------------------------

    async def _live(self, thread: EngineThread) -> None:
        def report(progress: BootProgress) -> None:
            thread.call_soon(self._report, progress)

        try:
            booted = await thread.submit(self._boot, report)
        except StartupError as error:
            self._fail(str(error), exit_code=error.exit_code)
            return
        except Exception as error:
            log.exception("the boot failed")
            self._fail(f"{type(error).__name__}: {error}", exit_code=1)
            return
        self._outputs = OutputProcessor(booted.intake.tokenizer, booted.engine.finish, self._metrics)
        self._booted = booted
        self._report(BootProgress("ready"))
        try:
            await self._run_steps(thread, booted, self._outputs)
        except Exception as error:
            log.exception("a step failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, message: str, *, exit_code: int | None = None) -> None:
        """Tell everyone who waits, and serve nothing from here on."""
        self._failure = message
        self._progress = BootProgress("failed")
        if self._outputs is not None:
            self._outputs.end_all("error", message)
        if self._booted is not None:
            self._booted.engine.abandon()
        self._exit_code = exit_code
        self._feed.publish(self._boot_event())

    async def _run_steps(self, thread: EngineThread, booted: Booted, outputs: OutputProcessor) -> None:
        completion = Completion()
        try:
            await self._step_for_ever(thread, completion, booted.engine, outputs)
        finally:
            booted.engine.settle()  # a step that still runs would write to a descriptor that is somebody else's by then
            completion.close()

    async def _step_for_ever(
        self, thread: EngineThread, completion: Completion, engine: Engine, outputs: OutputProcessor
    ) -> None:
        undelivered: list[NewToken] = []
        while True:
            plan = engine.plan()
            if plan is None:
                outputs.deliver(undelivered)
                undelivered = []
                assert not engine.scheduler.has_work, "sequences wait, and nothing runs that could make room for them"
                if engine.background:
                    # One at a time, so that a request that comes now waits for one recording at most.
                    self._busy_since = time.monotonic()
                    await thread.submit(engine.capture_in_background)
                    self._busy_since = None
                    continue
                self._wake.clear()
                await self._wake.wait()
                continue
            outputs.scheduled(plan.chunk_sequences)
            if engine.starts:
                undelivered = await self._run_beside(completion, engine, outputs, plan, undelivered)
                continue
            self._busy_since = time.monotonic()
            step = thread.submit(engine.launch, plan)
            outputs.deliver(undelivered)
            outcome = await step
            self._busy_since = None
            undelivered = engine.commit(plan, outcome)

    async def _run_beside(
        self,
        completion: Completion,
        engine: Engine,
        outputs: OutputProcessor,
        plan: StepPlan,
        undelivered: list[NewToken],
    ) -> list[NewToken]:
        """Run a step, and those that can follow it without a gap; the tokens of the last one.

        The compute threads are not Python's: no hop to another thread, and none to compete for the GIL. The next step
        is planned late in this one, so that a request that comes meanwhile is in it."""
        started, expected = engine.start(plan, completion.write_fd), 0.0
        while True:
            self._busy_since = time.monotonic()
            outputs.deliver(undelivered)
            following = following_started = None
            ended = await completion.wait(PLAN_AHEAD_AT * expected)
            if not ended:
                if (following := engine.plan_ahead()) is not None:
                    following_started = engine.start(following, completion.write_fd, ahead=True)
                await completion.wait()
            outcome = engine.finish_step(started)
            undelivered = engine.commit(plan, outcome)
            self._busy_since = None
            if following is None:
                return undelivered
            plan, started, expected = following, following_started, expect(expected, outcome.seconds)
