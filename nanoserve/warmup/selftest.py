"""The padding self-test: does a row's answer change when pad rows stand beside it, and do pad rows leave a trace?

Runs at the end of the warm-up, on the graphs that will serve: a short made-up prompt in table row 0, one token decoded
alone, then the same token padded into each row bucket. Bodies are compared by the last attention they leave, heads
of either kind by their logits. Bounded in seconds, since it must not delay the door for long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoserve.buckets import PagedShapes, Shape, ShapeSet
from nanoserve.cache import BatchedPagedKVCache
from nanoserve.errors import GateError
from nanoserve.warmup.gates import check_warm_touches_nothing

PROMPT_TOKENS = 5
WATCHED_SLOTS = 128
RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Of the largest logit: what other summation orders of the same product may differ by."""
WIDEST_TOLERANCE = max(RELATIVE_TOLERANCE.values())


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """verdict is passed, failed or skipped (no time, or nothing to compare).

    max_difference  largest difference of a logit or attention between alone and padded, over the largest; None if
                    there is none, because one is not finite
    rows            the row buckets compared with the row alone
    """

    verdict: str
    rows: tuple[int, ...]
    max_difference: float | None
    seconds: float
    reason: str | None = None

    def summary(self) -> dict[str, Any]:
        return asdict(self)


class Prober(Protocol):
    """What the self-test drives: the runner, with a sequence of the test's own."""

    @property
    def cache(self) -> BatchedPagedKVCache: ...

    def probe_prefill(self, token_ids: list[int], slots: list[int]) -> None:
        """Compute a prompt into table row 0."""

    def probe_decode(self, shape: Any, slots: list[int]) -> Tensor:
        """What the graph of `shape` leaves for table row 0's next token: logits `[vocab]`, or the last attention of
        a body. `slots` are all the row's slots, the last one that of the token which goes in. A head reads what the
        last body left."""

    def probe_end(self) -> None:
        """Forget the prompt."""


def padding_self_test(
    prober: Prober,
    shapes: ShapeSet | PagedShapes,
    covered: Callable[[Shape], bool],
    *,
    slots: list[int],
    vocab_size: int,
    seconds: float,
    clock: Callable[[], float] = perf_counter,
) -> SelfTestReport:
    """Compare one row alone with the same row in every covered row bucket, at the narrowest width.

    `slots` are PROMPT_TOKENS + 1 free slots of the pool; what they hold afterwards belongs to nobody.
    """
    started = clock()
    buckets: list[Shape] = [s for s in shapes.padding_shapes() if covered(s) and s not in shapes.alone]

    def verdict(name: str, rows: tuple[int, ...], worst: float | None, reason: str | None = None) -> SelfTestReport:
        return SelfTestReport(name, tuple(sorted(set(rows))), worst, clock() - started, reason)

    if seconds <= 0:
        return verdict("skipped", (), 0.0, "no time was given")
    lone: Shape = shapes.alone[0]
    narrow = lone.width is not None and lone.width <= PROMPT_TOKENS
    if not buckets or narrow or not all(covered(shape) for shape in shapes.alone):
        return verdict("skipped", (), 0.0, "there is no warm row bucket to compare a row alone with")
    compared: list[int] = []
    worst: float | None = 0.0
    try:
        prober.probe_prefill([i % vocab_size for i in range(1, PROMPT_TOKENS + 1)], slots[:PROMPT_TOKENS])
        alone = {shape: prober.probe_decode(shape, slots) for shape in shapes.alone}
        watch = _Watch(prober.cache, slots)
        for shape in buckets:
            if clock() - started > seconds:
                break
            worst = _worse(worst, alone[shapes.alone_like(shape)], prober.probe_decode(shape, slots))
            compared.append(shape.rows)
        watch.check()
    except GateError as error:
        return verdict("failed", tuple(compared), worst, str(error))
    finally:
        prober.probe_end()
    if not compared:
        return verdict("skipped", (), 0.0, f"{seconds:g} s were too few; raise --self-test-seconds")
    tolerance = RELATIVE_TOLERANCE.get(prober.cache.dtype, WIDEST_TOLERANCE)
    if worst is None:
        return verdict("failed", tuple(compared), None, "a row's logits are not finite")
    if worst > tolerance:
        reason = f"padding changes logits by {worst:.1e} of the largest; the limit is {tolerance:.1e}"
        return verdict("failed", tuple(compared), worst, reason)
    return verdict("passed", tuple(compared), worst)


class _Watch:
    """K/V that no probe may change, at both ends of the pool: where an index that is off, or counts from the end, would
    write. It is marked, since what the warm-up wrote there already would not show when it is written again. The probed
    row's own slots are not: what it reads of them its logits tell."""

    @torch.inference_mode()
    def __init__(self, cache: BatchedPagedKVCache, own_slots: list[int]) -> None:
        ends = {*range(WATCHED_SLOTS), *range(cache.sink_slot - WATCHED_SLOTS, cache.sink_slot)} - {*own_slots}
        self._cache = cache
        self._slots = sorted(slot for slot in ends if 0 <= slot < cache.sink_slot)
        self._layers = sorted({0, cache.num_layers - 1})
        for layer in self._layers:
            k, v = cache.read(layer, self._slots)
            cache.write(layer, torch.tensor(self._slots, device=k.device), torch.ones_like(k), torch.ones_like(v))

    def check(self) -> None:
        """Raises GateError if a mark is gone."""
        for layer in self._layers:
            for side in self._cache.read(layer, self._slots):
                mark = torch.ones_like(side)
                check_warm_touches_nothing(mark, side, self._cache.sink_slot, slots=self._slots)


def _worse(worst: float | None, alone: Tensor, padded: Tensor) -> float | None:
    """The larger of `worst` and the largest difference over the largest number; None as soon as one is not finite,
    which no comparison of numbers would show."""
    if worst is None or not bool(alone.isfinite().all() and padded.isfinite().all()):
        return None
    scale = float(alone.abs().max()) or 1.0
    return max(worst, float((padded - alone).abs().max()) / scale)
