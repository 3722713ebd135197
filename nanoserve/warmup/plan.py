"""WarmupPlan: which shapes will be recorded before the door opens, in what order, and what that will cost.

Made from four decisions that arrive from different places: what the scheduler can present, what the operator trims,
what the memory allows, and how many seconds the start-up may take. Integers and floats only; nothing is recorded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanoserve.buckets import GraphKind, PagedShapes, Shape, ShapeSet, key_of
from nanoserve.warmup.arithmetic import CostModel, biggest_first, score_bytes, warm_shapes, width_ceiling


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """shapes      to record at the start, in this order
    background  recorded after ready, in idle gaps, in this order: what the seconds budget left out
    trimmed     never recorded unasked: what the ceilings left out
    """

    shapes: tuple[Shape, ...]
    background: tuple[Shape, ...]
    trimmed: tuple[Shape, ...]
    row_ceiling: int
    width_ceiling: int | None
    predicted_seconds: float
    predicted_bytes: int
    budget_bytes: int
    budget_seconds: float | None

    @property
    def uncovered(self) -> tuple[Shape, ...]:
        """Shapes a step can have when the door opens that have no graph then."""
        return (*self.background, *self.trimmed)

    def describe(self) -> str:
        left = f", {len(self.background)} later in idle gaps" if self.background else ""
        cut = f", {len(self.trimmed)} trimmed" if self.trimmed else ""
        total = len(self.shapes) + len(self.uncovered)
        width = f", width <= {self.width_ceiling}" if self.width_ceiling is not None else ""
        return (
            f"warm-up: {len(self.shapes)} of {total} shapes (rows <= {self.row_ceiling}{width})"
            f"{left}{cut}; predicted {self.predicted_seconds:.1f} s and {self.predicted_bytes / 1e6:.1f} MB"
        )


def plan_warmup(
    shapes: ShapeSet | PagedShapes,
    *,
    num_heads: int,
    cost: CostModel,
    budget_bytes: int,
    max_rows: int | None = None,
    max_width: int | None = None,
    budget_seconds: float | None = None,
    served: Mapping[Shape, int] | None = None,
) -> WarmupPlan:
    """Trim the closed set to the ceilings and to the budget of seconds, and put it in order.

    The width ceiling, where shapes have a width, is the smaller of `max_width` (what the deployment sells) and what
    `budget_bytes` holds at the row ceiling. Under a seconds budget the shapes with the most expected hits a second are
    kept. `served` counts what an earlier process replayed: those shapes come first, whatever they cost.
    """
    served = served or {}
    row_ceiling = min(shapes.row_ladder[-1] if max_rows is None else max_rows, shapes.row_ladder[-1])
    rows = max((rung for rung in shapes.row_ladder if rung <= row_ceiling), default=0)
    ceiling: int | None = None
    if isinstance(shapes, ShapeSet):
        fits = width_ceiling(rows=rows, num_heads=num_heads, budget_bytes=budget_bytes) if rows else 0
        ceiling = min(shapes.width_ladder[-1] if max_width is None else max_width, fits, shapes.width_ladder[-1])
    wanted = warm_shapes(shapes, max_rows=row_ceiling, max_width=ceiling)
    kept, later = (wanted, ()) if budget_seconds is None else _within(budget_seconds, wanted, cost, served)
    known = biggest_first(shape for shape in kept if shape in served)
    chosen = (*known, *(shape for shape in kept if shape not in served))
    return WarmupPlan(
        shapes=chosen,
        background=later,
        trimmed=tuple(shape for shape in warm_shapes(shapes) if shape not in set(wanted)),
        row_ceiling=row_ceiling,
        width_ceiling=ceiling,
        predicted_seconds=cost.total_seconds(chosen),
        predicted_bytes=max((score_bytes(shape, num_heads=num_heads) for shape in chosen), default=0),
        budget_bytes=budget_bytes,
        budget_seconds=budget_seconds,
    )


def expected_hits(shape: Shape, widest: int, narrowest: int) -> float:
    """How often a shape is met if nothing is known: answers of uniformly distributed length pass a width in proportion
    to what lies beyond it, and all row counts are alike."""
    return (widest - shape.width + narrowest) / widest if shape.width else 1.0


def _within(
    seconds: float, wanted: tuple[Shape, ...], cost: CostModel, served: Mapping[Shape, int]
) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """(the shapes that fit `seconds`, biggest first; the others), chosen by expected hits a second, served ones first.

    The others stay in order of hits a second: whoever comes before all are recorded then most likely meets one that is.
    """
    if not wanted:
        return (), ()
    widths = [shape.width or 0 for shape in wanted]
    widest, narrowest = max(widths), min(widths)

    def rank(shape: Shape) -> tuple[float, float]:
        price = max(cost.seconds(shape), 1e-9)
        return served.get(shape, 0) / price, expected_hits(shape, widest, narrowest) / price

    kept: list[Shape] = []
    later: list[Shape] = []
    recorded: set[GraphKind] = set()
    left = seconds
    for shape in sorted(wanted, key=rank, reverse=True):
        price = cost.further_seconds(shape, recorded)
        if seconds > 0 and price <= left:
            kept.append(shape)
            recorded.add(key_of(shape).kind)
            left -= price
        else:
            later.append(shape)
    return biggest_first(kept), tuple(later)
