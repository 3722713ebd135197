"""From a config to an exit code: bind first, serve, and end every stream with the truth when told to stop.

Signals (see `Server.handle_exit`): the first one drains, a second one more than a second later ends what still runs, a
third one ends the process where it stands. make and process groups deliver one key press twice, hence the second.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from sse_starlette.sse import AppStatus

from nanoserve.errors import ConfigError, PortTaken, StartupError
from server.app import App, create_app
from server.config import ServerConfig
from server.protocol import BoundedHttpProtocol
from server.seam import BootableEngine

SAME_SIGNAL_SECONDS = 1.0
HURRIED_SECONDS = 1.0
FLUSH_SECONDS = 3
SOCKET_SECONDS = 2.5  # time for a socket's last frames and its close frame
STUCK_SECONDS = 10.0
BACKLOG = 2048

logger = logging.getLogger("nanoserve.server")


def bind(config: ServerConfig) -> list[socket.socket]:
    """Listening sockets for every address of the host, all on one port. Raises PortTaken or ConfigError."""
    host, port = config.host, config.port
    if not 0 <= port <= 65_535:
        raise ConfigError(f"port is {port}; the limit is 65535; pass another --port")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host {host!r} has no address ({error}); pass another --host") from error
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            bound.append(_listen(family, (address[0], port, *address[2:])))
            port = bound[0].getsockname()[1]
    except OSError as error:
        for each in bound:
            each.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken by another process; stop it or pass another --port"
            raise PortTaken(message) from error
        raise ConfigError(f"cannot listen on {host} port {port} ({error.strerror}); pass another address") from error
    return bound


def _listen(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere the option would let two servers share the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # claims the port: a bound socket alone would let another process listen
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def exposure_warning(config: ServerConfig) -> str | None:
    """What to say about an address that others can reach and that asks for no key."""
    if config.is_loopback or config.api_keys:
        return None
    return f"{config.host} is open to the network and asks for no key; pass --api-key, or --host 127.0.0.1"


def page_address(config: ServerConfig, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}/"


def log_config(level: str) -> dict[str, Any]:
    """Lines on stderr. uvicorn never says less than a warning: below it stand queries and headers, and so keys."""
    uvicorn_level = "ERROR" if level == "error" else "WARNING"
    common = {"handlers": ["stderr"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "filters": {"ours": {"()": _NotTheClients}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["ours"]}},
        "loggers": {
            "uvicorn": {**common, "level": uvicorn_level},
            "nanoserve": {**common, "level": level.upper()},
        },
    }


class _NotTheClients(logging.Filter):
    """Drops what uvicorn logs as an error, with a traceback even, though a client did it and has been answered: a
    WebSocket that was refused by an HTTP response, and a text frame that is no UTF-8 (closed with 1007)."""

    MESSAGES = (
        "ASGI callable returned without completing handshake.",
        "Invalid UTF-8 sequence received from client.",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg not in self.MESSAGES


def uvicorn_config(app: App) -> uvicorn.Config:
    config = app.config
    return uvicorn.Config(
        app,
        loop="asyncio" if sys.platform == "win32" else "uvloop",
        http=functools.partial(BoundedHttpProtocol, max_header_bytes=config.max_header_bytes),  # type: ignore[arg-type]
        ws="websockets-sansio",
        ws_max_size=config.max_message_bytes,
        ws_ping_interval=config.ping_seconds,
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=log_config(config.log_level),
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


class Server(uvicorn.Server):
    """uvicorn's server with our ending. `exit_code` is the process's once `run` has returned."""

    def __init__(self, app: App, address: str) -> None:
        super().__init__(uvicorn_config(app))
        self.exit_code = 0
        self._app = app
        self._address = address
        self.loop: asyncio.AbstractEventLoop | None = None
        self._signals: list[float] = []
        self._hurry = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watchdog: threading.Timer | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            await super().serve(sockets)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._watchdog is not None:
                self._watchdog.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Watching starts before the engine does: a boot may fail before uvicorn has set up its listeners.
        self._tasks.append(asyncio.create_task(self._watch_boot()))
        await asyncio.sleep(0)
        await super().startup(sockets)

    async def _watch_boot(self) -> None:
        async for event in self._app.engine.events():
            if event.get("type") != "boot":
                continue
            if event["stage"] in ("ready", "degraded"):
                print(f"nanoserve is ready: {self._address}", flush=True)
                return
            if event["stage"] == "failed" and event.get("exit_code") is not None:
                print(f"nanoserve: {event.get('message') or 'the engine could not start'}", file=sys.stderr, flush=True)
                self.exit_code = int(event["exit_code"])
                await self._app.lifecycle.close(HURRIED_SECONDS)
                self.should_exit = True
                return

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs in the signal handler, on the main thread. Does not call super: uvicorn would close the listener and the
        sockets at once, and raise the signal again at the end."""
        now = time.monotonic()
        if self.loop is None or (self._signals and now - self._signals[-1] <= SAME_SIGNAL_SECONDS):
            return
        self._signals.append(now)
        if len(self._signals) == 1:
            self._watch(self._app.config.drain_seconds + STUCK_SECONDS)
            self.loop.call_soon_threadsafe(self.begin_drain)
        elif len(self._signals) == 2:
            self._watch(STUCK_SECONDS)
            self.loop.call_soon_threadsafe(self._hurry.set)
        else:
            os._exit(1)

    def _watch(self, seconds: float) -> None:
        """A native call that never returns must not keep the process: end it hard when the time is over."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = threading.Timer(seconds, _end_hard, (seconds,))
        self._watchdog.daemon = True
        self._watchdog.start()

    def begin_drain(self) -> None:
        """Start the end, on the loop: see `_drain`."""
        self._tasks.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        """Generations end, then sockets and endless streams, then uvicorn. The listener is open until then."""
        engine, seconds = self._app.engine, self._app.config.drain_seconds
        ending = asyncio.create_task(engine.drain(seconds))
        hurried = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait({ending, hurried}, timeout=seconds + 1, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                with suppress(TimeoutError):
                    await asyncio.wait_for(engine.drain(0), HURRIED_SECONDS)
            elif ending.exception() is not None:
                logger.error("drain failed", exc_info=ending.exception())
        finally:
            ending.cancel()
            hurried.cancel()
            await self._app.lifecycle.close(SOCKET_SECONDS)
            self.should_exit = True


def _end_hard(seconds: float) -> None:
    print(f"nanoserve: still not stopped after {seconds:.0f} s; ending the process", file=sys.stderr, flush=True)
    os._exit(1)


def end_process(code: int) -> NoReturn:
    """Flush and leave without the interpreter's finalisation: the engine's daemon thread may be inside native code,
    which finalisation would unwind, aborting the process with another code."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def serve(engine: BootableEngine, config: ServerConfig, sockets: list[socket.socket] | None = None) -> int:
    """Serve until a signal or a failed boot; the exit code. `sockets` come from `bind`, or None to bind here."""
    try:
        bound = bind(config) if sockets is None else sockets
    except StartupError as error:
        print(f"nanoserve: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    warning = exposure_warning(config)
    if warning is not None:
        print(f"nanoserve: warning: {warning}", file=sys.stderr, flush=True)
    # Streams end by `Server._drain`, with a terminal event; the library would cut them off when uvicorn shuts down.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    address = page_address(config, bound[0].getsockname()[1])
    print(f"nanoserve listens on {address} and loads the model behind it", flush=True)
    server = Server(create_app(engine, config), address)
    try:
        server.run(bound)
    except SystemExit as stopped:  # uvicorn's way to say that start-up failed; it has logged why
        return 1 if stopped.code else 0
    return server.exit_code
