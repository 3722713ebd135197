"""A typed body becomes the requests it stands for: prompts flattened, aliases resolved, the model's defaults filled in,
and everything this deployment cannot honour refused. What only the loaded model knows is left to `Engine.submit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.errors import InvalidRequest, ModelNotFound, Unsupported
from nanoserve.request import MAX_BIASES, ChatPrompt, Prompt, Request, SamplingParams, TextPrompt, TokenPrompt
from server.config import ServerConfig
from server.schemas import (
    BIAS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    TOKEN_ID,
    ChatBody,
    CompletionBody,
    Message,
    SamplingBody,
    StreamOptions,
)
from server.seam import Engine

ROLES = ("system", "developer", "user", "assistant", "tool")
COMPLETION_MAX_TOKENS = 16
NUMERIC_FIELDS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGER_FIELDS = ("top_k", "seed", "n")


@dataclass(frozen=True, slots=True)
class Served:
    """What is served now, as far as it is known: model names (the first is canonical) and sampling defaults."""

    names: tuple[str, ...]
    defaults: Mapping[str, float]


def served_now(engine: Engine, config: ServerConfig) -> Served:
    snapshot = engine.snapshot()
    names = (config.served_model_name,) if config.served_model_name else tuple(snapshot.model_names)
    return Served(names, snapshot.sampling_defaults)


@dataclass(frozen=True, slots=True)
class Job:
    """One client request. `echo` holds, for each prompt, the text its completion starts with."""

    requests: tuple[Request, ...]
    model: str
    stream: bool
    stream_options: StreamOptions
    echo: tuple[str, ...] = ()

    @property
    def choices(self) -> int:
        return sum(request.params.n for request in self.requests)


def chat_job(body: ChatBody, served: Served, request_id: str) -> Job:
    """Raises ClientError."""
    if body.tools or body.functions:
        name = "tools" if body.tools else "functions"
        raise Unsupported(f"{name} is not supported by this server; leave it out", param=name)
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        message = f"response_format type {str(kind)[:40]!r} is not supported; send text or leave it out"
        raise Unsupported(message, param="response_format")
    if not body.messages:
        raise InvalidRequest("messages is empty; send at least one message", param="messages")
    count = sum(len(message.content) if isinstance(message.content, list) else 1 for message in body.messages)
    if count > MAX_MESSAGES:
        text = f"messages has {count:,} entries, text parts counted; the limit is {MAX_MESSAGES:,}; send fewer"
        raise InvalidRequest(text, param="messages")
    top_logprobs = body.integer("top_logprobs")
    if top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs; send logprobs: true with it", param="top_logprobs")
    logprobs = (top_logprobs or 0) if body.logprobs else None
    prompt = ChatPrompt(tuple(flat_message(message, i) for i, message in enumerate(body.messages)))
    params = sampling(body, served, logprobs=logprobs, max_tokens=max_tokens(body, None))
    return _job(body, served, (prompt,), params, request_id)


def completion_job(body: CompletionBody, served: Served, request_id: str) -> Job:
    """Raises ClientError."""
    if body.suffix:
        raise Unsupported("suffix is not supported; leave it out", param="suffix")
    n, best_of = body.integer("n") or 1, body.integer("best_of")
    if best_of is not None and best_of != n:
        raise Unsupported(f"best_of is {best_of} and n is {n}; only best_of = n is supported", param="best_of")
    found = prompts(body.prompt)
    if len(found) * n > MAX_CHOICES:
        message = f"{len(found)} prompts x {n} choices is {len(found) * n}; the limit is {MAX_CHOICES}; send fewer"
        raise InvalidRequest(message, param="prompt")
    logprobs = body.integer("logprobs")
    echo: tuple[str, ...] = ()
    if body.echo:
        if logprobs is not None:
            raise Unsupported("echo with logprobs is not supported; leave one of them out", param="echo")
        if any(not isinstance(prompt, TextPrompt) for prompt in found):
            raise Unsupported("echo needs the prompt as text, not as token ids", param="echo")
        echo = tuple(prompt.text for prompt in found if isinstance(prompt, TextPrompt))
    params = sampling(body, served, logprobs=logprobs, max_tokens=max_tokens(body, COMPLETION_MAX_TOKENS))
    return _job(body, served, found, params, request_id, echo)


def _job(
    body: SamplingBody,
    served: Served,
    found: Sequence[Prompt],
    params: SamplingParams,
    request_id: str,
    echo: tuple[str, ...] = (),
) -> Job:
    if body.model is not None and served.names and body.model not in served.names:
        message = f"model {body.model[:100]!r} is not served here; this server has: {', '.join(served.names)}"
        raise ModelNotFound(message, param="model")
    if body.cache_salt == "":
        raise InvalidRequest("cache_salt is empty; send at least one character, or leave it out", param="cache_salt")
    timeout, priority, salt = body.number("timeout"), body.integer("priority") or 0, body.cache_salt or ""
    suffixes = [""] if len(found) == 1 else [f"-{i}" for i in range(len(found))]
    requests = tuple(
        Request(request_id + suffix, prompt, params, None if timeout is None else float(timeout), priority, salt)
        for prompt, suffix in zip(found, suffixes, strict=True)
    )
    model = body.model or (served.names[0] if served.names else "")
    return Job(requests, model, bool(body.stream), body.stream_options or StreamOptions(), echo)


def max_tokens(body: SamplingBody, default: int | None) -> int | None:
    """`max_completion_tokens` is the newer name and wins; both are checked."""
    old, new = body.integer("max_tokens"), body.integer("max_completion_tokens")
    return new if new is not None else old if old is not None else default


def sampling(body: SamplingBody, served: Served, *, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
    """The model's defaults under the fields the client sent. Raises InvalidRequest."""
    known = {*NUMERIC_FIELDS, "top_k"}
    values: dict[str, Any] = {name: value for name, value in served.defaults.items() if name in known}
    values.update((name, float(v)) for name in NUMERIC_FIELDS if (v := body.number(name)) is not None)
    values.update((name, v) for name in INTEGER_FIELDS if (v := body.integer(name)) is not None)
    values["top_k"] = max(0, int(values.get("top_k", 0)))
    return SamplingParams(
        **values,
        logprobs=logprobs,
        max_tokens=max_tokens,
        stop=stops(body.stop),
        stop_token_ids=token_ids(body.stop_token_ids or [], "stop_token_ids", MAX_STOP_TOKENS),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=biases(body.logit_bias or {}),
    )


def stops(value: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings without the empty ones, which would stop nothing or everything."""
    found = [value] if isinstance(value, str) else value or []
    if len(found) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(found)} entries; the limit is {MAX_STOPS}; send fewer", param="stop")
    longest = max(map(len, found), default=0)
    if longest > MAX_STOP_CHARACTERS:
        text = f"a stop string has {longest:,} characters; the limit is {MAX_STOP_CHARACTERS:,}; send a shorter one"
        raise InvalidRequest(text, param="stop")
    return tuple(text for text in found if text)


def token_ids(values: Sequence[Any], param: str, limit: int | None = None) -> tuple[int, ...]:
    if limit is not None and len(values) > limit:
        raise InvalidRequest(f"{param} has {len(values)} entries; the limit is {limit}; send fewer", param=param)
    if set(map(type, values)) == {int} and min(values) >= TOKEN_ID.low and max(values) <= TOKEN_ID.high:
        return tuple(values)  # a million ids would take a second one by one
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            message = f"{param}[{index}] is of type {type(value).__name__}; token ids are integers"
            raise InvalidRequest(message, param=param)
        TOKEN_ID.check(f"{param}[{index}]", value)
    return tuple(int(value) for value in values)


def biases(value: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(value) > MAX_BIASES:
        message = f"logit_bias has {len(value)} entries; the limit is {MAX_BIASES}; send fewer"
        raise InvalidRequest(message, param="logit_bias")
    found = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= TOKEN_ID.high):
            message = f"logit_bias key {key[:40]!r} is not a token id; keys are whole numbers from 0"
            raise InvalidRequest(message, param="logit_bias")
        found.append((int(key), float(BIAS.check(f"logit_bias.{key}", bias))))
    return tuple(found)


def prompts(value: str | list[Any]) -> tuple[Prompt, ...]:
    """The four forms of `prompt`: a text, texts, token ids, lists of token ids. Raises InvalidRequest."""
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not value:
        raise InvalidRequest("prompt is an empty list; send a text or at least one token id", param="prompt")
    if len(value) > MAX_CHOICES and not _is_number(value[0]):
        message = f"prompt has {len(value)} entries; the limit is {MAX_CHOICES}; send fewer"
        raise InvalidRequest(message, param="prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(TextPrompt(item) for item in value)
    if all(isinstance(item, list) for item in value):
        for index, item in enumerate(value):
            if not item:
                raise InvalidRequest(f"prompt[{index}] is empty; send at least one token id", param="prompt")
        return tuple(TokenPrompt(token_ids(item, f"prompt[{i}]")) for i, item in enumerate(value))
    return (TokenPrompt(token_ids(value, "prompt")),)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def flat_message(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates take it: `content` is one text, `developer` is `system`."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        text = f"{where}.role is {message.role[:40]!r}; it must be one of {', '.join(ROLES)}"
        raise InvalidRequest(text, param=f"{where}.role")
    flat: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.content is None:
        if not (message.role == "assistant" and message.tool_calls):
            text = f"{where}.content is missing; only an assistant message with tool_calls may leave it out"
            raise InvalidRequest(text, param=f"{where}.content")
        flat["content"] = ""
    elif isinstance(message.content, str):
        flat["content"] = message.content
    else:
        parts = enumerate(message.content)
        flat["content"] = "\n".join(part_text(part, f"{where}.content[{i}]") for i, part in parts)
    extras = {"name": message.name, "tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
    return flat | {key: value for key, value in extras.items() if value}


def part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f'{where} must be an object such as {{"type": "text", "text": "…"}}', param=where)
    if kind != "text":
        raise Unsupported(f"{where} is of type {kind[:40]!r}; this model reads text parts only", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text is missing or no text", param=f"{where}.text")
    return str(part["text"])
