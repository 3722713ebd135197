"""The picture of `bench warm`: cold recordings against the prediction, start-up seconds of the full and trimmed lists,
and the closed set of shapes with each memory budget as the width it ends at.
"""

from __future__ import annotations

from nanoserve.bench.svg import Canvas, ticks
from nanoserve.bench.tables import Table
from nanoserve.bench.warm_tables import Serving

WIDTH, HEIGHT, MARGIN, GAP = 1160, 800, 36, 24
TOP, UPPER, LOWER = 104, 330, 306
"""Where the upper panels begin, and the height of the upper and the lower ones."""


def draw(subject: str, serving: Serving, cold: Table, paid: Table, budgets: Table) -> str:
    """SVG markup of one run's three tables."""
    canvas = Canvas(
        WIDTH,
        HEIGHT,
        title="What is recorded, and who waits for it",
        description="; ".join([cold.title, *paid.notes, *budgets.notes]),
    )
    canvas.text(MARGIN, 52, "What is recorded, and who waits for it", "title")
    canvas.text(MARGIN, 78, subject, "muted")
    half = (WIDTH - 2 * MARGIN - GAP) / 2
    _draw_cold(canvas, MARGIN, half, cold)
    _draw_start(canvas, MARGIN + half + GAP, half, serving, paid)
    _draw_budgets(canvas, MARGIN, WIDTH - 2 * MARGIN, serving, budgets)
    return canvas.markup()


def _draw_cold(canvas: Canvas, left: float, width: float, cold: Table) -> None:
    canvas.panel(left, TOP, width, UPPER, "Recordings in front of a client", cold.about)
    plot_left, plot_right = left + 48, left + width - 22
    top, bottom = TOP + 112, TOP + UPPER - 54
    marks = ticks(max([1, *(max(r["lazy"], r["predicted"], r["warmed"]) for r in cold.records)]))
    marks = [mark for mark in marks if mark == int(mark)]

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / marks[-1]

    for mark in marks:
        canvas.line(plot_left, y(mark), plot_right, y(mark), "grid" if mark else "axis")
        canvas.text(plot_left - 10, y(mark) + 4, f"{mark:g}", "muted small", anchor="end")
    legend = TOP + 78
    canvas.rect(plot_left, legend, 12, 12, "miss", radius=2)
    canvas.text(plot_left + 18, legend + 11, "cold, nothing warmed", "small")
    canvas.rect(plot_left + 162, legend + 1, 11, 10, "plan")
    canvas.text(plot_left + 180, legend + 11, "predicted", "small")
    canvas.rect(plot_left + 254, legend, 12, 12, "real", radius=2)
    canvas.text(plot_left + 272, legend + 11, "cold, after warming", "small")
    slot = (plot_right - plot_left) / len(cold.records)
    bar = min(44.0, slot / 3.2)
    for index, record in enumerate(cold.records):
        middle = plot_left + slot * (index + 0.5)
        x = middle - bar - 3
        lazy, predicted, warmed = record["lazy"], record["predicted"], record["warmed"]
        canvas.rect(x, y(lazy), bar, bottom - y(lazy), "miss", radius=3)
        canvas.rect(x - 4, y(predicted) - 4, bar + 8, bottom - y(predicted) + 4, "plan", radius=4)
        canvas.text(x + bar / 2, min(y(lazy), y(predicted)) - 11, f"{lazy:,}", "strong", anchor="middle")
        # A count of nothing still needs a mark to be seen as a measurement.
        canvas.rect(middle + 7, min(y(warmed), bottom - 3), bar, max(bottom - y(warmed), 3), "real", radius=1)
        canvas.text(middle + 7 + bar / 2, y(warmed) - 11, f"{warmed:,}", "strong real-ink", anchor="middle")
        canvas.text(middle, bottom + 22, f"{record['generated']:,}", anchor="middle")
    canvas.text((plot_left + plot_right) / 2, bottom + 41, "tokens generated", "muted small", anchor="middle")


def _draw_start(canvas: Canvas, left: float, width: float, serving: Serving, paid: Table) -> None:
    longest = max(paid.records, key=lambda record: int(record["generated"]))
    canvas.panel(left, TOP, width, UPPER, "Where they are paid for", paid.about)
    rows_label = f"rows ≤ {serving.trim_rows:,}"
    bars = [
        ("start: the full list", longest["full_seconds"], "wash"),
        (f"start: {rows_label}", longest["rows_seconds"], "wash"),
        (f"start: {rows_label}, context ≤ {serving.trim_width:,}", longest["rows_width_seconds"], "real"),
        (f"one client: {longest['generated']:,} tokens, nothing warmed", longest["latency_seconds"], "miss"),
    ]
    plot_left, plot_right, top = left + 22, left + width - 160, TOP + 86
    most = max([seconds for _, seconds, _ in bars]) or 1.0
    step = (UPPER - 126) / len(bars)
    for index, (label, seconds, style) in enumerate(bars):
        y = top + step * index
        length = (plot_right - plot_left) * seconds / most
        graphs = round(seconds / serving.seconds_per_graph) if serving.seconds_per_graph else 0
        canvas.text(plot_left, y, label, "small")
        canvas.rect(plot_left, y + 8, max(length, 2), 20, style, radius=3)
        shown = f"{seconds:,.2f} s"
        canvas.text(plot_left + max(length, 2) + 9, y + 23, shown, "strong")
        if graphs:
            x = plot_left + max(length, 2) + 9 + 8 * len(shown)
            canvas.text(x, y + 23, f"{graphs:,} graphs", "muted small")
    for text in paid.notes:
        canvas.text(plot_left, TOP + UPPER - 22, text.capitalize(), "small miss-ink")


def _draw_budgets(canvas: Canvas, left: float, width: float, serving: Serving, budgets: Table) -> None:
    shapes = serving.shapes
    rungs, widths = shapes.row_ladder, shapes.width_ladder
    total = len(rungs) * len(widths)
    panel_top = TOP + UPPER + GAP
    note = f"{len(rungs)} row buckets × {len(widths)} widths = {total:,} shapes; {budgets.about}"
    canvas.panel(left, panel_top, width, LOWER, "A memory budget ends the list at a width", note)
    plot_left, plot_right = left + 74, left + width - 34
    top, bottom = panel_top + 112, panel_top + LOWER - 54
    cell_height = (bottom - top) / len(rungs)
    scale = (plot_right - plot_left) / widths[-1]
    reach = max((width for width in widths if width <= serving.trim_width), default=0)
    for index, rows in enumerate(reversed(rungs)):
        y = top + cell_height * index
        canvas.text(plot_left - 12, y + cell_height / 2 + 4, f"{rows:,}", "muted small", anchor="end")
        canvas.rect(plot_left, y, plot_right - plot_left, cell_height - 1.5, "wash")
        if rows <= serving.trim_rows:
            canvas.rect(plot_left, y, reach * scale, cell_height - 1.5, "real")
    if serving.multiple * scale > 4:
        for end in widths[:-1]:
            canvas.line(plot_left + end * scale, top, plot_left + end * scale, bottom, "cut")
    canvas.text(left + 22, top - 10, "rows", "muted small")
    for mark in sorted({0, *(widths[len(widths) * quarter // 4 - 1] for quarter in (1, 2, 3, 4) if len(widths) > 3)}):
        canvas.text(plot_left + mark * scale, bottom + 20, f"{mark:,}", "muted small", anchor="middle")
    middle = (plot_left + plot_right) / 2
    canvas.text(middle, bottom + 39, "width, in tokens of context", "muted small", anchor="middle")
    _draw_key(canvas, left, bottom + 29, serving)
    _draw_ceilings(canvas, budgets, plot_left, plot_right, top, bottom, scale)


def _draw_key(canvas: Canvas, left: float, y: float, serving: Serving) -> None:
    canvas.rect(left + 74, y, 12, 12, "real", radius=2)
    label = f"rows ≤ {serving.trim_rows:,}, context ≤ {serving.trim_width:,}"
    canvas.text(left + 92, y + 10, label, "muted small")


def _draw_ceilings(
    canvas: Canvas, budgets: Table, left: float, right: float, top: float, bottom: float, scale: float
) -> None:
    """A line at each budget's width, its label on the lowest level where it covers no other."""
    taken: list[tuple[int, float, float]] = []
    for record in budgets.records:
        whole = record["shapes"] == record["shapes_in_all"]
        x = right if whole else left + record["width_ceiling"] * scale
        reach = "the whole list" if whole else f"{record['width_ceiling']:,} tokens, {record['shapes']:,} shapes"
        label = f"{record['budget_mb']:,} MB: {reach}"
        before = x > (left + right) / 2
        start = x - 8 - 7 * len(label) if before else x + 8
        end = start + 7 * len(label)
        level = 0
        while any(each == level and start < other and begin < end for each, begin, other in taken):
            level += 1
        taken.append((level, start, end))
        y = top - 14 - 20 * level
        canvas.line(x, y - 12, x, bottom + 4, "whole" if whole else "limit")
        style = "small strong real-ink" if whole else "small strong miss-ink"
        canvas.text(x - 8 if before else x + 8, y, label, style, anchor="end" if before else "start")
