"""From a Request to Sequences: rendering, tokenising, and every check that needs the loaded model. No torch.

A request that passes here can be served: its ids exist, and its prompt with the tokens it may generate fits the
context, which itself fits the K/V pool.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import replace

from nanoserve.errors import ContextLengthExceeded, InvalidRequest
from nanoserve.request import (
    MAX_BIASES,
    MAX_TOP_LOGPROBS,
    ChatPrompt,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from nanoserve.sequence import Sequence
from nanoserve.tokens import Tokenizer

GREEDY_UP_TO = 1e-4
"""Temperatures up to this are greedy: dividing logits by them loses digits without changing the choice."""
SEED_MASK = (1 << 63) - 1
LONG_CHARACTERS = 8192
"""Prompts beyond it take more than a moment to read: milliseconds for each 10,000 characters, or more."""
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_k": (-1, math.inf),
    "min_p": (0.0, 1.0),
    "n": (1, math.inf),
    "max_tokens": (1, math.inf),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-1e2, 1e2),
    "frequency_penalty": (-1e2, 1e2),
    "logprobs": (0, MAX_TOP_LOGPROBS),
}
"""What can be computed, whoever asks; a door may be narrower (the wire takes the OpenAI API's ranges)."""


class Intake:
    """vocab_size is the model's number of logits, which may exceed the tokenizer's number of tokens.

    max_model_len is what is enforced: prompt and generated tokens together. eos_token_ids is the union of what
    tokenizer, config and generation_config name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        block_size: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._block_size = block_size

    def sequences(self, request: Request) -> list[Sequence]:
        """One Sequence for each choice. Raises InvalidRequest, ContextLengthExceeded or Unsupported."""
        params = request.params
        check_ranges(params)
        self._check_ids("logit_bias", [token for token, _ in params.logit_bias])
        self._check_ids("stop_token_ids", params.stop_token_ids)
        prompt_ids = self._prompt_ids(request)
        max_tokens = self._max_tokens(len(prompt_ids), params)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        params = replace(
            params,
            temperature=params.temperature if params.temperature > GREEDY_UP_TO else 0.0,
            top_k=params.top_k if 0 < params.top_k < self._vocab_size else 0,
        )
        return [
            Sequence(
                request_id=request.request_id,
                choice=choice,
                prompt_ids=list(prompt_ids),
                params=params,
                seed=seed & SEED_MASK,
                max_tokens=max_tokens,
                stop_token_ids=frozenset(params.stop_token_ids),
                eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
                block_size=self._block_size,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            for choice in range(params.n)
        ]

    def is_long(self, prompt: Prompt) -> bool:
        """Whether `sequences` may take so long that it must not hold up an event loop."""
        if isinstance(prompt, ChatPrompt):
            values = (value for message in prompt.messages for value in message.values())
            return sum(len(v) if isinstance(v, str) else LONG_CHARACTERS for v in values) > LONG_CHARACTERS
        return len(prompt.text if isinstance(prompt, TextPrompt) else prompt.token_ids) > LONG_CHARACTERS

    def _prompt_ids(self, request: Request) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            param = "messages"
            rendered = self.tokenizer.render_chat(prompt.messages)
            self._check_length(self.tokenizer.fewest_tokens(rendered), param, "at least ")
            ids = self.tokenizer.encode_rendered(rendered)
        elif isinstance(prompt, TextPrompt):
            param = "prompt"
            self._check_length(self.tokenizer.fewest_tokens(prompt.text), param, "at least ")
            ids = self.tokenizer.encode(prompt.text)
        else:
            ids = list(prompt.token_ids)
            param = "prompt"
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param=param)
        self._check_length(len(ids), param)
        if isinstance(prompt, TokenPrompt):
            self._check_ids(param, ids)
        return ids

    def _check_length(self, tokens: int, param: str, qualifier: str = "") -> None:
        if tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt is {qualifier}{tokens:,} tokens; the limit is {self.max_model_len:,}, of which at least "
                "one is the answer's; shorten it or raise --max-model-len",
                param=param,
            )

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        room = self.max_model_len - prompt_tokens
        if params.max_tokens is None:
            return room
        if params.max_tokens > room:
            raise ContextLengthExceeded(
                f"the prompt is {prompt_tokens:,} tokens and max_tokens is {params.max_tokens:,}, together "
                f"{prompt_tokens + params.max_tokens:,}; the limit is {self.max_model_len:,}; lower max_tokens to at "
                f"most {room:,}, shorten the prompt or raise --max-model-len",
                param="max_tokens",
            )
        return params.max_tokens

    def _check_ids(self, param: str, ids: list[int] | tuple[int, ...]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"{param} names token {token}; the vocabulary has ids 0 to {self._vocab_size - 1:,}", param=param
                )


def check_ranges(params: SamplingParams) -> None:
    """Raises InvalidRequest, naming the field, for a value no sampler can honour."""
    for name, (low, high) in RANGES.items():
        value = getattr(params, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            bound = f"from {low:g} to {high:g}" if math.isfinite(high) else f"finite and at least {low:g}"
            raise InvalidRequest(f"{name} is {value}; it must be {bound}", param=name)
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest(f"top_p is {params.top_p}; it must be above 0 and at most 1", param="top_p")
    if len(params.logit_bias) > MAX_BIASES:
        message = f"logit_bias has {len(params.logit_bias):,} entries; the limit is {MAX_BIASES:,}; send fewer"
        raise InvalidRequest(message, param="logit_bias")
    for token, bias in params.logit_bias:
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token {token} is {bias}; it must be finite", param="logit_bias")
