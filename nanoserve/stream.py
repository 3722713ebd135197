"""RequestStream: one request's deltas on their way from the step loop to a handler, merged when the reader is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from nanoserve.request import Delta


class RequestStream:
    """Deltas wait here, one per choice: a delta that finds another of its choice unread is merged into it, so a slow
    reader holds at most its own output and the step loop never waits. Iterated once, by one reader."""

    def __init__(self, request_id: str, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self._pending: dict[int, list[Delta]] = {}
        self._ready = asyncio.Event()

    def push(self, delta: Delta) -> None:
        # A list per choice, joined when read: merging eagerly would copy a long text once per token.
        self._pending.setdefault(delta.index, []).append(delta)
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, {}
            # The request's last delta closes the iteration, so whatever else is pending goes out before it.
            merged = sorted(
                (merge(deltas) for deltas in pending.values()), key=lambda delta: delta.finished is not None
            )
            for delta in merged:
                yield delta
                if delta.finished is not None:
                    return


def merge(deltas: list[Delta]) -> Delta:
    """One delta that says what consecutive deltas of one choice say."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        finished=deltas[-1].finished,
    )
