"""Engines around tiny random models: the real parts, put together as the composition root does it.

Also kernel sets and graph backends that are slow or wrong on purpose, and schedules that look like traffic.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from nanoserve.backends import EagerBackend
from nanoserve.boot import BootProgress, Report
from nanoserve.buckets import DecodeShape
from nanoserve.build import assemble
from nanoserve.choices import choose
from nanoserve.config import EngineConfig
from nanoserve.engine import Engine
from nanoserve.graphs import GraphBackend
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.memory import KVPoolPlan
from nanoserve.metrics import Metrics
from nanoserve.models.load import LoadedModel, load_model
from nanoserve.ops import Rectangle
from nanoserve.readiness import ModelFacts, Readiness, make_ready
from nanoserve.request import SamplingParams
from nanoserve.runner import StepOutcome
from nanoserve.sequence import Sequence, StepPlan
from tests.engines import sequence_of
from tests.models.tiny import source_of, write_model

if TYPE_CHECKING:
    from nanoserve.ops import KVStore

T = TypeVar("T")
BLOCK = 4
FREE_BYTES = 1 << 30
GREEDY = SamplingParams(temperature=0.0)


@cache
def tiny_model(layers: int = 1, device: str = "cpu") -> LoadedModel:
    """A random Llama of 64 hidden units and 4 heads over 96 tokens, in fp32."""
    with TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "tiny", num_hidden_layers=layers)
        return load_model(source_of(path), device=device, bar=False)


@dataclass
class Tiny:
    """An engine that has not been warmed yet."""

    engine: Engine
    config: EngineConfig
    metrics: Metrics
    facts: ModelFacts
    reports: list[BootProgress] = field(default_factory=list)

    def ready(self, report: Report | None = None, *, free_bytes: int = FREE_BYTES) -> Readiness:
        """Warm as a boot does."""
        report = report or self.reports.append
        return make_ready(self.engine, self.config, self.facts, free_bytes, report, bar=False)

    def run(
        self, sequences: Iterable[Sequence], *, after: Callable[[StepPlan, StepOutcome], None] | None = None
    ) -> None:
        """Add the sequences and step until nothing runs."""
        for sequence in sequences:
            self.engine.add(sequence)
        while (plan := self.engine.plan()) is not None:
            outcome = self.engine.launch(plan)
            self.engine.commit(plan, outcome)
            if after is not None:
                after(plan, outcome)

    def graphs(self) -> dict[str, Any]:
        return dict(self.metrics.snapshot()["graphs"])


def tiny_engine(
    *,
    layers: int = 1,
    blocks: int | None = None,
    ops: ReferenceOps | None = None,
    backend: GraphBackend | None = None,
    **fields: Any,
) -> Tiny:
    """`fields` are EngineConfig's. `blocks` sizes the K/V pool; None: all that the table could ever use."""
    torch.set_num_threads(1)
    defaults = {"max_sequences": 4, "max_model_len": 64, "block_size": BLOCK, "width_multiple": 16, "paranoid": True}
    config = EngineConfig(**{"device": "cpu", "kernels": "reference", "self_test_seconds": 30.0, **defaults, **fields})
    model, metrics = tiny_model(layers, config.device), Metrics("test")
    assert config.max_model_len is not None
    assert config.max_sequences is not None
    num_blocks = blocks or config.max_sequences * -(-config.max_model_len // config.block_size)
    pool_plan = KVPoolPlan(
        num_blocks=num_blocks,
        block_size=config.block_size,
        bytes_per_token=model.config.kv_bytes_per_token(4),
        pool_bytes=(num_blocks + 1) * config.block_size * model.config.kv_bytes_per_token(4),
        free_bytes=FREE_BYTES,
        capacity_tokens=num_blocks * config.block_size,
        max_model_len=config.max_model_len,
        max_sequences=config.max_sequences,
        limited_by="the test",
    )
    choices = choose(config)
    engine = assemble(choices, model, pool_plan, metrics, ops=ops, backend=backend)
    facts = ModelFacts(model.config.num_attention_heads, model.config.vocab_size)
    return Tiny(engine, choices.config, metrics, facts)


def prompts(count: int, tokens: int, *, max_tokens: int, seed: int = 0, **options: Any) -> list[Sequence]:
    """`count` sequences with different prompts of `tokens` tokens."""
    rng = random.Random(seed)
    return [
        sequence_of(
            [rng.randrange(96) for _ in range(tokens)],
            **{"max_tokens": max_tokens, "params": GREEDY, "block_size": BLOCK, "request_id": f"r{i}", **options},
        )
        for i in range(count)
    ]


# --- kernel sets and backends that are slow or wrong -----------------------------------------------------------------


class SlowOps(ReferenceOps):
    """Reference kernels that take `base + cell * rows * width` seconds per layer while `recording`."""

    def __init__(self, base: float, cell: float) -> None:
        self.base, self.cell = base, cell
        self.recording = False

    def rectangle_attention(
        self, q: Tensor, store: KVStore, rectangle: Rectangle, *, scale: float, window: int | None
    ) -> Tensor:
        if self.recording:
            time.sleep(self.base + self.cell * rectangle.slots.numel())
        return super().rectangle_attention(q, store, rectangle, scale=scale, window=window)


class SlowBackend(EagerBackend):
    """Records as the eager backend does, after a call to `before`; `ops` are slow meanwhile."""

    def __init__(self, ops: SlowOps | None = None, before: Callable[[], None] = lambda: None) -> None:
        self._ops = ops
        self._before = before

    def record(self, program: Callable[[], T]) -> Callable[[], T]:
        self._before()
        if self._ops is None:
            return super().record(program)
        self._ops.recording = True
        try:
            return super().record(program)
        finally:
            self._ops.recording = False


class LeakyOps(ReferenceOps):
    """Kernels whose answer depends on how many rows a batch has."""

    def rectangle_attention(
        self, q: Tensor, store: KVStore, rectangle: Rectangle, *, scale: float, window: int | None
    ) -> Tensor:
        out = super().rectangle_attention(q, store, rectangle, scale=scale, window=window)
        return out + 0.1 * (q.shape[0] - 1)


class NanOps(LeakyOps):
    """Kernels whose padded batches hold NaN in every row."""

    def rectangle_attention(
        self, q: Tensor, store: KVStore, rectangle: Rectangle, *, scale: float, window: int | None
    ) -> Tensor:
        out = super().rectangle_attention(q, store, rectangle, scale=scale, window=window)
        return out * float("nan") if q.shape[0] > 1 else out


class StrayOps(ReferenceOps):
    """Kernels that write a pad row's K/V to slot -1, the pool's last one, as an index that means "none" would."""

    def __init__(self, sink_slot: int) -> None:
        self._sink_slot = sink_slot

    def write_kv(self, store: KVStore, slots: Tensor, k: Tensor, v: Tensor) -> None:
        stray = torch.where(slots == self._sink_slot, self._sink_slot - 1, slots)
        super().write_kv(store, stray, k, v)


# --- traffic ---------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What a schedule of requests did: tokens and end of each, shapes met, steps that decoded."""

    answers: dict[str, tuple[tuple[int, ...], str | None]]
    shapes: set[DecodeShape]
    decode_steps: int
    aborted: int


def traffic(tiny: Tiny, *, requests: int, seed: int, idle: Callable[[Engine], None] = lambda engine: None) -> Traffic:
    """Requests of all lengths and samplings join in bursts, finish, and are aborted before and inside steps. In a lull
    none joins until the last has ended.

    The schedule follows from `seed` and from the tokens alone. `idle` is called whenever nothing runs.
    """
    rng, engine = random.Random(seed), tiny.engine
    longest = tiny.config.max_model_len
    assert longest is not None
    made: list[Sequence] = []
    done = Traffic({}, set(), 0, 0)

    def abort_some() -> None:
        if rng.random() < 0.02 and (live := list(engine.scheduler.live())):
            engine.finish(rng.choice(live), "cancelled")
            done.aborted += 1

    lull = False
    while len(made) < requests or engine.scheduler.has_work:
        lull = engine.scheduler.has_work and (lull or rng.random() < 0.01)
        crowd = engine.scheduler.running + engine.scheduler.waiting
        if len(made) < requests and not lull and crowd < 3 * tiny.config.max_sequences and rng.random() < 0.4:
            for _ in range(min(rng.choice((1, 1, 2, 5)), requests - len(made))):
                made.append(_random_request(rng, f"r{len(made)}", longest))
                engine.add(made[-1])
        abort_some()
        plan = engine.plan()
        if plan is None:
            idle(engine)
            continue
        outcome = engine.launch(plan)
        abort_some()
        engine.commit(plan, outcome)
        if outcome.shape is not None:
            done.decode_steps += 1
            done.shapes.add(outcome.shape)
    done.answers.update({s.request_id: (tuple(s.output_ids), s.finish_reason) for s in made})
    return done


def _random_request(rng: random.Random, request_id: str, longest: int) -> Sequence:
    tokens = min(rng.choice((1, 2, 5, 9, 16, 17, 30, longest - 2)), longest - 1)
    room = longest - tokens
    params = rng.choice(
        (
            GREEDY,
            GREEDY,
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=0.7, top_k=10, top_p=0.9, min_p=0.01),
            SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2),
        )
    )
    return sequence_of(
        [rng.randrange(96) for _ in range(tokens)],
        max_tokens=min(rng.choice((1, 2, 3, 4, 8, 12, 20)), room),
        seed=rng.randrange(1 << 62),
        block_size=BLOCK,
        eos=frozenset({2}),
        request_id=request_id,
        params=params,
    )
