"""Chat templates: the text transformers renders, no None in it, and refusals that name the message."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest

from nanoserve.errors import BadCheckpoint, InvalidRequest
from nanoserve.tokens.chat import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
    {% for message in messages -%}
        {% if message.role == 'system' %}
<<SYS>>{{ message.content | trim }}<</SYS>>
        {% continue %}
        {% endif %}
        {% set ns.count = ns.count + 1 %}
{{ ns.count }} {{ message.role }}: {% generation %}{{ message.content }}{% endgeneration %}
        {% if ns.count > 5 %}{% break %}{% endif %}
    {% endfor %}
{% if tools is not none %}{{ tools | tojson }}{% endif %}
{{ undefined_name }}{{ '' if documents else 'no documents' }}"""
TOOLS = """{% for message in messages %}
{% if message.tool_calls is defined %}{% for call in message.tool_calls %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{% endfor %}{% elif message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{% else %}{{ message.role }}: {{ message.content }}
{% endif %}{% endfor %}{{ {'b': ['<é>', None, true], 'a': 1} | tojson(indent=2, sort_keys=true) }}"""

TALK = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "a\n\n<b> & 'c' \"d\" {{ 1 }} é😊\u2028"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "x"},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'},
]


def template(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate(source, variables=variables, origin="model.gguf")


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("source", [CHATML, BLOCKS, TOOLS], ids=["chatml", "blocks", "tools"])
@pytest.mark.parametrize("messages", [TALK, TALK[:1], TALK * 3], ids=["talk", "system only", "long"])
def test_text_is_what_transformers_renders(
    source: str, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=add_generation_prompt, bos_token="<s>"
    )
    got = template(source, bos_token="<s>").render(messages, add_generation_prompt=add_generation_prompt)
    assert [got] == expected


def test_tool_calls_are_what_transformers_renders_when_content_is_absent() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{key: value for key, value in message.items() if value is not None} for message in TOOL_TALK]
    expected, _ = render_jinja_template([messages], chat_template=TOOLS)
    assert [template(TOOLS).render(TOOL_TALK, add_generation_prompt=False)] == expected


@pytest.mark.parametrize("source", [CHATML, TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("content", [None, "", "absent"])
def test_prompt_never_says_none_when_content_is_empty(source: str, content: str | None) -> None:
    reply: dict[str, Any] = {"role": "assistant", "content": content, "name": None, "refusal": None}
    if content == "absent":
        del reply["content"]
    rendered = template(source).render([TOOL_TALK[0], reply, {**reply, "tool_calls": [CALL]}, TOOL_TALK[2]])
    assert "None" not in rendered
    assert "null" not in rendered.replace('"<é>",\n    null', "")


def test_tool_arguments_are_serialised_once_when_they_arrive_as_json_text() -> None:
    as_text = copy.deepcopy(TOOL_TALK)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Zürich", "days": 2}'
    assert template(TOOLS).render(as_text) == template(TOOLS).render(TOOL_TALK)


@pytest.mark.parametrize("arguments", ["", "{not json", "[1]", '"text"'])
def test_tool_arguments_are_kept_as_text_when_they_are_no_json_object(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert template(source).render([{"role": "assistant", "tool_calls": [call]}]) == arguments


def test_messages_are_unchanged_when_rendered() -> None:
    messages = copy.deepcopy(TOOL_TALK)
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{}"
    before = copy.deepcopy(messages)
    template(TOOLS).render(messages)
    assert messages == before


def test_date_is_todays_when_the_template_asks() -> None:
    days = [datetime.now().strftime("%d %b %Y")]
    rendered = template("{{ strftime_now('%d %b %Y') }}").render(TALK)
    days.append(datetime.now().strftime("%d %b %Y"))
    assert rendered in days


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + messages[0].missing }}", "missing"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(999999999) %}{% endfor %}", "too big"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_request_is_invalid_when_the_template_refuses(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        template(source).render(TALK)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([TALK[1], {"role": None, "content": "x"}], "messages[1].role"),
        ([TALK[1], {"role": "user", "content": [{"type": "text", "text": "A"}]}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_request_is_invalid_when_a_message_has_the_wrong_shape(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(CHATML).render(messages)
    assert caught.value.param == param


def test_checkpoint_is_bad_when_the_template_does_not_compile() -> None:
    with pytest.raises(BadCheckpoint, match=r"model\.gguf: the chat template .*line 2"):
        template("{{ bos_token }}\n{% for %}")
