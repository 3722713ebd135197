"""A scripted engine behind `server.seam`: no model, no torch, and everything it was asked for on record.

`ScriptedEngine.script` decides what a request's choices say; the rest (stages, queue, drain, aborts, live events)
follows the seam's promises, so that server tests and the page's tests meet the behaviour of the product.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanoserve.errors import ClientError, Draining, EngineFailed, NanoserveError, NotReady, QueueFull
from nanoserve.metrics import Metrics, StepRecord
from nanoserve.request import (
    ChatPrompt,
    Delta,
    Finished,
    FinishReason,
    GraphUse,
    Request,
    Timings,
    TokenLogprob,
    TokenPrompt,
    Usage,
)

VOCABULARY = 1000
WORDS = ["The", "capital", "of", "France", "is", "Paris", ",", "a", "city", "on", "the", "river", "Seine", "."]


@dataclass(frozen=True)
class Script:
    """What each choice says: tokens (text pieces), seconds between them, and how it ends. `fail_after` raises the
    engine's in-band failure after so many tokens; `queue_seconds` is spent before the first."""

    tokens: tuple[str, ...] = tuple(f"{word} " for word in WORDS)
    delay: float = 0.0
    finish: FinishReason = "stop"
    fail_after: int | None = None
    queue_seconds: float = 0.0


@dataclass
class ScriptedSnapshot:
    health: dict[str, Any]
    metrics: dict[str, Any]
    model_names: tuple[str, ...]
    max_model_len: int | None
    created: int
    sampling_defaults: Mapping[str, float]


class ScriptedGeneration:
    def __init__(self, request: Request, prompt_tokens: int) -> None:
        self.request_id = request.request_id
        self.prompt_tokens = prompt_tokens
        self.request = request
        self.ended_as: FinishReason | None = None
        self.task: asyncio.Task[None] | None = None
        self._deltas: dict[int, Delta] = {}
        self._ready = asyncio.Event()

    def put(self, delta: Delta) -> None:
        old = self._deltas.get(delta.index)
        if old is not None:
            delta = replace(
                delta,
                text=old.text + delta.text,
                token_ids=old.token_ids + delta.token_ids,
                logprobs=old.logprobs + delta.logprobs,
            )
        self._deltas[delta.index] = delta
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            # A finished delta goes last, whatever its index, when several choices wait.
            waiting = sorted(self._deltas.values(), key=lambda delta: delta.finished is not None)
            self._deltas = {}
            for delta in waiting:
                yield delta
                if delta.finished is not None:
                    return


@dataclass
class Boot:
    """Stages of a scripted boot as (stage, done, total, eta_seconds) with the seconds each lasts."""

    stages: Sequence[tuple[str, int, int, float | None]] = ()
    seconds: float = 0.0
    failure: tuple[str, int] | None = None


@dataclass
class ScriptedEngine:
    """`aborted` lists ids ended by `abort`; `requests` lists all accepted ones, in order."""

    script: Callable[[Request], Script] = lambda request: Script()
    boot: Boot = field(default_factory=Boot)
    names: tuple[str, ...] = ("scripted",)
    max_model_len: int = 2048
    max_running: int = 8
    max_queued: int = 1024
    defaults: Mapping[str, float] = field(default_factory=dict)
    submit_error: Exception | None = None
    abort_works: bool = True
    event_seconds: float = 0.1

    def __post_init__(self) -> None:
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.running: dict[str, ScriptedGeneration] = {}
        self.entered = self.left = False
        self.drains: list[float] = []
        self.subscribers = 0
        self.metrics = Metrics("0.0-test")
        self.metrics.gauges.blocks_total, self.metrics.gauges.blocks_used = 512, 0
        self.metrics.gauges.block_size = 16
        self._stage: dict[str, Any] = {"stage": "starting", "done": 0, "total": 0, "eta_seconds": None}
        self._changed = asyncio.Event()
        self._boot_task: asyncio.Task[None] | None = None
        self._created = int(time.time())

    # --- life

    async def __aenter__(self) -> ScriptedEngine:
        self.entered = True
        self._boot_task = asyncio.create_task(self._run_boot())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.left = True
        tasks = [generation.task for generation in self.running.values() if generation.task is not None]
        tasks += [self._boot_task] if self._boot_task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_boot(self) -> None:
        for stage, done, total, eta in self.boot.stages:
            self.set_stage(stage, done, total, eta)
            await asyncio.sleep(self.boot.seconds)
        if self.boot.failure is not None:
            message, code = self.boot.failure
            self.set_stage("failed", message=message, exit_code=code)
        else:
            self.set_stage("ready")

    def set_stage(self, stage: str, done: int = 0, total: int = 0, eta: float | None = None, **more: Any) -> None:
        self._stage = {"stage": stage, "done": done, "total": total, "eta_seconds": eta, **more}
        self._changed.set()
        self._changed = asyncio.Event()

    async def reached(self, stage: str) -> None:
        while self.stage != stage:
            await self._changed.wait()

    @property
    def stage(self) -> str:
        return str(self._stage["stage"])

    # --- the five methods

    async def submit(self, request: Request) -> ScriptedGeneration:
        await asyncio.sleep(0)
        refusal = self._refusal(request)
        if refusal is not None:
            self.metrics.counters.rejected += 1
            raise refusal
        generation = ScriptedGeneration(request, self._prompt_tokens(request))
        self.requests.append(request)
        self.running[request.request_id] = generation
        generation.task = asyncio.create_task(self._generate(generation))
        return generation

    def _refusal(self, request: Request) -> NanoserveError | Exception | None:
        if self.submit_error is not None:
            return self.submit_error
        if self.stage == "draining":
            return Draining("the server is shutting down; try another one")
        if self.stage == "failed":
            return EngineFailed("the engine has failed; restart the server")
        if self.stage not in ("ready", "degraded"):
            return NotReady("the model is loading; try again", retry_after_seconds=self._stage["eta_seconds"] or 1.0)
        if len(self.running) >= self.max_queued:
            return QueueFull(
                f"{len(self.running)} requests wait; the limit is {self.max_queued}", retry_after_seconds=2
            )
        ids = list(request.params.stop_token_ids) + [key for key, _ in request.params.logit_bias]
        if isinstance(request.prompt, TokenPrompt):
            ids += request.prompt.token_ids
        bad = [token for token in ids if not 0 <= token < VOCABULARY]
        if bad:
            return ClientError(f"token id {bad[0]} is outside the vocabulary of {VOCABULARY}", param="prompt")
        return None

    @staticmethod
    def _prompt_tokens(request: Request) -> int:
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            return sum(len(message["content"].split()) + 4 for message in prompt.messages)
        return len(prompt.token_ids) if isinstance(prompt, TokenPrompt) else max(1, len(prompt.text.split()))

    def abort(self, request_id: str) -> None:
        generation = self.running.get(request_id)
        if generation is not None and self.abort_works:
            self.aborted.append(request_id)
            self.metrics.counters.aborted += 1
            self._end(generation, "cancelled")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        self.subscribers += 1
        try:
            while True:
                stage, changed = self._stage, self._changed
                yield {"type": "boot", **stage}
                while stage is self._stage:
                    self._refresh()
                    if stage["stage"] in ("ready", "degraded", "draining"):
                        yield {"type": "steps", **self.metrics.take_steps_event()}
                    try:
                        await asyncio.wait_for(changed.wait(), self.event_seconds)
                    except TimeoutError:
                        continue
        finally:
            self.subscribers -= 1

    def snapshot(self) -> ScriptedSnapshot:
        self._refresh()
        progress = {key: self._stage[key] for key in ("stage", "done", "total", "eta_seconds")}
        health = {
            "status": self.stage,
            "ready": self.stage in ("ready", "degraded"),
            "version": "0.0-test",
            "model": self.names[0] if self.names else None,
            "progress": progress,
            "kv_pool": None,
            "warmup": None,
            "kernels": None,
        }
        return ScriptedSnapshot(
            health, self.metrics.snapshot(), self.names, self.max_model_len, self._created, self.defaults
        )

    async def drain(self, seconds: float) -> None:
        self.drains.append(seconds)
        self.set_stage("draining")
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline and seconds <= self.drains[-1]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for generation in list(self.running.values()):
            self._end(generation, "draining")

    # --- generating

    def _refresh(self) -> None:
        count = len(self.running)
        self.metrics.gauges.running = min(count, self.max_running)
        self.metrics.gauges.waiting = max(0, count - self.max_running)
        self.metrics.gauges.blocks_used = 12 * count

    async def _generate(self, generation: ScriptedGeneration) -> None:
        request, script = generation.request, self.script(generation.request)
        limit = request.params.max_tokens
        tokens = list(script.tokens)
        finish = script.finish
        if request.params.ignore_eos and limit is not None:
            tokens = (tokens * (limit // max(len(tokens), 1) + 1))[:limit]
        if limit is not None and (len(tokens) > limit or request.params.ignore_eos):
            tokens, finish = tokens[:limit], "length"
        await asyncio.sleep(script.queue_seconds)
        n = request.params.n
        for position, text in enumerate(tokens):
            await asyncio.sleep(script.delay)
            if script.fail_after == position:
                self._end(generation, "error", "the scripted step raised")
                return
            self._record_step(position)
            last = position == len(tokens) - 1
            for index in range(n):
                if not (last and index == n - 1):
                    generation.put(self._delta(request, index, position, text, finish if last else None))
        if tokens:
            end = self._delta(request, n - 1, len(tokens) - 1, tokens[-1], finish)
            self._finish(generation, end, (finish,) * n, len(tokens) * n)
        else:
            for index in range(n - 1):
                generation.put(Delta(index, "", finish_reason=finish))
            self._finish(generation, Delta(n - 1, "", finish_reason=finish), (finish,) * n, 0)

    def _record_step(self, position: int) -> None:
        real = max(1, min(len(self.running), self.max_running))
        rows = 1 << (real - 1).bit_length()
        width = 128 * (1 + position // 128)
        kind = "prefill" if position == 0 else "decode"
        seconds = 0.002 + 0.001 * rows * random.random()
        hit = kind == "decode"
        record = StepRecord(kind, rows, width if hit else None, real, rows - real, hit, hit, seconds, real, 0)
        self.metrics.record_step(record)
        self.metrics.counters.generated_tokens += 1

    def _delta(self, request: Request, index: int, position: int, text: str, reason: FinishReason | None) -> Delta:
        wanted = request.params.logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if wanted is not None:
            top = tuple(TokenLogprob(k, f"alt{k}", b"alt", float("-inf") if k else -0.5) for k in range(wanted))
            logprobs = (TokenLogprob(position, text, text.encode(), -0.25, top),)
        shown = f"{index}:{text}" if request.params.n > 1 else text
        return Delta(index, shown, (position,), logprobs, reason)

    def _finish(
        self,
        generation: ScriptedGeneration,
        delta: Delta,
        reasons: tuple[FinishReason, ...],
        completion_tokens: int,
        error: str | None = None,
    ) -> None:
        self.running.pop(generation.request_id, None)
        generation.ended_as = reasons[0]
        if reasons[0] != "cancelled":
            self.metrics.counters.finished += 1
        steps = max(1, completion_tokens // max(1, len(reasons)))
        finished = Finished(
            finish_reasons=reasons,
            usage=Usage(generation.prompt_tokens, completion_tokens),
            graph=GraphUse(steps, steps - 1, 1, 0.5),
            timings=Timings(0.001, 0.002, 0.003, 0.004),
            error=error,
        )
        generation.put(replace(delta, finished=finished))

    def _end(self, generation: ScriptedGeneration, reason: FinishReason, error: str | None = None) -> None:
        if generation.task is not None and generation.task is not asyncio.current_task():
            generation.task.cancel()
        n = generation.request.params.n
        for index in range(n - 1):
            generation.put(Delta(index, "", finish_reason=reason))
        self._finish(generation, Delta(n - 1, "", finish_reason=reason), (reason,) * n, 0, error)
