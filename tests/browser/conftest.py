"""A headless Chromium, pages that fail the test on any error they log, and the scripted server as a process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.serving import SCRIPTED, Served, served

CHROMIUM_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def scripted(*flags: str, port: int | None = None) -> AbstractContextManager[Served]:
    """The scripted server, as soon as it answers."""
    return served(*flags, command=SCRIPTED, port=port, ready="/livez")


def until(check: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """The first true result of `check`, asked every 30 ms."""
    deadline = time.monotonic() + seconds
    while not (result := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.03)
    return result


@dataclass
class Chat:
    """A tab with the page, in its reader's words. `provoked` are patterns of errors that the test brings about."""

    tab: Any
    errors: list[str] = field(default_factory=list)
    provoked: list[str] = field(default_factory=list)

    def unexpected(self) -> list[str]:
        """Errors the page logged that the test did not announce."""
        return [error for error in self.errors if not any(re.search(pattern, error) for pattern in self.provoked)]

    def open(self, url: str) -> Chat:
        self.tab.goto(url)
        return self

    def wait_ready(self, seconds: float = 10.0) -> Chat:
        until(lambda: self.tab.locator("#send").is_enabled(), "send is enabled", seconds)
        return self

    def ask(self, text: str) -> None:
        self.tab.locator("#prompt").fill(text)
        self.tab.locator("#prompt").press("Enter")

    def answer(self, index: int = -1) -> Any:
        return self.tab.locator(".answer").nth(index)

    def text(self, index: int = -1) -> str:
        return str(self.answer(index).locator(".answer-text").inner_text()) if self.answers() else ""

    def footer(self, index: int = -1) -> str:
        return str(self.answer(index).locator(".answer-footer").inner_text()) if self.answers() else ""

    def state(self, index: int = -1) -> str:
        return str(self.answer(index).get_attribute("data-state")) if self.answers() else ""

    def answers(self) -> int:
        return int(self.tab.locator(".answer").count())

    def fits(self) -> bool:
        """True if the page as a whole needs no scrolling, in either direction."""
        overflow = """() => [document.documentElement.scrollWidth - innerWidth,
            document.documentElement.scrollHeight - innerHeight]"""
        wide, high = self.tab.evaluate(overflow)
        return bool(wide <= 0 and high <= 0)

    def shown(self, name: str) -> str:
        return str(self.tab.locator(f"#{name}").inner_text())

    def wait_state(self, state: str, index: int = -1, seconds: float = 10.0) -> None:
        until(lambda: self.state(index) == state, f"answer {index} is {state}", seconds)


@pytest.fixture(scope="package")
def chromium(chromium_path: Path) -> Iterator[Any]:
    """One browser for the tests of this folder, gone before others run: while Playwright's synchronous interface is up,
    the main thread has a running event loop, in which no other can be started."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium_path), args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_chat(chromium: Any) -> Iterator[Callable[..., Chat]]:
    """Opens tabs, each a browser context of its own; keyword arguments are the context's. Fails on logged errors."""
    opened: list[tuple[Any, Chat]] = []

    def open_one(url: str, **options: Any) -> Chat:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        chat = Chat(context.new_page())
        opened.append((context, chat))
        # A violation of the content security policy is logged as an error, so this covers it.
        chat.tab.on("console", lambda entry: chat.errors.append(entry.text) if entry.type == "error" else None)
        chat.tab.on("pageerror", lambda error: chat.errors.append(str(error)))
        return chat.open(url)

    yield open_one
    for context, _ in opened:
        context.close()
    assert not [error for _, chat in opened for error in chat.unexpected()]


@pytest.fixture(scope="module")
def scripted_url() -> Iterator[str]:
    with scripted() as server:
        yield server.url
