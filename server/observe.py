"""What operators and dashboards read: /health, /livez, /metrics, /steps, /openapi.json. Changes nothing."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.config import ServerConfig
from server.failures import MAX_RETRY_AFTER_SECONDS
from server.lifecycle import Lifecycle
from server.middleware import AUTHORIZED
from server.openapi import document
from server.prometheus import OPENMETRICS, PLAIN, negotiate, render
from server.replies import json_response
from server.seam import Engine
from server.sse import EventStream, event_frames

READY = ("ready", "degraded")


class Observe:
    """Handlers bound to one engine."""

    def __init__(self, engine: Engine, config: ServerConfig, lifecycle: Lifecycle) -> None:
        self._engine = engine
        self._config = config
        self._lifecycle = lifecycle

    async def health(self, request: Request) -> Response:
        """Readiness. 200 exactly when a request would be served."""
        health = dict(self._engine.snapshot().health)
        ready = health["status"] in READY
        health["ready"] = ready
        if self._config.served_model_name:
            health["model"] = self._config.served_model_name
        headers = {"cache-control": "no-store"}
        eta = (health.get("progress") or {}).get("eta_seconds")
        if not ready and eta is not None:
            headers["retry-after"] = str(min(max(1, round(eta)), MAX_RETRY_AFTER_SECONDS))
        if not request.scope[AUTHORIZED]:
            health = {"status": health["status"], "ready": ready}
        return json_response(health, 200 if ready else 503, headers)

    async def livez(self, request: Request) -> Response:
        """Liveness: answers as long as the process can."""
        return json_response({"status": "alive"}, headers={"cache-control": "no-store"})

    async def metrics(self, request: Request) -> Response:
        metrics: dict[str, Any] = self._engine.snapshot().metrics
        headers = {"vary": "Accept", "cache-control": "no-store"}
        wanted = negotiate(request.query_params.get("format"), request.headers.get("accept", ""))
        if wanted in (PLAIN, OPENMETRICS):
            text = render(metrics, openmetrics=wanted == OPENMETRICS)
            return Response(text, headers={**headers, "content-type": wanted})
        return json_response(metrics, headers=headers)

    async def steps(self, request: Request) -> Response:
        return EventStream(event_frames(self._engine, self._lifecycle), self._config)

    async def openapi(self, request: Request) -> Response:
        return json_response(document())
