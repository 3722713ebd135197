"""Pictures: a canvas that writes SVG, the style all pictures share, and the round numbers of an axis.

Colours are classes, not attributes, so that one style sheet serves light and dark readers.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from typing import Literal

Anchor = Literal["start", "middle", "end"]
NAMESPACE = "http://www.w3.org/2000/svg"

# Colours as on the page: --real for what replays, --miss for what a client waits for, --prompt for what is predicted.
STYLE = """
svg { --paper: #fafaf8; --panel: #ffffff; --ink: #17191c; --muted: #5c626b; --line: #e2e3e0; --edge: #8f948f;
      --real: #0d7a6f; --wash: #cfe6e2; --miss: #c8430d; --plan: #6a5acd; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0f1113; --panel: #15181b; --ink: #e8eaec; --muted: #9aa2ab; --line: #262b30; --edge: #626b75;
        --real: #2cc4b0; --wash: #1c4843; --miss: #ff7d4d; --plan: #9a8cf5; } }
text { font: 13px Inter, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--ink);
       font-variant-numeric: tabular-nums; }
.title { font-size: 22px; font-weight: 650; letter-spacing: -0.01em; } .heading { font-size: 15px; font-weight: 620; }
.muted { fill: var(--muted); } .small { font-size: 12px; } .strong { font-weight: 620; }
.paper { fill: var(--paper); } .panel { fill: var(--panel); stroke: var(--line); }
.real { fill: var(--real); } .wash { fill: var(--wash); } .miss { fill: var(--miss); }
.plan { fill: none; stroke: var(--plan); stroke-width: 2; stroke-dasharray: 5 3; }
.grid { stroke: var(--line); } .axis { stroke: var(--edge); } .cut { stroke: var(--panel); stroke-width: 1.5; }
.limit { stroke: var(--miss); stroke-width: 2; } .whole { stroke: var(--real); stroke-width: 2; }
.rule { stroke: var(--plan); stroke-dasharray: 3 3; }
.miss-ink { fill: var(--miss); } .real-ink { fill: var(--real); } .plan-ink { fill: var(--plan); }
"""


class Canvas:
    """An SVG of `width` × `height`; shapes are painted in the order they are added. Lengths are pixels, y downward."""

    def __init__(self, width: int, height: int, *, title: str, description: str) -> None:
        size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
        labels = {"role": "img", "aria-labelledby": "title description"}
        self._root = ElementTree.Element("svg", {"xmlns": NAMESPACE, **size, **labels})
        for tag, text in (("title", title), ("desc", description)):
            identity = {"title": "title", "desc": "description"}[tag]
            ElementTree.SubElement(self._root, tag, {"id": identity}).text = text
        ElementTree.SubElement(self._root, "style").text = STYLE
        self.rect(0, 0, width, height, "paper")

    def rect(self, x: float, y: float, width: float, height: float, style: str, *, radius: float = 0) -> None:
        self._add("rect", style, x=x, y=y, width=max(0.0, width), height=max(0.0, height), rx=radius)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self._add("line", style, x1=x1, y1=y1, x2=x2, y2=y2)

    def text(self, x: float, y: float, content: str, style: str = "", *, anchor: Anchor = "start") -> None:
        """`y` is the baseline."""
        element = self._add("text", style, x=x, y=y)
        if anchor != "start":
            element.set("text-anchor", anchor)
        element.text = content

    def panel(self, x: float, y: float, width: float, height: float, heading: str, note: str) -> None:
        """A card with its heading and a line below it; the first 70 pixels are taken."""
        self.rect(x, y, width, height, "panel", radius=10)
        self.text(x + 22, y + 32, heading, "heading")
        self.text(x + 22, y + 53, note, "muted small")

    def markup(self) -> str:
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode", xml_declaration=False) + "\n"

    def _add(self, tag: str, style: str, **numbers: float) -> ElementTree.Element:
        attributes = {name: _number(value) for name, value in numbers.items() if name != "rx" or value}
        if style:
            attributes["class"] = style
        return ElementTree.SubElement(self._root, tag, attributes)


def ticks(maximum: float, count: int = 4) -> list[float]:
    """About `count` steps of 1, 2 or 5 times a power of ten from 0 to the first that reaches `maximum`."""
    if maximum <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(maximum / count))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * count >= maximum * (1 - 1e-9))
    return [round(index * step, 12) for index in range(math.ceil(maximum / step - 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
