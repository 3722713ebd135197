"""The WebSocket: any number of generations and the live feed over one connection (protocol `nanoserve.v1`).

    reader task      always sits in receive(), or pongs go unread and the peer is declared dead; it sends only a close
    outbox task      sends what the reader has to say
    one task per generation, one for the live feed; each sends its own frames and so feels the client's pace

Whatever ends the socket cancels the tasks, and each generation task aborts its request on the way out.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from nanoserve.errors import ClientError, InvalidRequest, NanoserveError
from nanoserve.request import Delta, Finished
from server.config import ServerConfig
from server.failures import GenerationFailed, UpgradeRequired, describe
from server.ignored import IgnoredFields
from server.lifecycle import Lifecycle
from server.schemas import ChatBody, CompletionBody, convert, decode, off_loop
from server.seam import Engine
from server.shapes import ChatShape, Choice, in_band_error, nanoserve_body, usage_body
from server.submission import Submission
from server.translate import Job, chat_job, completion_job, served_now

SUBPROTOCOL = "nanoserve.v1"
MAX_GENERATIONS = 128
MAX_ID = 128
OUTBOX_FRAMES = 256
FRAME_FIELDS = frozenset({"type", "id"})  # beside the fields of the /v1 bodies
GOING_AWAY, POLICY_VIOLATION = 1001, 1008
CLOSE_SECONDS = 1.0

logger = logging.getLogger("nanoserve.server")


class Sockets:
    """The /ws handler, bound to one engine."""

    def __init__(self, engine: Engine, config: ServerConfig, lifecycle: Lifecycle, ignored: IgnoredFields) -> None:
        self._engine = engine
        self._config = config
        self._lifecycle = lifecycle
        self._ignored = ignored

    async def handle(self, websocket: WebSocket) -> None:
        with self._lifecycle.socket():
            await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in websocket.scope["subprotocols"] else None)
            await Connection(websocket, self._engine, self._config, self._lifecycle, self._ignored).run()

    async def refuse_http(self, request: Request) -> Response:
        raise UpgradeRequired("/ws speaks WebSocket; connect to it with a ws:// client")


@dataclass(slots=True)
class Live:
    """A generation of this socket: the client's id, ours, and whether the client has cancelled it."""

    id: str
    request_id: str
    cancelled: bool = False


class Connection:
    def __init__(
        self,
        websocket: WebSocket,
        engine: Engine,
        config: ServerConfig,
        lifecycle: Lifecycle,
        ignored: IgnoredFields,
    ) -> None:
        self._websocket = websocket
        self._engine = engine
        self._config = config
        self._lifecycle = lifecycle
        self._ignored = ignored
        self._prefix = f"ws-{secrets.token_hex(8)}"
        self._count = 0
        self._live: dict[str, Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._generations: set[asyncio.Task[None]] = set()
        self._feed: asyncio.Task[None] | None = None
        self._outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue(OUTBOX_FRAMES)

    async def run(self) -> None:
        """Until the client leaves, breaks the rules, or the process closes."""
        reader = self._spawn(self._read)
        outbox = self._spawn(self._send_outbox)
        closing = self._spawn(self._closed)
        try:
            done, _ = await asyncio.wait({reader, outbox, closing}, return_when=asyncio.FIRST_COMPLETED)
            if closing in done and reader not in done:
                # Every generation has ended by now; what is left is to let their last frames out.
                if self._generations:
                    await asyncio.wait(self._generations, timeout=CLOSE_SECONDS)
                await self._close(GOING_AWAY, "the server is shutting down")
            for task in done:
                task.result()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(_until_disconnect(work, *args))
        self._tasks.add(task)
        return task

    async def _closed(self) -> None:
        await self._lifecycle.closing.wait()

    async def _close(self, code: int, reason: str) -> None:
        """The close frame waits behind what the client has not read, and so not for ever."""
        with suppress(WebSocketDisconnect, WebSocketDisconnected, TimeoutError):
            await asyncio.wait_for(self._websocket.close(code, reason), CLOSE_SECONDS)

    # --- from the client

    async def _read(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                await self._take_or_reply(message.get("text"))
            except asyncio.QueueFull:
                await self._close(POLICY_VIOLATION, f"{OUTBOX_FRAMES} error replies are unread")
                return

    async def _take_or_reply(self, text: str | None) -> None:
        """One message; `text` is None for a binary one. Raises QueueFull when the client reads no replies."""
        try:
            if text is None:
                raise InvalidRequest("binary frames are not understood; send text frames of JSON")
            self._take(await off_loop(len(text), partial(decode, text, dict[str, Any])))
        except ClientError as error:
            self._reply_error(error)

    def _take(self, frame: dict[str, Any]) -> None:
        """One client frame. Unknown types are ignored. Raises ClientError."""
        kind = frame.get("type")
        if kind == "generate":
            self._start(frame)
        elif kind == "cancel":
            live = self._live.get(frame["id"]) if isinstance(frame.get("id"), str) else None
            if live is not None:
                live.cancelled = True
                self._engine.abort(live.request_id)
        elif kind in ("subscribe", "unsubscribe"):
            self._subscribe(frame, kind == "subscribe")
        elif not isinstance(kind, str):
            raise InvalidRequest('the frame has no type; send {"type": "generate", …}', param="type")

    def _subscribe(self, frame: dict[str, Any], on: bool) -> None:
        if frame.get("channel") != "live":
            shown = repr(frame.get("channel"))[:40]
            raise InvalidRequest(f"channel is {shown}; the one channel is 'live'", param="channel")
        if on and (self._feed is None or self._feed.done()):
            self._feed = self._spawn(self._send_events)
            self._feed.add_done_callback(self._tasks.discard)
        elif not on and self._feed is not None:
            self._feed.cancel()
            self._feed = None

    def _start(self, frame: dict[str, Any]) -> None:
        identity = frame.get("id")
        if not isinstance(identity, str) or not 0 < len(identity) <= MAX_ID:
            raise InvalidRequest(f"id must be a text of 1 to {MAX_ID} characters", param="id")
        if identity in self._live:
            # Without the id in the reply: with it, the reply would end the generation that owns the id.
            message = f"id {identity!r} is in use by a running generation; choose another or wait for its done"
            raise InvalidRequest(message, param="id", code="duplicate_id")
        try:
            if len(self._live) >= MAX_GENERATIONS:
                message = f"{len(self._live)} generations run here; the limit is {MAX_GENERATIONS}; wait for one to end"
                raise InvalidRequest(message, code="too_many_generations")
            self._count += 1
            job = self._job(frame, f"{self._prefix}-{self._count}")
        except ClientError as error:
            self._reply_error(error, identity)
            return
        live = self._live[identity] = Live(identity, job.requests[0].request_id)
        task = self._spawn(self._generate, live, job)
        self._generations.add(task)
        task.add_done_callback(self._generations.discard)
        task.add_done_callback(self._tasks.discard)

    def _job(self, frame: dict[str, Any], request_id: str) -> Job:
        """The frame's fields are those of the /v1 bodies: `messages` makes it a chat, `prompt` a completion."""
        served = served_now(self._engine, self._config)
        if ("messages" in frame) == ("prompt" in frame):
            raise InvalidRequest("send exactly one of messages and prompt", param="messages")
        kind = ChatBody if "messages" in frame else CompletionBody
        self._ignored.note(frame, kind, known=FRAME_FIELDS)
        if kind is ChatBody:
            return chat_job(convert(frame, ChatBody), served, request_id)
        job = completion_job(convert(frame, CompletionBody), served, request_id)
        if len(job.requests) > 1:
            message = f"prompt has {len(job.requests)} entries; a frame takes one; send a frame for each"
            raise InvalidRequest(message, param="prompt")
        return job

    # --- to the client

    def _reply_error(self, error: Exception, identity: str | None = None) -> None:
        reply: dict[str, Any] = {"type": "error", **({} if identity is None else {"id": identity})}
        self._outbox.put_nowait(reply | describe(error).body)

    async def _send(self, payload: dict[str, Any]) -> None:
        await self._websocket.send({"type": "websocket.send", "text": msgspec.json.encode(payload).decode()})

    async def _send_outbox(self) -> None:
        while True:
            await self._send(await self._outbox.get())

    async def _send_events(self) -> None:
        async for event in self._engine.events():
            await self._send({"type": "live", "event": event})

    async def _generate(self, live: Live, job: Job) -> None:
        """One generation from `start` to its single `done` or `error`."""
        try:
            async with Submission(self._engine, job.requests) as submission:
                if live.cancelled:
                    self._engine.abort(live.request_id)
                start = {"type": "start", "id": live.id, "prompt_tokens": submission.prompt_tokens}
                await self._send({**start, "choices": job.choices})
                finished = await self._send_tokens(live, job, submission)
            end = terminal_frame(live.id, finished)
        except (WebSocketDisconnect, WebSocketDisconnected):
            raise
        except Exception as error:
            if not isinstance(error, NanoserveError):
                logger.exception("generation %s failed", live.request_id)
            end = {"type": "error", "id": live.id, **describe(error).body}
        finally:
            # Before the terminal frame leaves: a client that has seen it may use the id again at once.
            del self._live[live.id]
        await self._send(end)

    async def _send_tokens(self, live: Live, job: Job, submission: Submission) -> Finished:
        logprobs = job.requests[0].params.logprobs is not None
        choices = [Choice(index, text=job.echo[0] if job.echo else "") for index in range(job.choices)]
        waiting = [0] * job.choices
        last: Delta | None = None
        async with aclosing(submission.deltas()) as deltas:
            async for last in deltas:
                choice = choices[last.index]
                choice.add(last)
                waiting[last.index] += len(last.token_ids)
                if not choice.text:
                    continue
                frame: dict[str, Any] = {"type": "token", "id": live.id, "index": last.index, "text": choice.text}
                frame["tokens"] = waiting[last.index]
                if logprobs:
                    frame["logprobs"] = ChatShape.entries(choice)
                await self._send(frame)
                choice.clear()
                waiting[last.index] = 0
        if last is None or last.finished is None:
            raise GenerationFailed("generation failed: it ended without a terminal record")
        return last.finished


def terminal_frame(identity: str, finished: Finished) -> dict[str, Any]:
    if finished.error is not None or "error" in finished.finish_reasons:
        failure = in_band_error(finished)
        assert failure is not None
        return {"type": "error", "id": identity, **describe(failure).body}
    return {
        "type": "done",
        "id": identity,
        "finish_reason": finished.finish_reasons[0],
        "finish_reasons": finished.finish_reasons,
        "usage": usage_body(finished.usage),
        "nanoserve": nanoserve_body(finished),
    }


async def _until_disconnect(work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    """A client may leave during any send; that is no error of the task that was sending."""
    with suppress(WebSocketDisconnect, WebSocketDisconnected):
        await work(*args)
