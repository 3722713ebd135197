from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.server.fake_engine import Script
from tests.server.support import Running, serving


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """One server a module; each test starts with the default script and must leave no generation behind."""
    engine = shared.engine
    engine.script = lambda request: Script()
    engine.requests.clear()
    engine.aborted.clear()
    engine.defaults, engine.submit_error = {}, None
    yield shared
    shared.wait_idle()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the server logs; its loggers do not propagate, so caplog does not see it."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("nanoserve", "uvicorn")]
    for logger in loggers:
        logger.addHandler(handler)
    yield messages
    for logger in loggers:
        logger.removeHandler(handler)
