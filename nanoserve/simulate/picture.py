"""The pictures of `nanoserve simulate`: one deployment in detail, or a sweep side by side."""

from __future__ import annotations

import math
from collections.abc import Callable

from nanoserve.bench.svg import Canvas, ticks
from nanoserve.bench.tables import Record, milliseconds
from nanoserve.simulate.report import Run, shapes_table
from nanoserve.simulate.result import SHARES, Result

WIDTH, MARGIN, GAP = 1160, 36, 24
TOP, UPPER, LOWER = 104, 300, 320
TITLE = "A deployment, simulated"


def draw(about: str, runs: list[Run]) -> str:
    """SVG markup: `about` is the line under the title."""
    return _draw_one(about, runs[0]) if len(runs) == 1 else _draw_sweep(about, runs)


# --- one deployment ------------------------------------------------------------------------------------------------


def _draw_one(about: str, run: Run) -> str:
    height = TOP + UPPER + GAP + LOWER + MARGIN
    canvas = Canvas(WIDTH, height, title=TITLE, description=about)
    canvas.text(MARGIN, 52, TITLE, "title")
    canvas.text(MARGIN, 78, about, "muted")
    half = (WIDTH - 2 * MARGIN - GAP) / 2
    _draw_timeline(canvas, MARGIN, half, run)
    _draw_latencies(canvas, MARGIN + half + GAP, half, run)
    _draw_shapes(canvas, run.result)
    return canvas.markup()


def _draw_timeline(canvas: Canvas, left: float, width: float, run: Run) -> None:
    result = run.result
    sizes = f"{run.sizes.max_sequences:,} sequences, {result.blocks:,} blocks"
    note = f"{run.load}, {sizes}; {result.preemptions:,} preemptions"
    canvas.panel(left, TOP, width, UPPER, "Sequences and blocks over time", note)
    spans, seconds = result.timeline.spans, result.timeline.span_seconds
    plot_left, plot_right = left + 58, left + width - 22
    slot = (plot_right - plot_left) / len(spans)
    running = [span.running_seconds / seconds for span in spans]
    both = [(span.running_seconds + span.waiting_seconds) / seconds for span in spans]
    most = math.ceil(max([1.0, *both]))
    top, bottom = TOP + 84, TOP + 202
    for values, style in ((both, "miss"), (running, "real")):
        _draw_area(canvas, plot_left, slot, (top, bottom), [value / most for value in values], style)
    _draw_scale(canvas, plot_left, plot_right, top, bottom, most)
    canvas.text(plot_left, top - 8, "running", "small real-ink")
    canvas.text(plot_left + 52, top - 8, "and waiting", "small miss-ink")
    top, bottom = TOP + 226, TOP + UPPER - 36
    shares = [span.most_blocks / result.blocks for span in spans]
    _draw_area(canvas, plot_left, slot, (top, bottom), shares, "wash")
    _draw_scale(canvas, plot_left, plot_right, top, bottom, result.blocks)
    canvas.text(plot_left, top - 8, f"blocks in use, of {result.blocks:,}", "muted small")
    canvas.text(plot_left, bottom + 20, "0 s", "muted small")
    end = len(spans) * seconds
    end_label = f"{end:,.0f} s" if end >= 10 else f"{end:.2f} s"
    canvas.text(plot_right, bottom + 20, end_label, "muted small", anchor="end")


def _draw_area(
    canvas: Canvas, left: float, slot: float, rows: tuple[float, float], shares: list[float], style: str
) -> None:
    """Bars without gaps, `shares` of the height; neighbours of one height are one rectangle."""
    top, bottom = rows
    start = 0
    for index in range(1, len(shares) + 1):
        if index == len(shares) or shares[index] != shares[start]:
            height = (bottom - top) * shares[start]
            if height:
                canvas.rect(left + slot * start, bottom - height, slot * (index - start), height, style)
            start = index


def _draw_scale(canvas: Canvas, left: float, right: float, top: float, bottom: float, most: int) -> None:
    canvas.line(left, bottom, right, bottom, "axis")
    canvas.line(left, top, right, top, "grid")
    canvas.text(left - 10, bottom + 4, "0", "muted small", anchor="end")
    canvas.text(left - 10, top + 4, f"{most:,}", "muted small", anchor="end")


def _draw_latencies(canvas: Canvas, left: float, width: float, run: Run) -> None:
    record = run.record()
    busy = f"the engine was busy {record['busy_share']:.0%} of the time"
    note = f"{record['tokens_per_second']:,.0f} tokens a second; {busy}"
    canvas.panel(left, TOP, width, UPPER, "What clients wait for", note)
    _draw_shares(canvas, left + 22, width - 44, TOP + 88, "First token", record, "ttft")
    _draw_shares(canvas, left + 22, width - 44, TOP + 194, "Gap between tokens", record, "gap")


def _draw_shares(
    canvas: Canvas, left: float, width: float, top: float, label: str, record: Record, prefix: str
) -> None:
    """A bar for each percentile, on a scale of their own."""
    canvas.text(left, top, label, "strong")
    values = {share: record[f"{prefix}_{share}_seconds"] for share in SHARES}
    most = max((value for value in values.values() if value is not None), default=0.0) or 1.0
    for index, (share, value) in enumerate(values.items()):
        y = top + 10 + 20 * index
        canvas.text(left, y + 12, share, "muted small")
        if value is None:
            canvas.text(left + 44, y + 12, "-", "muted small")
            continue
        length = max(2.0, (width - 150) * value / most)
        canvas.rect(left + 44, y, length, 15, "miss" if share == "max" else "real", radius=2)
        canvas.text(left + 44 + length + 8, y + 12, milliseconds(value), "small strong")


def _draw_shapes(canvas: Canvas, result: Result) -> None:
    top = TOP + UPPER + GAP
    records = shapes_table(result).records
    shown = sorted(records, key=lambda record: int(record["steps"]), reverse=True)[:24]
    shown.sort(key=lambda record: (record["kind"], record["rows"], record["width"] or 0))
    left = "" if len(shown) == len(records) else f"; the {len(shown)} most frequent of {len(records)}"
    canvas.panel(MARGIN, top, WIDTH - 2 * MARGIN, LOWER, "Steps by shape", f"share of {result.steps:,} steps{left}")
    plot_left, plot_right, plot_top, bottom = MARGIN + 64.0, WIDTH - MARGIN - 22.0, top + 92, top + LOWER - 62
    marks = ticks(max(record["share"] for record in shown) * 100)

    def y(share: float) -> float:
        return bottom - (bottom - plot_top) * share * 100 / marks[-1]

    for mark in marks:
        canvas.line(plot_left, y(mark / 100), plot_right, y(mark / 100), "grid" if mark else "axis")
        canvas.text(plot_left - 10, y(mark / 100) + 4, f"{mark:g} %", "muted small", anchor="end")
    canvas.rect(plot_left, top + 68, 12, 12, "real", radius=2)
    canvas.text(plot_left + 18, top + 78, "real rows", "muted small")
    canvas.rect(plot_left + 92, top + 68, 12, 12, "wash", radius=2)
    canvas.text(plot_left + 110, top + 78, "pad rows", "muted small")
    slot = (plot_right - plot_left) / len(shown)
    bar = min(40.0, slot * 0.66)
    for index, record in enumerate(shown):
        x = plot_left + slot * (index + 0.5)
        whole, real = record["share"], record["share"] * (1 - record["pad_share"])
        canvas.rect(x - bar / 2, y(whole), bar, bottom - y(whole), "wash", radius=2)
        canvas.rect(x - bar / 2, y(real), bar, bottom - y(real), "real")
        width = "" if record["width"] is None else f" × {record['width']:,}"
        canvas.text(x, bottom + 18, f"{record['rows']:,}{width}", "small", anchor="middle")
        canvas.text(x, bottom + 35, str(record["kind"]), "muted small", anchor="middle")
    canvas.text((plot_left + plot_right) / 2, bottom + 53, "rows of the bucket", "muted small", anchor="middle")


# --- a sweep -------------------------------------------------------------------------------------------------------


def _draw_sweep(about: str, runs: list[Run]) -> str:
    """A row for each combination, a column for each figure, every column on a scale of its own."""
    row, head = 30, 96
    height = TOP + head + row * len(runs) + 30 + MARGIN
    canvas = Canvas(WIDTH, height, title=TITLE, description=about)
    canvas.text(MARGIN, 52, TITLE, "title")
    canvas.text(MARGIN, 78, about, "muted")
    panel = height - TOP - MARGIN
    canvas.panel(MARGIN, TOP, WIDTH - 2 * MARGIN, panel, "Combinations", "bars of one column share a scale")
    records = [run.record() for run in runs]
    names = [f"{r['load']}, {r['max_sequences']:,} sequences, {r['kv_blocks']:,} blocks" for r in records]
    if len({record["max_step_rows"] for record in records}) > 1:
        names = [f"{name}, {record['max_step_rows']:,} rows" for name, record in zip(names, records, strict=True)]
    for index, name in enumerate(names):
        canvas.text(MARGIN + 22, TOP + head + row * index + 14, name, "small")
    columns: list[tuple[str, str, str, Callable[[float], str]]] = [
        ("tokens_per_second", "tokens/s", "real", lambda value: f"{value:,.0f}"),
        ("ttft_p99_seconds", "first token p99", "miss", milliseconds),
        ("gap_p99_seconds", "gap p99", "miss", milliseconds),
        ("preemptions", "preemptions", "wash", lambda value: f"{value:,.0f}"),
    ]
    left = MARGIN + 370.0
    slot = (WIDTH - MARGIN - 10 - left) / len(columns)
    for column, (key, heading, style, show) in enumerate(columns):
        x = left + slot * column
        canvas.text(x, TOP + head - 14, heading, "muted small")
        most = max((record[key] or 0 for record in records), default=0) or 1
        for index, record in enumerate(records):
            y = TOP + head + row * index
            if (value := record[key]) is not None:
                length = max(1.0, (slot - 92) * value / most)
                canvas.rect(x, y, length, 18, style, radius=2)
                canvas.text(x + length + 6, y + 14, show(value), "small strong")
    return canvas.markup()
