"""The page during a real warm-up: the engine boots behind the open port, on kernels that are slow on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Chat, until
from tests.server.support import TEXT
from tests.tiny_engines import SlowBackend, SlowOps
from tests.tiny_folder import write_served_model
from tests.tiny_server import warm_server

pytestmark = pytest.mark.browser
GRAPHS = 12


def test_page_counts_down_a_slow_warm_up_and_opens_when_it_is_over(
    open_chat: Callable[..., Chat], tmp_path: Path
) -> None:
    """12 shapes of a quarter of a second and more: about four seconds, during which nothing is served."""
    folder = write_served_model(tmp_path / "tiny", num_hidden_layers=1)
    ops = SlowOps(base=0.25, cell=5e-4)
    with warm_server(folder, ops=ops, backend=SlowBackend(ops), max_sequences=4) as (server, _):
        chat = open_chat(server.url)
        until(lambda: re.fullmatch(rf"\d+ of {GRAPHS}", chat.shown("boot-count")), "graphs are counted")
        assert chat.shown("boot-stage") == "Recording graphs"
        assert chat.shown("link-text") == "warming"
        assert not chat.tab.locator("#send").is_enabled()
        assert server.get("/livez").status_code == 200
        assert server.get("/health").status_code == 503
        refused = server.post(TEXT, {"prompt": "hello"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1

        seen: list[tuple[int, float, float]] = []

        def at_the_end() -> bool:
            if chat.tab.locator("#boot").is_visible():
                seen.append(read_bar(chat))
            return bool(chat.tab.locator("#send").is_enabled())

        until(at_the_end, "the engine is ready", 30)
        counts, positions, seconds = (list(column) for column in zip(*seen, strict=True))
        assert len(set(counts)) >= 4
        assert counts == sorted(counts)
        assert positions == sorted(positions)
        assert seconds[-1] < seconds[0] / 2

        assert not chat.tab.locator("#banner").is_visible()
        assert chat.shown("link-text") == "ready"
        assert server.get("/health").status_code == 200
        chat.tab.locator("#settings-toggle").click()
        chat.tab.locator("[name=max_tokens]").fill("8")
        chat.tab.locator("#settings-toggle").click()
        chat.ask("hi")
        chat.wait_state("done")
        # An answer is drawn, so it may end before its eighth token. Its first token is the prompt's, without a graph.
        footer = re.search(r"\b(\d+) tokens?\b.*graphs (\d+)/(\d+)", chat.footer(), re.DOTALL)
        assert footer is not None
        tokens, replays, steps = (int(number) for number in footer.groups())
        assert replays + 1 == steps == tokens <= 8
        assert server.get("/metrics").json()["graphs"]["cold_captures"] == 0


def read_bar(chat: Chat) -> tuple[int, float, float]:
    """Graphs recorded, the bar's position, and the seconds left, of one moment."""
    read = """() => [
        document.getElementById("boot-count").textContent, document.getElementById("boot-bar").position,
        document.getElementById("boot-eta").textContent]"""
    count, position, eta = chat.tab.evaluate(read)
    number, unit = re.findall(r"([\d.]+) (m?s)", eta)[0]
    return int(count.split()[0]), float(position), float(number) / (1000 if unit == "ms" else 1)
