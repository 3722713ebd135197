"""Render a conversation with the model's chat template.

A template is untrusted code that came with the weights: it runs in jinja2's immutable sandbox, and what it sees and how
it is compiled are what the templates were written against (transformers' `apply_chat_template`). Owns no token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from nanoserve.errors import BadCheckpoint, InvalidRequest


class ChatTemplate:
    """One compiled template. Immutable; rendering from several threads is safe.

    `variables` are what the template may name beside the conversation: `bos_token`, `eos_token` and their like.
    Raises BadCheckpoint, naming `origin`, if the source is no valid template.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str], origin: str) -> None:
        from jinja2 import TemplateSyntaxError

        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise BadCheckpoint(
                f"{origin}: the chat template cannot be compiled: {error.message} (line {error.lineno})"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. Raises InvalidRequest for messages of a wrong shape or that the template refuses."""
        conversation = plain_messages(messages)
        try:
            rendered: str = self._template.render(
                messages=conversation,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template can raise anything: a refusal of its own, or a plain TypeError
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error
        return rendered


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: no None values, content always text, tool arguments as objects.

    An absent or null content becomes `""`, since many templates would print "None" or fail; a tool call's arguments,
    JSON text on the wire, are handed over parsed because templates serialise them again. Raises InvalidRequest.
    """
    if not messages:
        raise InvalidRequest("messages is empty; a chat needs at least one message", param="messages")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise _wrong_type(f"{where}.role", message.get("role"), "a text such as 'user'")
    if not isinstance(plain.setdefault("content", ""), str):
        raise _wrong_type(f"{where}.content", plain["content"], "text")
    if "tool_calls" in plain:
        if not isinstance(plain["tool_calls"], list | tuple):
            raise _wrong_type(f"{where}.tool_calls", plain["tool_calls"], "a list")
        plain["tool_calls"] = [_parsed_call(call) for call in plain["tool_calls"]]
    return plain


def _wrong_type(param: str, value: object, needed: str) -> InvalidRequest:
    kind = "missing or null" if value is None else f"of type {type(value).__name__}"
    return InvalidRequest(f"{param} is {kind}; it must be {needed}", param=param)


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; when serving it is only a scope."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """jinja2's own filter escapes for HTML; models were trained on plain JSON."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
