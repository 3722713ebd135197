"""What shapes cost, in graphs, seconds and bytes, before any is recorded. Integers and floats only.

The stall of recording lazily is a rate (one recording for each width bucket a run crosses), the warm list is a product
(row buckets times width buckets): only in the same unit, seconds, can one be weighed against the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from nanoserve.buckets import GraphKind, PagedShapes, Shape, ShapeSet, cells, key_of

FP32_BYTES = 4


def score_bytes(shape: Shape, *, num_heads: int, itemsize: int = FP32_BYTES) -> int:
    """Bytes of one layer's attention scores, the largest thing a rectangle graph allocates: rows * heads * width."""
    return shape.rows * num_heads * (shape.width or 0) * itemsize


def lazy_captures(*, steps: int, start_width: int, width_multiple: int) -> int:
    """Recordings that a run of `steps` decode steps makes if none was made before, with `start_width` tokens of context
    at its start: one for each width bucket it meets, ceil((s + n) / m) - floor(s / m)."""
    return -(-(start_width + steps) // width_multiple) - start_width // width_multiple


def stall_seconds(*, captures: int, seconds_per_graph: float) -> float:
    """What lazy recordings add to one client's latency."""
    return captures * seconds_per_graph


def warmup_seconds(*, graphs: int, seconds_per_graph: float) -> float:
    """What a warm list adds to the start-up."""
    return graphs * seconds_per_graph


def warm_budget_bytes(*, free_bytes: int, reserve_bytes: int = 0) -> int:
    """What recordings may take: what is free once weights and K/V pool are resident, less a reserve for eager steps."""
    return max(0, free_bytes - reserve_bytes)


def width_ceiling(*, rows: int, num_heads: int, budget_bytes: int, itemsize: int = FP32_BYTES) -> int:
    """The widest shape of `rows` rows whose scores fit the budget. A shared arena is as big as its biggest member, so a
    budget does not shorten the warm list, it caps the width."""
    return budget_bytes // (rows * num_heads * itemsize)


def pool_sharing_ratio(shapes: Iterable[Shape], *, num_heads: int) -> float:
    """Bytes of an arena for each shape over bytes of one shared by all; 1.0 for a single shape, 0.0 for none."""
    sizes = [score_bytes(shape, num_heads=num_heads) for shape in shapes]
    return sum(sizes) / max(sizes) if sizes else 0.0


def warm_shapes(
    shapes: ShapeSet | PagedShapes, *, max_rows: int | None = None, max_width: int | None = None
) -> tuple[Shape, ...]:
    """The bucket set as a capture list, trimmed on either axis, biggest first.

    Biggest first, because a shared arena is sized by its largest member: so it is allocated once, at its final size.
    """
    kept = [
        shape
        for shape in shapes.shapes()
        if (max_rows is None or shape.rows <= max_rows) and (max_width is None or (shape.width or 0) <= max_width)
    ]
    return biggest_first(kept)


def biggest_first(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    return tuple(sorted(shapes, key=lambda shape: (cells(shape), shape.rows), reverse=True))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds to record a shape: `base_seconds + cell_seconds * rows * width`.

    narrowing_seconds  to make a graph from one of its kind for more rows; None where each is recorded
    """

    base_seconds: float
    cell_seconds: float
    narrowing_seconds: float | None = None

    @classmethod
    def fit(cls, small: tuple[Shape, float], large: tuple[Shape, float]) -> CostModel:
        """The line through two timed shapes; never a negative slope or base, since a bigger shape is not cheaper."""
        (first, first_seconds), (second, second_seconds) = small, large
        step = cells(second) - cells(first)
        slope = max(0.0, (second_seconds - first_seconds) / step) if step else 0.0
        return cls(max(0.0, first_seconds - slope * cells(first)), slope)

    def seconds(self, shape: Shape) -> float:
        return self.base_seconds + self.cell_seconds * cells(shape)

    def further_seconds(self, shape: Shape, recorded: Collection[GraphKind]) -> float:
        """What `shape` costs where kinds of graphs are `recorded`, for more rows than it has."""
        if self.narrowing_seconds is not None and key_of(shape).kind in recorded:
            return self.narrowing_seconds
        return self.seconds(shape)

    def total_seconds(self, shapes: Iterable[Shape]) -> float:
        """What shapes cost in this order, the biggest first."""
        total, recorded = 0.0, set[GraphKind]()
        for shape in shapes:
            total += self.further_seconds(shape, recorded)
            recorded.add(key_of(shape).kind)
        return total
