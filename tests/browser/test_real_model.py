"""The main job in a browser: the real model, served by `serve.py`, answers in the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import Chat, until
from tests.serving import served

pytestmark = [pytest.mark.browser, pytest.mark.model]
BOOT_SECONDS = 60.0


@pytest.fixture(scope="module")
def real_url(smollm2_path: Path) -> Iterator[str]:
    # Small enough that the warm-up is six graphs.
    with served("--max-sequences", "4", "--max-model-len", "256", ready="/livez") as server:
        yield server.url


def test_real_model_answers_in_the_page_when_asked(
    open_chat: Callable[..., Chat], real_url: str, tmp_path: Path
) -> None:
    chat = open_chat(real_url)
    until(lambda: chat.shown("link-text") in ("loading", "warming", "ready"), "the engine's state", 20)
    chat.wait_ready(BOOT_SECONDS)
    chat.tab.locator("#settings-toggle").click()
    chat.tab.locator("[name=temperature]").fill("0")
    chat.tab.locator("#settings-toggle").click()

    chat.ask("Name the capital of France.")
    until(lambda: "Paris" in chat.text(), "the answer names Paris", 30)
    chat.wait_state("done", seconds=30)
    assert re.match(r"complete\s+\d+ tokens\s+[\d.]+ tok/s\s+first token .*graphs \d+/\d+", chat.footer(), re.DOTALL)
    # Steps are told of ten times a second, and a short answer takes less.
    until(lambda: re.fullmatch(r"\d+ × \d+|\d+ rows?", chat.shown("shape")), "the shape of its steps", 10)
    first_shape = chat.shown("shape")

    chat.tab.locator("#prompt").fill("Tell me a very long story about a lighthouse keeper and the sea.")
    chat.tab.locator("#parallel").click()
    until(lambda: chat.shown("running") == "4", "four streams run", 30)
    until(lambda: chat.shown("shape") != first_shape, "the shape moves", 30)
    until(lambda: all(len(chat.text(index)) > 30 for index in range(1, 5)), "four answers grow", 60)
    assert float(chat.shown("tokens-per-second").replace(",", "")) > 0
    chat.tab.screenshot(path=tmp_path / "page.png")
    chat.tab.locator("#stop").click()
    for index in range(1, 5):
        chat.wait_state("done", index)
        assert "cancelled" in chat.footer(index)
    until(lambda: chat.shown("running") == "0", "nothing runs any more")
    until(lambda: chat.shown("kv-text").startswith("0 of "), "all blocks are back")
    assert (tmp_path / "page.png").stat().st_size > 10_000
