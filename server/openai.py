"""The /v1 routes: parse, submit, respond. What a body means is `translate`'s, its encoding `shapes`' and `sse`'s."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from nanoserve.errors import ModelNotFound
from nanoserve.request import Delta, Finished
from server.config import ServerConfig
from server.failures import BodyTimeout, BodyTooLarge, GenerationFailed, UnsupportedMediaType
from server.ignored import IgnoredFields
from server.replies import json_response
from server.schemas import ChatBody, CompletionBody, SamplingBody, decode, off_loop
from server.seam import Engine
from server.shapes import ChatShape, Shape, TextShape, in_band_error
from server.sse import EventStream, completion_frames
from server.submission import Submission
from server.translate import Job, Served, chat_job, completion_job, served_now

Body = TypeVar("Body", bound=SamplingBody)
CLIENT_CLOSED = 499


class OpenAI:
    """Handlers of /v1, bound to one engine."""

    def __init__(self, engine: Engine, config: ServerConfig, ignored: IgnoredFields) -> None:
        self._engine = engine
        self._config = config
        self._ignored = ignored

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatBody, chat_job, ChatShape, "chatcmpl-")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody, completion_job, TextShape, "cmpl-")

    async def models(self, request: Request) -> Response:
        served = served_now(self._engine, self._config)
        return json_response({"object": "list", "data": [self._model(name) for name in served.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model_id"]
        served = served_now(self._engine, self._config)
        if name not in served.names:
            message = f"model {name[:100]!r} is not served here; this server has: {', '.join(served.names)}"
            raise ModelNotFound(message, param="model")
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        snapshot = self._engine.snapshot()
        return {
            "id": name,
            "object": "model",
            "created": snapshot.created,
            "owned_by": "nanoserve",
            "max_model_len": snapshot.max_model_len,
        }

    async def _generate(
        self,
        request: Request,
        kind: type[Body],
        translate: Callable[[Body, Served, str], Job],
        shape_of: type[Shape],
        prefix: str,
    ) -> Response:
        raw = await read_json_bytes(request, self._config)
        request_id = prefix + secrets.token_hex(12)
        served = served_now(self._engine, self._config)
        job = await off_loop(len(raw), lambda: translate(decode(raw, kind), served, request_id))
        self._ignored.note_body(raw, kind)
        shape = shape_of(
            response_id=request_id,
            created=int(time.time()),
            model=job.model,
            choices=job.choices,
            logprobs=job.requests[0].params.logprobs is not None,
            echo=job.echo,
        )
        submission = Submission(self._engine, job.requests)
        await submission.submit()
        if job.stream:
            frames = completion_frames(submission, shape, job.stream_options)
            return EventStream(frames, self._config, on_end=submission.close)
        try:
            return await _whole(submission, shape, request)
        finally:
            submission.close()


async def _whole(submission: Submission, shape: Shape, request: Request) -> Response:
    """The whole answer, or nothing if the client leaves first: nobody cancels a handler whose client is gone."""
    answer = asyncio.create_task(_collect(submission, shape))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=CLIENT_CLOSED)
        finished = answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.wait({answer, gone})
    failure = in_band_error(finished)
    if failure is not None:
        raise failure
    return json_response(shape.body(finished))


async def _collect(submission: Submission, shape: Shape) -> Finished:
    last: Delta | None = None
    async with aclosing(submission.deltas()) as deltas:
        async for last in deltas:
            shape.choices[last.index].add(last)
    if last is None or last.finished is None:
        raise GenerationFailed("generation failed: it ended without a terminal record")
    return last.finished


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_json_bytes(request: Request, config: ServerConfig) -> bytes:
    """The body. Raises UnsupportedMediaType or BodyTooLarge before it is read further, BodyTimeout if it
    does not end in time."""
    limit_bytes = config.max_body_bytes
    content_type = request.headers.get("content-type", "")
    media = content_type.partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        shown = repr(content_type[:80]) if content_type else "missing"
        raise UnsupportedMediaType(f"content-type is {shown}; send JSON with -H 'content-type: application/json'")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit_bytes:
        raise _too_large(declared[:20], limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit_bytes:
                    raise _too_large(f"more than {limit_bytes:,}", limit_bytes)
                parts.append(part)
    except TimeoutError:
        whole = f" of {declared[:20]}" if declared else ""
        raise BodyTimeout(
            f"{size}{whole} bytes of the body came in {config.body_seconds:g} s, which is the limit; send it whole"
        ) from None
    return b"".join(parts)


def _too_large(size: str, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is {size} bytes; the limit is {limit_bytes:,}; send a smaller one")
