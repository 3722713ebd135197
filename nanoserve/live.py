"""LiveFeed: boot and step events to any number of subscribers, none of whom can slow the step loop down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

BACKLOG = 64
"""Events a subscriber may lag behind before it loses the oldest."""


class LiveFeed:
    """Fan-out with a bounded backlog per subscriber. Used on the event loop only."""

    def __init__(self) -> None:
        self._subscribers: set[asyncio.Queue[dict[str, Any] | None]] = set()

    @property
    def has_subscribers(self) -> bool:
        return bool(self._subscribers)

    def publish(self, event: dict[str, Any]) -> None:
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    def close(self) -> None:
        """End every subscription."""
        for queue in self._subscribers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def subscribe(self, *first: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Events from now on, after `first`."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=BACKLOG)
        self._subscribers.add(queue)
        try:
            for event in first:
                yield event
            while (event_or_end := await queue.get()) is not None:
                yield event_or_end
        finally:
            self._subscribers.discard(queue)
