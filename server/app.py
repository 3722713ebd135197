"""`create_app`: one engine and one config become an ASGI app. Routes are listed here and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.routing import BaseRoute, Match, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from server.assets import Assets, web_folder
from server.config import ServerConfig
from server.failures import MethodNotAllowed, route_not_found
from server.ignored import IgnoredFields
from server.lifecycle import Lifecycle
from server.middleware import Envelope, Guard
from server.observe import Observe
from server.openai import OpenAI
from server.seam import BootableEngine
from server.ws import Sockets

OPEN_PATHS = ("/health", "/readyz", "/livez")


class App:
    """The ASGI app. `routes` is what it serves; `lifecycle` is how `server.run` ends it."""

    def __init__(self, engine: BootableEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.lifecycle = Lifecycle()
        assets = Assets(web_folder())
        self.routes = self._routes(assets)
        self.open_paths = frozenset({*OPEN_PATHS, *assets.names})
        self._router = Router(self.routes, redirect_slashes=False, default=self._no_route, lifespan=self._lifespan)
        guarded: ASGIApp = Guard(self._dispatch, config, self.open_paths)
        self._outermost: ASGIApp = Envelope(guarded, config)

    def _routes(self, assets: Assets) -> list[BaseRoute]:
        ignored = IgnoredFields()
        openai = OpenAI(self.engine, self.config, ignored)
        observe = Observe(self.engine, self.config, self.lifecycle)
        sockets = Sockets(self.engine, self.config, self.lifecycle, ignored)
        return [
            Route("/v1/chat/completions", openai.chat_completions, methods=["POST"]),
            Route("/v1/completions", openai.completions, methods=["POST"]),
            Route("/v1/models", openai.models),
            Route("/v1/models/{model_id:path}", openai.model),
            WebSocketRoute("/ws", sockets.handle),
            Route("/ws", sockets.refuse_http),
            Route("/steps", observe.steps),
            Route("/metrics", observe.metrics),
            Route("/health", observe.health),
            Route("/readyz", observe.health),
            Route("/livez", observe.livez),
            Route("/openapi.json", observe.openapi),
            *(Route(name, assets.file) for name in sorted(assets.names)),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._outermost(scope, receive, send)
        except asyncio.CancelledError:
            # uvicorn cancels what has not flushed by the end, such as a stream nobody reads. It would log a traceback.
            if not self.lifecycle.closing.is_set():
                raise

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            allowed = self._allowed_methods(scope)
            if allowed is not None:
                raise MethodNotAllowed(scope["method"], scope["path"][:200], allowed)
        await self._router(scope, receive, send)

    def _allowed_methods(self, scope: Scope) -> str | None:
        """The methods of the route at this path, if there is one and it does not take this method."""
        allowed: set[str] = set()
        for route in self.routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return None
            if match is Match.PARTIAL and isinstance(route, Route):
                allowed |= route.methods or set()
        return ", ".join(sorted(allowed)) or None

    async def _no_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise route_not_found(scope.get("method", "WS"), scope["path"])

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        async with self.engine:
            yield
            self.lifecycle.closing.set()


def create_app(engine: BootableEngine, config: ServerConfig | None = None) -> App:
    """The app that serves `engine`. Start-up enters the engine, which boots behind it, and returns at once.

    Serve it with `server.run.serve`, which ends open streams with the truth; a plain uvicorn cuts them off."""
    return App(engine, config or ServerConfig())
