"""The numbers of /metrics as Prometheus text, and the choice between that and JSON."""

from __future__ import annotations

from typing import Any

from nanoserve.errors import InvalidRequest

JSON = "application/json"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
COUNTERS = ("captured", "cold_captures", "background_captures", "replays", "eager_steps", "prefill_eager_steps")
SHAPE_COUNTERS = {"replays": "shape_replays", "real_rows": "shape_real_rows", "pad_rows": "shape_pad_rows"}
SHAPE_COUNTERS["seconds_total"] = "shape_seconds"


def negotiate(format_name: str | None, accept: str) -> str:
    """The content type to answer with. JSON unless Prometheus text is named with a q at least JSON's; `*/*` counts for
    JSON. Raises InvalidRequest for an unknown `format_name`."""
    if format_name is not None:
        if format_name not in ("json", "prometheus"):
            raise InvalidRequest(f"format is {format_name[:40]!r}; it must be json or prometheus", param="format")
        return JSON if format_name == "json" else PLAIN
    quality = {JSON: 0.0, "text/plain": 0.0, "application/openmetrics-text": 0.0}
    for entry in accept.split(","):
        media, *parameters = (part.strip().lower() for part in entry.split(";"))
        weight = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
        name = JSON if media in ("*/*", "application/*") else media
        if name in quality:
            quality[name] = max(quality[name], _number(weight))
    plain, open_metrics = quality["text/plain"], quality["application/openmetrics-text"]
    if max(plain, open_metrics) <= 0 or max(plain, open_metrics) < quality[JSON]:
        return JSON
    return OPENMETRICS if open_metrics > plain else PLAIN


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


class _Page:
    """Families in the order they are added; a family's samples stand together."""

    def __init__(self, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        self._lines: list[str] = []

    def family(self, name: str, kind: str, samples: list[tuple[str, dict[str, Any], Any]]) -> None:
        """`samples` are (suffix, labels, value); a value of None is unknown and left out."""
        known = [(suffix, labels, value) for suffix, labels, value in samples if value is not None]
        if not known:
            return
        full = f"nanoserve_{name}"
        total = "_total" if kind == "counter" else ""
        self._lines.append(f"# TYPE {full if self._openmetrics else full + total} {kind}")
        for suffix, labels, value in known:
            inner = ",".join(f'{key}="{_escape(str(text))}"' for key, text in labels.items())
            self._lines.append(f"{full}{total}{suffix}{'{' + inner + '}' if inner else ''} {float(value):.10g}")

    def text(self) -> str:
        return "\n".join([*self._lines, *(["# EOF"] if self._openmetrics else [])]) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def render(metrics: dict[str, Any], *, openmetrics: bool) -> str:
    """The JSON body of /metrics as text. Unknown (null) values have no sample."""
    page = _Page(openmetrics)
    page.family("uptime_seconds", "gauge", [("", {}, metrics["uptime_seconds"])])
    page.family("build_info", "gauge", [("", {"version": metrics["version"]}, 1)])
    for section in ("requests", "tokens", "kv", "graphs"):
        for key, value in metrics[section].items():
            if isinstance(value, str):
                continue
            counter = (key.endswith("_total") and section != "kv") or (section == "graphs" and key in COUNTERS)
            name = f"{section}_{key.removesuffix('_total') if counter else key}"
            page.family(name, "counter" if counter else "gauge", [("", {}, value)])
    graphs = {"read": metrics["graphs"]["read"] or "", "backend": metrics["graphs"]["backend"] or ""}
    page.family("graphs_info", "gauge", [("", graphs, 1)])
    for key, name in SHAPE_COUNTERS.items():
        samples = [("", _labels(shape), shape[key]) for shape in metrics["shapes"]]
        page.family(name, "counter", samples)
    for key, window in metrics["latency"].items():
        quantiles = [("", {"quantile": q / 100}, window[f"p{q}"]) for q in (50, 90, 99)]
        page.family(key, "summary", [*quantiles, ("_count", {}, window["count"])])
    return page.text()


def _labels(shape: dict[str, Any]) -> dict[str, Any]:
    width = shape["width"]
    return {"kind": shape["kind"], "rows": shape["rows"], "width": "" if width is None else width}
