"""/openapi.json, made from the body types and the limits that check them."""

from __future__ import annotations

from typing import Any

import msgspec

import nanoserve
from server.schemas import LIMITS, ChatBody, CompletionBody

JSON = "application/json"
SSE = "text/event-stream"


def document() -> dict[str, Any]:
    bodies, components = msgspec.json.schema_components(
        [ChatBody, CompletionBody], ref_template="#/components/schemas/{name}"
    )
    for name in ("ChatBody", "CompletionBody"):
        for field, schema in components[name]["properties"].items():
            if field in LIMITS and {"type": "boolean"} not in schema.get("anyOf", []):
                components[name]["properties"][field] = _number_schema(field)
    components["Error"] = _ERROR
    generate = "Streams chunks and a closing [DONE] when stream is true, else answers with one JSON body."
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"post": _operation("Chat completion", generate, [JSON, SSE], body=bodies[0])},
        "/v1/completions": {"post": _operation("Text completion", generate, [JSON, SSE], body=bodies[1])},
        "/v1/models": {"get": _operation("The served models", "", [JSON])},
        "/v1/models/{id}": {"get": _operation("One served model", "", [JSON], parameters=[_parameter("id", "path")])},
        "/ws": {"get": _operation("WebSocket, protocol nanoserve.v1", "Generations and live events.", [JSON])},
        "/steps": {"get": _operation("Boot and step events", "Endless.", [SSE])},
        "/metrics": {
            "get": _operation("Counters and latencies", "", [JSON, "text/plain"], [_parameter("format", "query")])
        },
        "/health": {"get": _operation("Readiness", "503 until a request would be served.", [JSON])},
        "/readyz": {"get": _operation("Readiness", "Another name of /health.", [JSON])},
        "/livez": {"get": _operation("Liveness", "200 while the process can answer.", [JSON])},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanoserve", "version": nanoserve.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _number_schema(field: str) -> dict[str, Any]:
    limit = LIMITS[field]
    low = "exclusiveMinimum" if limit.open_low else "minimum"
    kind = "integer" if limit.integer else "number"
    return {"anyOf": [{"type": kind, low: limit.low, "maximum": limit.high}, {"type": "null"}], "default": None}


def _parameter(name: str, where: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if name == "format":
        schema["enum"] = ["json", "prometheus"]
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _operation(
    summary: str,
    description: str,
    media: list[str],
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    failure = {"description": "An error.", "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "Success.", "content": {kind: {} for kind in media}}, "default": failure},
    }
    if description:
        operation["description"] = description
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return operation
