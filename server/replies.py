"""JSON responses, encoded once and the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from server.failures import describe


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    content = msgspec.json.encode(body)
    return Response(content, status_code=status, headers=dict(headers or {}), media_type="application/json")


def error_response(error: Exception) -> Response:
    failure = describe(error)
    return json_response(failure.body, failure.status, failure.headers)
