"""The closed set of padded shapes, and a decode step planned into one of them. Integers only.

A shape is `(rows, width)`: rows of the batch and context positions read by each. Rows are padded up to a power of two
(or the maximum), widths up to a multiple. A pad row is inert by construction: it may attend to nothing (`context_lens`
0) and writes to the sink, so a plan may have any number of them, up to all (a warm-up).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

    def shape_for(self, rows: int, width: int) -> DecodeShape:
        return DecodeShape(bucket_for(rows, self.row_ladder), bucket_for(width, self.width_ladder))


@dataclass(frozen=True, slots=True)
class DecodeRow:
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


def pad_plan(shape: DecodeShape, sink_slot: int) -> DecodePlan:
    """The limit of a plan: `shape` with nothing but pad rows."""
    zeros = (0,) * shape.rows
    return DecodePlan(shape, (), shape.rows, zeros, zeros, (sink_slot,) * shape.rows, zeros)
