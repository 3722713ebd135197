"""Serving the same requests under different conditions, and what each answered, to the bit of every logit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoserve.boot import BootProgress
from nanoserve.buckets import GraphKey, PagedPlan
from nanoserve.build import build_engine
from nanoserve.config import EngineConfig
from nanoserve.engine import Engine
from nanoserve.graphs import GraphSet
from nanoserve.metrics import Metrics
from nanoserve.request import Request, SamplingParams, TokenPrompt
from nanoserve.sequence import Sequence
from nanoserve.source import resolve
from nanoserve.tokens import load_tokenizer

LICENSE = Path(__file__).parents[2] / "LICENSE"
PREEMPT_AFTER = 3
"""Generated tokens after which a preempted request is computed anew."""

Answer = list[tuple[int, str]]
"""Of every generated token: its id, and the digest of the logits it was chosen from."""


@dataclass(frozen=True)
class Case:
    """How requests are served: beside how many others, prompt tokens a step (beside a full batch), and so on."""

    neighbours: int = 0
    chunk: int = 512
    preempted: bool = False
    warmed: bool = False
    threads: int = 1

    def __str__(self) -> str:
        words = [f"{self.neighbours} neighbours", f"chunks of {self.chunk}", f"{self.threads} threads"]
        return ", ".join(words + ["preempted"] * self.preempted + ["warmed"] * self.warmed)


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    params: SamplingParams


def asks(path: Path, prompts: int, *, max_tokens: int = 6) -> list[Ask]:
    """Each of `prompts` stretches of the licence twice: greedy, and drawn with a seed. Their lengths meet the ends of
    K/V blocks and of the stretches an attention is split at, from both sides."""
    ids = list(load_tokenizer(resolve(str(path))).encode(LICENSE.read_text()))
    edges = (1, 129, 16, 65, 15, 17, 257, 64, 128, 256, 127, 255)
    made = []
    for n in range(prompts):
        length = edges[n] if n < len(edges) else 2 + n * n * 7 % 97
        start = n * 31 % (len(ids) - length)
        prompt = tuple(ids[start : start + length])
        drawn = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=n, ignore_eos=True, max_tokens=max_tokens)
        greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        made += [Ask(prompt, greedy), Ask(prompt, drawn)]
    return made


class Served:
    """An engine on the native kernels under a Case, stepped by hand."""

    def __init__(self, path: Path, case: Case) -> None:
        config = EngineConfig(
            model=str(path), device="cpu", kernels="native", max_model_len=512, max_sequences=case.neighbours + 1,
            max_step_rows=case.chunk + case.neighbours, threads=case.threads, self_test_seconds=0.0,
            warmup_seconds=None if case.warmed else 0.0, prefill_gap_seconds=float("inf"),
        )  # fmt: skip
        self.case = case
        self.booted = build_engine(config, Metrics("test"), _ignore, bar=False)
        self.engine: Engine = self.booted.engine
        self.tap = Tap(self.engine.runner.graphs)
        self.engine.runner.graphs = self.tap  # type: ignore[misc]
        self.preempted: set[Sequence] = set()
        self.most_running = 0
        self._added = 0

    def answers(self, asks: SequenceOf[Ask]) -> list[Answer]:
        """What each request was answered. While any runs, so many others do that it has its neighbours."""
        waiting, found, order = list(reversed(asks)), {}, []
        while waiting or any(sequence.finish_reason is None for sequence in order):
            while len(list(self.engine.scheduler.live())) <= self.case.neighbours:
                if waiting:
                    order.append(self._add(waiting.pop()))
                    found[order[-1]] = []
                else:
                    self._add(Ask((1 + self._added % 50,), SamplingParams(temperature=1.0, seed=1, max_tokens=9)))
            for sequence, token, digest in self._step(found):
                if sequence in found:
                    found[sequence].append((token, digest))
        for sequence in list(self.engine.scheduler.live()):
            self.engine.finish(sequence, "cancelled")
        return [found[sequence] for sequence in order]

    def _add(self, ask: Ask) -> Sequence:
        self._added += 1
        (made,) = self.booted.intake.sequences(Request(f"r{self._added}", TokenPrompt(ask.prompt), ask.params))
        self.engine.add(made)
        return made

    def _step(self, asked: dict[Sequence, Answer]) -> list[tuple[Sequence, int, str]]:
        plan = self.engine.plan()
        assert plan is not None
        if self.case.preempted:
            due = {s for s in plan.decode_sequences if s in asked and s.generated >= PREEMPT_AFTER} - self.preempted
            if 2 * len(due) > self.case.neighbours:
                self.preempted |= due
                self.engine.abandon()
                return []
        self.most_running = max(self.most_running, self.engine.scheduler.running)
        outcome = self.engine.launch(plan)
        self.engine.commit(plan, outcome)
        return [
            (new.sequence, new.token, hashlib.blake2b(row.numpy().tobytes(), digest_size=16).hexdigest())
            for new, row in zip(outcome.tokens, self.tap.logits, strict=True)
        ]


class Tap:
    """A GraphSet that shows the logits each step left behind, `[tokens, vocab]`."""

    def __init__(self, graphs: GraphSet[Any]) -> None:
        self._graphs = graphs
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphs, name)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def replay_step(self, keys: SequenceOf[GraphKey], plan: PagedPlan) -> list[Any]:
        outputs = self._graphs.replay_step(keys, plan)
        self.logits = list(outputs[-1].logits[: plan.real_logit_rows]) if plan.head_rows else []
        return outputs


def _ignore(progress: BootProgress) -> None:
    """Nobody watches."""
