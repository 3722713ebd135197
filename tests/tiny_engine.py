"""The real engine on a tiny random model's folder, stepped by hand, and its answers token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoserve.boot import Booted, BootProgress
from nanoserve.build import build_engine
from nanoserve.config import EngineConfig
from nanoserve.memory import kv_bytes_per_token
from nanoserve.metrics import Metrics
from nanoserve.request import Request, SamplingParams, TokenPrompt
from nanoserve.sequence import NewToken, Sequence
from nanoserve.stepper import Stepper
from tests.engines import SlotLists, check_mirror

BYTES_PER_TOKEN = kv_bytes_per_token(num_layers=3, num_kv_heads=2, head_dim=16, itemsize=4)
BLOCK = 16


def tiny_config(folder: Path, *, blocks: int = 64, **fields: Any) -> EngineConfig:
    """A pool of `blocks` blocks; rows in buckets 1, 2, 4, 8; widths 32, 64 and 96; every gate on."""
    defaults: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "max_model_len": 96,
        "max_sequences": 8,
        "block_size": BLOCK,
        "width_multiple": 32,
        "max_step_rows": 64,
        "prefill_gap_seconds": float("inf"),  # chunks are cut by the clock otherwise
        "kv_memory_bytes": (blocks + 1) * BLOCK * BYTES_PER_TOKEN,
        "kernels": "reference",
        "warmup_seconds": 0.0,
        "paranoid": True,
        "threads": 1,
    }
    return EngineConfig(**(defaults | fields))


EAGER = {"capture_decode": False}
UNPADDED = {"capture_decode": False, "bucket_decode": False}
NATIVE = {"kernels": "native", "attention_read": "auto"}
BARE = {"capture_decode": False, "bucket_decode": False, "persist_inputs": False, "prefix_cache": False}


@dataclass
class Answer:
    """One choice's tokens; the model's own log-probability of each and the best ones' where they were asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def take(self, new: NewToken) -> None:
        self.tokens.append(new.token)
        if new.logprob is not None:
            self.logprobs.append(new.logprob)
            self.top.append(new.top)


@dataclass(frozen=True)
class Ask:
    """A prompt of token ids, its parameters, and the step before which it arrives."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at_step: int = 0
    cache_salt: str = ""
    priority: int = 0


class TinyEngine:
    """A built engine, stepped by hand; every step is checked. `ahead`: steps are planned and started while the one
    before runs, wherever that is possible; `ran_ahead` counts them."""

    def __init__(self, folder: Path, *, ahead: bool = False, **fields: Any) -> None:
        self.metrics = Metrics("test")
        self.booted: Booted = build_engine(tiny_config(folder, **fields), self.metrics, _ignore, bar=False)
        self.engine = self.booted.engine
        self.runner = self.engine.runner
        self.ran_ahead = 0
        self._stepper = Stepper(self.engine)
        self._ahead = ahead
        self._requests = 0

    def add(self, ask: Ask) -> list[Sequence]:
        self._requests += 1
        name, prompt = f"r{self._requests}", TokenPrompt(ask.prompt)
        request = Request(name, prompt, ask.params, priority=ask.priority, cache_salt=ask.cache_salt)
        sequences = self.booted.intake.sequences(request)
        for sequence in sequences:
            self.engine.add(sequence)
        return sequences

    def step(self) -> list[NewToken]:
        new = self._stepper.step(ahead=self._ahead)
        self.ran_ahead += self._stepper.is_ahead
        self.check()
        return new

    def check(self) -> None:
        self.engine.check()
        rows, width = self.runner.slots.shape
        table = SlotLists(rows, width, self.runner.slots.sink_slot)
        table.rows = self.runner.slots.read(range(rows), width=width).tolist()
        check_mirror(self.engine, table)

    def answers(self, asks: Iterable[Ask], *, limit: int = 3000) -> list[list[Answer]]:
        """What each request's choices answer; the pool is empty again afterwards."""
        waiting = list(enumerate(asks))
        found: dict[Sequence, Answer] = {}
        by_request: dict[int, list[Sequence]] = {}
        for step in range(limit):
            for index, ask in [pair for pair in waiting if pair[1].at_step <= step]:
                by_request[index] = self.add(ask)
                found |= {sequence: Answer() for sequence in by_request[index]}
            waiting = [pair for pair in waiting if pair[1].at_step > step]
            for new in self.step():
                found[new.sequence].take(new)
            if not waiting and not self.engine.scheduler.has_work:
                break
        else:
            raise AssertionError(f"{limit} steps and still work left")
        assert self.metrics.gauges.blocks_used == 0
        return [[found[sequence] for sequence in by_request[index]] for index in sorted(by_request)]

    def alone(self, asks: Iterable[Ask]) -> list[list[Answer]]:
        """Each request by itself, one after the other."""
        return [self.answers([replace(ask, at_step=0)])[0] for ask in asks]


def tokens_of(answers: list[list[Answer]]) -> list[list[list[int]]]:
    return [[answer.tokens for answer in choices] for choices in answers]


def close(ours: list[list[Answer]], theirs: list[list[Answer]], tolerance: float = 1e-4) -> bool:
    """Whether all log-probabilities agree within `tolerance`; False if lengths differ."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return all(
        len(a.logprobs) == len(b.logprobs)
        and all(abs(p - q) <= tolerance for p, q in zip(a.logprobs, b.logprobs, strict=True))
        for a, b in pairs
    )


def params_of(**fields: Any) -> SamplingParams:
    """Greedy, no early end, with log-probabilities."""
    defaults: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 3, "max_tokens": 12}
    return SamplingParams(**{**defaults, **fields})


def _ignore(progress: BootProgress) -> None:
    """Nobody watches."""
