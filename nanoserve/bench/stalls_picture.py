"""The picture of `bench stalls`: one client's gaps, token by token, on both engines and one scale."""

from __future__ import annotations

from nanoserve.bench.svg import Canvas, ticks
from nanoserve.bench.tables import Record, Table, milliseconds

WIDTH, HEIGHT, MARGIN, GAP = 1160, 700, 36, 24
TOP, PANEL = 104, 268
TITLE = "The gaps between one client's tokens"


def draw(subject: str, gaps: Table, summary: Table, width_multiple: int) -> str:
    """SVG markup: a panel for each engine of `summary`, with its gaps from `gaps`."""
    canvas = Canvas(WIDTH, HEIGHT, title=TITLE, description="; ".join([summary.about, *summary.notes]))
    canvas.text(MARGIN, 52, TITLE, "title")
    canvas.text(MARGIN, 78, subject, "muted")
    most = max(record["gap_seconds"] for record in gaps.records)
    for index, engine in enumerate(summary.records):
        records = [record for record in gaps.records if record["engine"] == engine["engine"]]
        _draw_engine(canvas, TOP + (PANEL + GAP) * index, engine, records, most, width_multiple)
    return canvas.markup()


def _draw_engine(
    canvas: Canvas, panel_top: float, engine: Record, records: list[Record], most: float, width_multiple: int
) -> None:
    graphs, cold = engine["graphs_before"], engine["cold"]
    start = f"the start-up takes {engine['start_seconds']:,.2f} s longer, for {graphs:,} graphs; " if graphs else ""
    waiting = {0: "no token waits", 1: "1 token waits"}.get(cold, f"{cold:,} tokens wait")
    note = f"{start}{waiting} for a recording"
    canvas.panel(MARGIN, panel_top, WIDTH - 2 * MARGIN, PANEL, engine["engine"].capitalize(), note)
    _draw_figures(canvas, panel_top, engine)
    left, right = MARGIN + 84, WIDTH - MARGIN - 22
    top, bottom = panel_top + 88, panel_top + PANEL - 54
    scale = ticks(most * 1e3)

    def y(seconds: float) -> float:
        return bottom - (bottom - top) * seconds * 1e3 / scale[-1]

    for mark in scale:
        canvas.line(left, y(mark / 1e3), right, y(mark / 1e3), "grid" if mark else "axis")
        canvas.text(left - 10, y(mark / 1e3) + 4, f"{mark:g} ms", "muted small", anchor="end")
    slot = (right - left) / len(records)
    bar = max(1.0, slot * 0.72)
    for index, record in enumerate(records):
        x = left + slot * index
        if record["context_tokens"] % width_multiple == 1 or width_multiple == 1:
            canvas.line(x, top - 6, x, bottom + 5, "rule")
        height = max(bottom - y(record["gap_seconds"]), 1)
        canvas.rect(x + (slot - bar) / 2, bottom - height, bar, height, "miss" if record["recorded"] else "real")
    _draw_tokens(canvas, records, left, slot, bottom)


def _draw_tokens(canvas: Canvas, records: list[Record], left: float, slot: float, bottom: float) -> None:
    """Numbers under the axis: every token of a round step."""
    first, last = records[0]["token"], records[-1]["token"]
    for mark in ticks(last, 8):
        if first <= mark <= last:
            canvas.text(left + slot * (mark - first + 0.5), bottom + 21, f"{mark:,.0f}", "muted small", anchor="middle")
    middle = left + slot * len(records) / 2
    canvas.text(
        middle,
        bottom + 39,
        "token; a dashed line is where the context enters a new width",
        "muted small",
        anchor="middle",
    )


def _draw_figures(canvas: Canvas, panel_top: float, engine: Record) -> None:
    """p50, p99 and the longest, at the panel's right."""
    x = WIDTH - MARGIN - 22.0
    for label, key in (("longest", "max_seconds"), ("p99", "p99_seconds"), ("p50", "p50_seconds")):
        style = "heading miss-ink" if key == "max_seconds" and engine["cold"] else "heading"
        canvas.text(x, panel_top + 34, milliseconds(engine[key]), style, anchor="end")
        canvas.text(x, panel_top + 52, label, "muted small", anchor="end")
        x -= 112
