"""Bodies of the generating routes: their fields, their limits, and the way from JSON bytes to a typed body.

Optional fields are `T | None`, null means absent, unknown fields are ignored. Integer fields are declared as
`int | float` because clients send `16.0`; `LIMITS` says what they may hold, for the checks and for /openapi.json alike.
What the fields add up to is `server.translate`'s business.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from nanoserve.errors import InvalidRequest
from nanoserve.request import MAX_TOP_LOGPROBS

Number = int | float
MAX_INT = 2**31 - 1
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_MESSAGES = 4096  # and text parts, over all messages
MAX_STOP_TOKENS = 256
MAX_CHOICES = 128
LONG_BODY = 64 * 1024  # reading a larger one takes milliseconds
MAX_PRIORITY = 1000  # either way; the lower, the sooner


@dataclass(frozen=True, slots=True)
class Limit:
    """A closed range of a numeric field; `open_low` excludes the lower end, `integer` takes whole numbers only."""

    low: Number
    high: Number
    integer: bool = False
    open_low: bool = False

    def check(self, name: str, value: Number) -> Number:
        if self.integer:
            if isinstance(value, float) and not value.is_integer():
                raise InvalidRequest(f"{name} is {value}; it takes whole numbers; send {round(value)}", param=name)
            value = int(value)
        if not self.low <= value <= self.high or (self.open_low and value == self.low):
            span = f"{'above ' if self.open_low else ''}{self.low} to {self.high}"
            raise InvalidRequest(f"{name} is {_short(value)}; the limit is {span}; send a value inside it", param=name)
        return value


LIMITS: dict[str, Limit] = {
    "n": Limit(1, MAX_CHOICES, integer=True),
    "best_of": Limit(1, MAX_CHOICES, integer=True),
    "max_tokens": Limit(1, MAX_INT, integer=True),
    "max_completion_tokens": Limit(1, MAX_INT, integer=True),
    "temperature": Limit(0.0, 2.0),
    "top_p": Limit(0.0, 1.0, open_low=True),
    "top_k": Limit(-1, MAX_INT, integer=True),
    "min_p": Limit(0.0, 1.0),
    "seed": Limit(-(2**63), 2**63 - 1, integer=True),
    "presence_penalty": Limit(-2.0, 2.0),
    "frequency_penalty": Limit(-2.0, 2.0),
    "repetition_penalty": Limit(0.0, 10.0, open_low=True),
    "logprobs": Limit(0, MAX_TOP_LOGPROBS, integer=True),
    "top_logprobs": Limit(0, MAX_TOP_LOGPROBS, integer=True),
    "timeout": Limit(0.0, 86_400.0, open_low=True),
    "priority": Limit(-MAX_PRIORITY, MAX_PRIORITY, integer=True),
}
BIAS = Limit(-100.0, 100.0)
TOKEN_ID = Limit(0, MAX_INT, integer=True)


def _short(value: Number) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:20]}… ({len(text)} digits)"


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage` asks for a last chunk with the usage, `continuous_usage_stats` (vLLM's) for the usage so far in
    every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Message(msgspec.Struct):
    """One chat message. `content` is text, a list of text parts, or null beside tool calls."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """The fields all generating bodies share. From `top_k` on they are extensions to the OpenAI API."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Number | None = None
    max_tokens: Number | None = None
    max_completion_tokens: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Number | None = None
    stop: str | list[str] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    top_k: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    stop_token_ids: list[Number] | None = None
    ignore_eos: bool | None = None
    timeout: Number | None = None
    priority: Number | None = None
    cache_salt: str | None = None

    def number(self, name: str) -> Number | None:
        """The field, checked against `LIMITS`; None if it was not sent. Raises InvalidRequest."""
        value = getattr(self, name)
        return None if value is None else LIMITS[name].check(name, value)

    def integer(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else int(value)


class ChatBody(SamplingBody, kw_only=True):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Number | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[Any]
    logprobs: Number | None = None
    echo: bool | None = None
    best_of: Number | None = None
    suffix: str | None = None


Body = TypeVar("Body")
Result = TypeVar("Result")
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """`work`, which reads JSON of `size` bytes or characters: on a thread if that takes more than a moment."""
    return await asyncio.to_thread(work) if size > LONG_BODY else work()


def decode(raw: bytes | str, kind: type[Body]) -> Body:
    """JSON to `kind`. Raises InvalidRequest with the offending field in `param`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_failure(error) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise not_json(str(error)) from None
    except RecursionError:
        raise not_json("it is nested too deeply") from None


def convert(value: Any, kind: type[Body]) -> Body:
    """`decode` for JSON that is already Python objects."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise _validation_failure(error) from None


def not_json(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid JSON: {why}; send one JSON object", code="invalid_json")


def _validation_failure(error: msgspec.ValidationError) -> InvalidRequest:
    found = _PATH.match(str(error))
    what = (found["what"] if found else str(error)).replace("`", "")
    path = (found["path"] if found else None) or None
    missing = re.match(r"Object missing required field (\w+)", what)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{path} is missing; it is required", param=path)
    where = path or "the body"
    return InvalidRequest(f"{where} has the wrong type or size: {what[0].lower()}{what[1:]}", param=path)
