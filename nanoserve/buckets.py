"""The closed set of padded shapes, and a decode step planned into one of them. Integers only.

A shape is `(rows, width)`: rows of the batch and context positions read by each. Rows are padded up to a power of two
(or the maximum), widths up to a multiple. A pad row is inert by construction: it may attend to nothing (`context_lens`
0) and writes to the sink, so a plan may have any number of them, up to all (a warm-up).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nanoserve.errors import ConfigError

LAST_TOKEN = -1
"""As an input id: whatever the table row's newest token is when the step runs."""


class DecodeShape(NamedTuple):
    rows: int
    width: int


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, … below `max_rows`, and `max_rows` itself, on or off the ladder."""
    if max_rows < 1:
        raise ConfigError(f"the most rows of a step is {max_rows}; it must be at least 1; raise --max-sequences")
    ladder = []
    rows = 1
    while rows < max_rows:
        ladder.append(rows)
        rows *= 2
    return (*ladder, max_rows)


def width_buckets(max_width: int, multiple: int) -> tuple[int, ...]:
    """Every multiple of `multiple`, the last being the first that reaches `max_width`."""
    if multiple < 1:
        raise ConfigError(f"the width multiple is {multiple}; it must be at least 1; raise --width-multiple")
    return tuple(range(multiple, max_width + multiple, multiple))


def bucket_for(value: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `value`. Raises IndexError above the largest."""
    return buckets[bisect_left(buckets, value)]


GraphKind = Literal["decode", "body", "head", "head_full"]


class GraphKey(NamedTuple):
    """What a graph is for: a decode step of the rectangle read, or the body or the head of any step of the paged read,
    whose `width` is None. `head_full` is the head of a step in which a row's choice takes more than its logits."""

    kind: GraphKind
    rows: int
    width: int | None


Shape = DecodeShape | GraphKey
"""A member of a closed set: `DecodeShape` where all have a width, `GraphKey` where none has."""


def key_of(shape: Shape) -> GraphKey:
    return shape if isinstance(shape, GraphKey) else GraphKey("decode", *shape)


def cells(shape: Shape) -> int:
    """What a shape's cost grows with: rows times the positions each one reads, or rows where that is not fixed."""
    return shape.rows * (shape.width or 1)


@dataclass(frozen=True, slots=True)
class ShapeSet:
    """Every shape a decode step may take: `row_ladder` × `width_ladder`, both ascending."""

    row_ladder: tuple[int, ...]
    width_ladder: tuple[int, ...]

    @classmethod
    def build(cls, *, max_rows: int, max_width: int, width_multiple: int) -> ShapeSet:
        return cls(row_buckets(max_rows), width_buckets(max_width, width_multiple))

    def shapes(self) -> list[DecodeShape]:
        return [DecodeShape(rows, width) for rows in self.row_ladder for width in self.width_ladder]

    @property
    def alone(self) -> tuple[DecodeShape, ...]:
        """What a row by itself takes, the cheapest."""
        return (DecodeShape(1, self.width_ladder[0]),)

    def alone_like(self, shape: Shape) -> DecodeShape:
        """Which of `alone` computes what `shape` does."""
        return self.alone[0]

    def padding_shapes(self) -> list[DecodeShape]:
        """One shape for each row bucket, the cheapest."""
        return [DecodeShape(rows, self.width_ladder[0]) for rows in self.row_ladder]

    def shape_for(self, rows: int, width: int) -> DecodeShape:
        return DecodeShape(bucket_for(rows, self.row_ladder), bucket_for(width, self.width_ladder))


class DecodeRow(NamedTuple):
    """One sequence's part in a decode step: its newest token at `position`, whose K/V goes to `write_slot`.

    Which token that is, the device knows: the step that chose it left it in the table row's entry of `last_tokens`.
    """

    table_row: int
    position: int
    write_slot: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A decode step padded to `shape`. The per-row tuples have `shape.rows` entries, real rows first.

    `rows` are the table rows of the real rows: a prefix of the slot table, in order; pad rows follow. `input_ids` are
    `LAST_TOKEN` for real rows.
    """

    shape: DecodeShape
    rows: tuple[int, ...]
    pad_rows: int
    input_ids: tuple[int, ...]
    positions: tuple[int, ...]
    write_slots: tuple[int, ...]
    context_lens: tuple[int, ...]


def plan_decode(rows: Sequence[DecodeRow], shapes: ShapeSet | None, sink_slot: int) -> DecodePlan:
    """Pad `rows` to the smallest shape that holds them; with `shapes` None every batch keeps its own size.

    Raises IndexError if a row lies beyond the widest shape; an empty batch has no plan (see `pad_plan`).

    """
    real = len(rows)
    widest = max(row.position for row in rows) + 1
    shape = shapes.shape_for(real, widest) if shapes is not None else DecodeShape(real, widest)
    pad = shape.rows - real
    return DecodePlan(
        shape=shape,
        rows=tuple(row.table_row for row in rows),
        pad_rows=pad,
        input_ids=(*(LAST_TOKEN,) * real, *(0,) * pad),
        positions=(*(row.position for row in rows), *(0,) * pad),
        write_slots=(*(row.write_slot for row in rows), *(sink_slot,) * pad),
        context_lens=(*(row.position + 1 for row in rows), *(0,) * pad),
    )


# --- the paged read ------------------------------------------------------------------------------------------------


def step_buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, … 32, then four steps to each doubling, up to and including `max_rows`."""
    ladder = list(row_buckets(min(max_rows, 32)))
    while ladder[-1] < max_rows:
        ladder.append(min(ladder[-1] + max(8, 1 << (ladder[-1].bit_length() - 3)), max_rows))
    return tuple(ladder)


@dataclass(frozen=True, slots=True)
class PagedShapes:
    """The closed set of the paged read: bodies by step rows, heads of either kind by logit rows. A list, not a
    product."""

    row_ladder: tuple[int, ...]
    head_ladder: tuple[int, ...]

    @classmethod
    def build(cls, *, max_step_rows: int, max_logit_rows: int) -> PagedShapes:
        return cls(step_buckets(max_step_rows), row_buckets(max_logit_rows))

    def shapes(self) -> list[GraphKey]:
        bodies = [GraphKey("body", rows, None) for rows in self.row_ladder]
        heads = [GraphKey("head", rows, None) for rows in self.head_ladder]
        return bodies + heads + [GraphKey("head_full", rows, None) for rows in self.head_ladder]

    @property
    def alone(self) -> tuple[GraphKey, GraphKey]:
        """What a row by itself takes: a body and a head."""
        return GraphKey("body", 1, None), GraphKey("head", 1, None)

    def alone_like(self, shape: Shape) -> GraphKey:
        """Which of `alone` computes what `shape` does: a full head's logits are the plain one's."""
        body, head = self.alone
        return body if key_of(shape).kind == "body" else head

    def padding_shapes(self) -> list[GraphKey]:
        """Every one."""
        return self.shapes()


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step of any kind: decode rows, then the rows of prompt chunks, padded to a body bucket; and the rows after
    which a token is chosen, padded to a head bucket.

    The first five have `rows` entries, of which `real_rows` are real; `logit_rows` has `head_rows`, of which
    `real_logit_rows` are. A head bucket of 0 is a step that chooses nothing. A pad logit row names a step row that is
    never real: what is chosen for it goes where pad rows' tokens go, and becomes nobody's next input.
    """

    rows: int
    real_rows: int
    head_rows: int
    real_logit_rows: int
    input_ids: tuple[int, ...]
    positions: tuple[int, ...]
    write_slots: tuple[int, ...]
    context_lens: tuple[int, ...]
    table_rows: tuple[int, ...]
    logit_rows: tuple[int, ...]

    @property
    def pad_rows(self) -> int:
        return self.rows - self.real_rows


@dataclass(slots=True)
class StepRows:
    """A step's rows while they are collected."""

    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    write_slots: list[int] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)

    def add_decode(self, row: DecodeRow) -> None:
        self.logit_rows.append(len(self.input_ids))
        self.add((LAST_TOKEN,), row.position, (row.write_slot,), row.table_row)

    def add(self, token_ids: Sequence[int], start: int, write_slots: Sequence[int], table_row: int) -> None:
        """Consecutive positions of one sequence from `start` on."""
        self.input_ids += token_ids
        self.positions += range(start, start + len(token_ids))
        self.write_slots += write_slots
        self.table_rows += [table_row] * len(token_ids)


def plan_step(rows: StepRows, shapes: PagedShapes, *, sink_slot: int, pad_row: int) -> PagedPlan:
    """Pad collected rows to the smallest body and head that hold them. No rows at all is a warm-up's plan, for the
    smallest body. Raises IndexError beyond the largest."""
    real, logits = len(rows.input_ids), len(rows.logit_rows)
    bucket = bucket_for(real, shapes.row_ladder)
    head = bucket_for(logits, shapes.head_ladder) if logits else 0
    never_real = shapes.row_ladder[-1]  # one past the largest body: see `runners`, which make room for it
    return pad_step(rows, bucket, head, sink_slot=sink_slot, pad_row=pad_row, pad_logit_row=never_real)


def pad_step(
    rows: StepRows, bucket: int, head: int, *, sink_slot: int, pad_row: int, pad_logit_row: int = 0
) -> PagedPlan:
    """Pad collected rows, which may be none, to the given body and head. Without rows every step row is a pad row, and
    so the first one serves as `pad_logit_row`."""
    real, logits = len(rows.input_ids), len(rows.logit_rows)
    pad = bucket - real
    zeros = (0,) * pad
    return PagedPlan(
        rows=bucket,
        real_rows=real,
        head_rows=head,
        real_logit_rows=logits,
        input_ids=(*rows.input_ids, *zeros),
        positions=(*rows.positions, *zeros),
        write_slots=(*rows.write_slots, *(sink_slot,) * pad),
        context_lens=(*(position + 1 for position in rows.positions), *zeros),
        table_rows=(*rows.table_rows, *(pad_row,) * pad),
        logit_rows=(*rows.logit_rows, *(pad_logit_row,) * (head - logits)),
    )


def pad_plan(shape: DecodeShape, sink_slot: int) -> DecodePlan:
    """The limit of a plan: `shape` with nothing but pad rows."""
    zeros = (0,) * shape.rows
    return DecodePlan(shape, (), shape.rows, zeros, zeros, (sink_slot,) * shape.rows, zeros)
