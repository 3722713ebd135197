"""Deltas as the OpenAI API shows them: chunks of a stream, or one whole body. Encodes; decides nothing.

A `Shape` knows one request's identity (id, model, number of choices) and what separates chat from completions; the two
subclasses fill in the difference. Chunks are plain dicts, ready for the JSON encoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nanoserve.errors import Draining, Unavailable
from nanoserve.request import Delta, Finished, FinishReason, TokenLogprob, Usage
from server.failures import GenerationFailed

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
WIRE_REASONS: dict[str, str] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "timeout": "length"}


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Of a request that may still be running; all of its choices together."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    counts = usage_so_far(usage.prompt_tokens, usage.completion_tokens)
    return {**counts, "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


def nanoserve_body(finished: Finished) -> dict[str, Any]:
    """The `nanoserve` member: what the request cost in graphs and time."""
    body: dict[str, Any] = {"graph": asdict(finished.graph), "timings": asdict(finished.timings)}
    if "timeout" in finished.finish_reasons:
        body["finish_detail"] = "timeout"
    return body


def in_band_error(finished: Finished) -> Unavailable | None:
    """The error a terminal record stands for on /v1, where only finished answers have a finish_reason."""
    if finished.error is not None or "error" in finished.finish_reasons:
        return GenerationFailed(f"generation failed: {finished.error or 'the engine gave no reason'}")
    if "draining" in finished.finish_reasons:
        return Draining("the server is shutting down and ended this answer early; send the request again")
    if "cancelled" in finished.finish_reasons:
        return GenerationFailed("generation was cancelled")
    return None


def logprob_value(value: float) -> float:
    return max(value, LOWEST_LOGPROB)


@dataclass(slots=True)
class Choice:
    """What has been seen of one choice and not been sent, or (for a whole body) all of it."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    started: bool = False
    characters_sent: int = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason

    def clear(self) -> None:
        self.characters_sent += len(self.text)
        self.text, self.logprobs, self.started = "", [], True


class Shape(ABC):
    """Chunks and bodies of one request. `echo` is the text each prompt's choices start with."""

    chunk_object: str
    body_object: str

    def __init__(
        self, *, response_id: str, created: int, model: str, choices: int, logprobs: bool, echo: Sequence[str] = ()
    ) -> None:
        self._head = {"id": response_id, "created": created, "model": model}
        self._logprobs = logprobs
        self.choices = [Choice(index) for index in range(choices)]
        for index in range(choices if echo else 0):
            self.choices[index].text = echo[index * len(echo) // choices]

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """The chunk `delta` makes, or None while it holds no text and ends nothing."""
        choice = self.choices[delta.index]
        choice.add(delta)
        reason = None if delta.finish_reason is None else WIRE_REASONS.get(delta.finish_reason)
        if not choice.text and reason is None:
            return None
        chunk: dict[str, Any] = {"object": self.chunk_object, **self._head}
        chunk["choices"] = [self.chunk_choice(choice, reason)]
        if delta.finished is not None:
            chunk["nanoserve"] = nanoserve_body(delta.finished)
        choice.clear()
        return chunk

    def usage_chunk(self, finished: Finished) -> dict[str, Any]:
        return {"object": self.chunk_object, **self._head, "choices": [], "usage": usage_body(finished.usage)}

    def body(self, finished: Finished) -> dict[str, Any]:
        """The whole answer, after every delta went through `Choice.add`."""
        body: dict[str, Any] = {"object": self.body_object, **self._head}
        body["choices"] = [
            self.body_choice(choice, WIRE_REASONS[choice.finish_reason or "stop"]) for choice in self.choices
        ]
        body["usage"] = usage_body(finished.usage)
        body["nanoserve"] = nanoserve_body(finished)
        return body

    @abstractmethod
    def chunk_choice(self, choice: Choice, reason: str | None) -> dict[str, Any]:
        """One choice of a streamed chunk."""

    @abstractmethod
    def body_choice(self, choice: Choice, reason: str) -> dict[str, Any]:
        """One choice of a whole answer."""


class ChatShape(Shape):
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def chunk_choice(self, choice: Choice, reason: str | None) -> dict[str, Any]:
        delta: dict[str, Any] = {} if choice.started else {"role": "assistant"}
        if choice.text or not choice.started:
            delta["content"] = choice.text
        return {"index": choice.index, "delta": delta, "logprobs": self._entries(choice), "finish_reason": reason}

    def body_choice(self, choice: Choice, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": self._entries(choice), "finish_reason": reason}

    def _entries(self, choice: Choice) -> dict[str, Any] | None:
        return self.entries(choice) if self._logprobs else None

    @classmethod
    def entries(cls, choice: Choice) -> dict[str, Any]:
        """The `logprobs` object of the chat API for the tokens of `choice`."""
        entries = []
        for token in choice.logprobs:
            entry = cls._entry(token)
            entry["top_logprobs"] = [cls._entry(other) for other in token.top]
            entries.append(entry)
        return {"content": entries, "refusal": None}

    @staticmethod
    def _entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": logprob_value(token.logprob), "bytes": list(token.raw)}


class TextShape(Shape):
    chunk_object = "text_completion"
    body_object = "text_completion"

    def chunk_choice(self, choice: Choice, reason: str | None) -> dict[str, Any]:
        return {"index": choice.index, "text": choice.text, "logprobs": self._columns(choice), "finish_reason": reason}

    body_choice = chunk_choice

    def _columns(self, choice: Choice) -> dict[str, Any] | None:
        """The four parallel lists of the completions API; text_offset counts characters from the answer's start."""
        if not self._logprobs:
            return None
        offset, offsets = choice.characters_sent, []
        for token in choice.logprobs:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [token.text for token in choice.logprobs],
            "token_logprobs": [logprob_value(token.logprob) for token in choice.logprobs],
            "top_logprobs": [{o.text: logprob_value(o.logprob) for o in token.top} for token in choice.logprobs],
            "text_offset": offsets,
        }
