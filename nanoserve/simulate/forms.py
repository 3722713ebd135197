"""A step as the device meets it: which forwards over how many rows, and which graphs they replay. Integers only.

The two attention reads pad and split a StepPlan in different ways (`paged_runner`, `runner`); here is what that comes
to, without the numbers that only a device needs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from nanoserve.buckets import GraphKey, PagedShapes, ShapeSet, bucket_for
from nanoserve.sequence import StepPlan
from nanoserve.simulate.costs import Work

StepKind = Literal["decode", "prefill", "mixed"]


class Form(NamedTuple):
    """works      the step's forwards
    keys       graphs it replays; none where no graph is promised
    rows       lanes of the bucket it is padded to, of which `real_rows` are real
    """

    works: tuple[Work, ...]
    keys: tuple[GraphKey, ...]
    rows: int
    real_rows: int


class Former(Protocol):
    def form(self, plan: StepPlan) -> Form: ...


def kind_of(plan: StepPlan) -> StepKind:
    return ("mixed" if plan.chunks else "decode") if plan.decode else "prefill"


class PagedFormer:
    """One forward over all rows, one body and at most one head."""

    def __init__(self, *, max_sequences: int, max_step_rows: int, pads_compute: bool) -> None:
        shapes = PagedShapes.build(max_step_rows=max_step_rows, max_logit_rows=max_sequences)
        self._pads_compute = pads_compute
        self._rows, self._heads = shapes.row_ladder, shapes.head_ladder
        self._keys: dict[tuple[int, int], tuple[GraphKey, ...]] = {}

    def form(self, plan: StepPlan) -> Form:
        decoded = len(plan.decode)
        chunk_rows, chunk_context, ends = chunk_work(plan) if plan.chunks else (0, 0, 0)
        real, logits = decoded + chunk_rows, decoded + ends
        rows = bucket_for(real, self._rows)
        heads = bucket_for(logits, self._heads) if logits else 0
        keys = self._keys.get((rows, heads))
        if keys is None:
            body = GraphKey("body", rows, None)
            keys = self._keys[rows, heads] = (body, GraphKey("head", heads, None)) if heads else (body,)
        context = decode_context(plan)
        counted = (rows, heads) if self._pads_compute else (real, logits)
        return Form((Work(*counted, context, chunk_context),), keys, rows, real)


class RectangleFormer:
    """Decode rows in a `(rows, width)` shape that replays; prompt chunks in one eager forward of their own."""

    def __init__(self, *, max_sequences: int, max_model_len: int, width_multiple: int) -> None:
        self._shapes = ShapeSet.build(max_rows=max_sequences, max_width=max_model_len, width_multiple=width_multiple)

    def form(self, plan: StepPlan) -> Form:
        works: list[Work] = []
        keys: tuple[GraphKey, ...] = ()
        rows = real = 0
        if plan.decode:
            shape = self._shapes.shape_for(len(plan.decode), max(row.position for row in plan.decode) + 1)
            works.append(Work(shape.rows, shape.rows, shape.rows * shape.width, 0))
            keys = (GraphKey("decode", *shape),)
            rows, real = shape.rows, len(plan.decode)
        if plan.chunks:
            chunk_rows, context, ends = chunk_work(plan)
            works.append(Work(chunk_rows, ends, 0, context))
            if not plan.decode:
                rows = real = chunk_rows
        return Form(tuple(works), keys, rows, real)


def decode_context(plan: StepPlan) -> int:
    """Positions that the decode rows read: each one's own and all before it."""
    return sum([row.position for row in plan.decode]) + len(plan.decode)


def chunk_work(plan: StepPlan) -> tuple[int, int, int]:
    """(rows, positions they read, chunks after which a token is chosen)."""
    rows = context = ends = 0
    for chunk in plan.chunks:
        count = len(chunk.token_ids)
        rows += count
        context += count * chunk.start + count * (count + 1) // 2
        ends += chunk.last
    return rows, context, ends
