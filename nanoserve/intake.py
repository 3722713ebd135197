"""From a Request to Sequences: rendering, tokenising, and every check that needs the loaded model. No torch.

A request that passes here can be served: its ids exist, and its prompt with the tokens it may generate fits the
context, which itself fits the K/V pool.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from nanoserve.errors import ContextLengthExceeded, InvalidRequest
from nanoserve.request import ChatPrompt, Request, SamplingParams, TextPrompt
from nanoserve.sequence import Sequence
from nanoserve.tokens import Tokenizer

GREEDY_BELOW = 1e-4
"""Temperatures under this are greedy: dividing logits by them overflows without changing the choice."""
SEED_MASK = (1 << 63) - 1


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
        self._check_ids("logit_bias", [token for token, _ in params.logit_bias])
        self._check_ids("stop_token_ids", params.stop_token_ids)
        prompt_ids = self._prompt_ids(request)
        max_tokens = self._max_tokens(len(prompt_ids), params)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        greedy = params.temperature < GREEDY_BELOW
        params = replace(params, temperature=0.0) if greedy else params
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
            )
            for choice in range(params.n)
        ]

    def _prompt_ids(self, request: Request) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            ids = self.tokenizer.encode_chat(prompt.messages)
            param = "messages"
        elif isinstance(prompt, TextPrompt):
            ids = self.tokenizer.encode(prompt.text)
            param = "prompt"
        else:
            ids = list(prompt.token_ids)
            param = "prompt"
            self._check_ids(param, ids)
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param=param)
        if len(ids) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt is {len(ids):,} tokens; the limit is {self.max_model_len:,}, of which at least one is the "
                "answer's; shorten it or raise --max-model-len",
                param=param,
            )
        return ids

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
