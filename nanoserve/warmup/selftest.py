"""The padding self-test: does a row's answer change when pad rows stand beside it, and do pad rows leave a trace?

Runs at the end of the warm-up, on the graphs that will serve: a short made-up prompt in table row 0, one token decoded
alone, then the same token padded into each row bucket. Bounded in seconds, since it must not delay the door for long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoserve.buckets import DecodeShape, ShapeSet
from nanoserve.cache import BatchedPagedKVCache
from nanoserve.errors import GateError
from nanoserve.warmup.gates import check_warm_touches_nothing

PROMPT_TOKENS = 5
RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Of the largest logit: what other summation orders of the same product may differ by."""


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """verdict is passed, failed or skipped (no time, or nothing to compare).

    max_difference  largest difference of a logit between alone and padded, over the largest logit
    rows            the row buckets compared with the row alone
    """

    verdict: str
    rows: tuple[int, ...]
    max_difference: float
    seconds: float
    reason: str | None = None

    def summary(self) -> dict[str, Any]:
        return asdict(self)


class Prober(Protocol):
    """What the self-test drives: the runner, with a sequence of the test's own."""

    cache: BatchedPagedKVCache

    def probe_prefill(self, token_ids: list[int], slots: list[int]) -> None:
        """Compute a prompt into table row 0."""

    def probe_decode(self, shape: DecodeShape, position: int, slot: int) -> Tensor:
        """Logits `[vocab]` of table row 0's next token in a batch padded to `shape`."""

    def probe_end(self) -> None:
        """Forget the prompt."""


def padding_self_test(
    prober: Prober,
    shapes: ShapeSet,
    covered: Callable[[DecodeShape], bool],
    *,
    slots: list[int],
    vocab_size: int,
    seconds: float,
    clock: Callable[[], float] = perf_counter,
) -> SelfTestReport:
    """Compare one row alone with the same row in every covered row bucket, at the narrowest width.

    `slots` are PROMPT_TOKENS + 1 free slots of the pool, which hold nothing afterwards.
    """
    started = clock()
    width = shapes.width_ladder[0]
    buckets = [DecodeShape(rows, width) for rows in shapes.row_ladder if covered(DecodeShape(rows, width))]
    if len(buckets) < 2 or seconds <= 0:
        reason = "no time was given" if seconds <= 0 else "there are not two warm row buckets to compare"
        return SelfTestReport("skipped", (), 0.0, clock() - started, reason)
    layers = sorted({0, prober.cache.num_layers - 1})
    compared: list[int] = []
    worst = 0.0
    try:
        prober.probe_prefill([i % vocab_size for i in range(1, PROMPT_TOKENS + 1)], slots[:PROMPT_TOKENS])
        position, slot = PROMPT_TOKENS, slots[PROMPT_TOKENS]
        alone = prober.probe_decode(buckets[0], position, slot)
        scale = float(alone.abs().max()) or 1.0
        tolerance = RELATIVE_TOLERANCE.get(prober.cache.dtype, 5e-2)
        for shape in buckets[1:]:
            if clock() - started > seconds:
                break
            before = [prober.cache.snapshot(layer) for layer in layers]
            padded = prober.probe_decode(shape, position, slot)
            for layer, (keys, values) in zip(layers, before, strict=True):
                for kept, now in zip((keys, values), prober.cache.snapshot(layer), strict=True):
                    kept[slot] = now[slot]  # the row's own write; equal up to the tolerance, compared by its logits
                    check_warm_touches_nothing(kept, now, prober.cache.sink_slot)
            compared.append(shape.rows)
            worst = max(worst, float((padded - alone).abs().max()) / scale)
    except GateError as error:
        return SelfTestReport("failed", tuple(compared), worst, clock() - started, str(error))
    finally:
        prober.probe_end()
    if worst > tolerance or worst != worst:
        reason = f"padding changes logits by {worst:.1e} of the largest; the limit is {tolerance:.1e}"
        return SelfTestReport("failed", tuple(compared), worst, clock() - started, reason)
    return SelfTestReport("passed", tuple(compared), worst, clock() - started)
