"""Server-sent events: payloads to frames, and the response that carries them.

Frames are `data:` lines with LF only, yielded as bytes. `EventStream` is sse-starlette's response with our framing
and a clean-up that runs however the stream ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Message, Receive, Scope, Send

from nanoserve.errors import NanoserveError
from nanoserve.request import Finished
from server.config import ServerConfig
from server.failures import describe
from server.lifecycle import Lifecycle
from server.schemas import StreamOptions
from server.seam import Engine
from server.shapes import Shape, in_band_error, usage_so_far
from server.submission import Submission

DONE = b"data: [DONE]\n\n"

logger = logging.getLogger("nanoserve.server")
_encode = msgspec.json.Encoder().encode


def frame(payload: Any) -> bytes:
    """One event. U+2028, U+2029 and U+0085 are escaped: several clients split lines there, inside the JSON."""
    data = _encode(payload)
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    if b"\xc2\x85" in data:
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return b"data: " + data + b"\n\n"


async def completion_frames(submission: Submission, shape: Shape, options: StreamOptions) -> AsyncIterator[bytes]:
    """The frames of a generating route, from the first chunk to `[DONE]`; a failure is one frame before it."""
    finished: Finished | None = None
    failure: Exception | None = None
    completion_tokens = 0
    try:
        async with aclosing(submission.deltas()) as deltas:
            async for delta in deltas:
                finished = delta.finished
                completion_tokens += len(delta.token_ids)
                chunk = shape.chunk(delta)
                if chunk is not None:
                    if options.continuous_usage_stats:
                        chunk["usage"] = usage_so_far(submission.prompt_tokens, completion_tokens)
                    elif options.include_usage:
                        chunk["usage"] = None
                    yield frame(chunk)
    except Exception as error:
        # The status line is gone: whatever this is, the client learns of it in the stream or not at all.
        if not isinstance(error, NanoserveError):
            logger.exception("a stream failed")
        failure = error
    if finished is not None:
        failure = in_band_error(finished)
    if failure is not None:
        yield frame(describe(failure).body)
    elif finished is not None and options.include_usage:
        yield frame(shape.usage_chunk(finished))
    yield DONE


async def event_frames(engine: Engine, lifecycle: Lifecycle) -> AsyncIterator[bytes]:
    """The frames of /steps: live events from now on, until the process closes."""
    async with aclosing(lifecycle.until_closing(engine.events())) as events:
        async for event in events:
            yield frame(event)


class EventStream(EventSourceResponse):
    """`on_end` runs once the response is over, also when it never started or its client vanished."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        config: ServerConfig,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            frames,
            media_type="text/event-stream; charset=utf-8",
            sep="\n",
            ping=config.ping_seconds,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
            send_timeout=config.send_timeout_seconds,
        )
        self._on_end = on_end

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """With asyncio's own timer: every token is a frame, and anyio's cancel scope takes as long as making one."""
        try:
            async with asyncio.timeout(self.send_timeout):
                await send(message)
        except TimeoutError:
            raise SendTimeoutError from None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            # The client stopped reading. Its socket is full, so there is no way to tell it anything.
            return
        finally:
            if self._on_end is not None:
                self._on_end()
