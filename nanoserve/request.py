"""What a client asked for and what it gets back: plain frozen data shared by server, engine and offline API.

Knows nothing of scheduling, text decoding or the wire. A request is validated where it enters (`server.schemas` for the
shape, `AsyncEngine.submit` for what only the loaded model can tell); these classes carry values that are already legal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MAX_TOP_LOGPROBS = 20
"""Alternatives reported beside each chosen token, at most."""
MAX_BIASES = 1024
"""Entries of a `logit_bias`, at most: room for them is set aside for each sequence that runs."""
FinishReason = Literal["stop", "length", "tool_calls", "timeout", "cancelled", "draining", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they stop. Ranges are the OpenAI API's, widened where noted.

    temperature   0 to 1e-4 is greedy (ties take the lowest id); at most 2 on the wire
    top_k         0 and -1 are off; keep the k most likely tokens
    top_p         (0, 1]; keep the smallest set of most likely tokens whose probability reaches top_p
    min_p         [0, 1]; drop tokens less likely than min_p times the most likely one
    seed          None draws one; tokens depend on (seed, choice, position) and nothing else
    max_tokens    None runs to the end of the context
    logprobs      None is off; otherwise the number of alternatives reported beside each chosen token (0 to 20)
    The penalties, the bias and the stops follow the OpenAI API; repetition_penalty follows Keskar et al. 2019 (CTRL),
    over prompt and generated tokens; presence and frequency count generated tokens only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def needs_full_head(self) -> bool:
        """True if choosing a token takes more than its logits row and the cheap parameters (DESIGN: `head_full`)."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.logprobs is not None
        )


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """OpenAI messages, content already flattened to text: dicts with `role`, `content` (str) and optional extras."""

    messages: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. `request_id` is ours and unique in the process.

    timeout_seconds  from arrival to the last token, waiting included; None: the server's default
    priority         the lower, the sooner (as in vLLM)
    cache_salt  what was computed under one salt is reused under the same salt alone
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    timeout_seconds: float | None = None
    priority: int = 0
    cache_salt: str = ""


# --- what comes back ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as the logprobs fields of the wire show it: natural-log probability after all sampling transforms are
    left out (the model's own distribution), and its raw bytes, since one token need not be whole characters."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens` of the prompt tokens were not computed, because an earlier request had."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GraphUse:
    """Steps this request took part in, over all its choices: replays of a recorded graph, and steps run eagerly."""

    steps: int
    replays: int
    eager_steps: int
    mean_pad_rows: float


@dataclass(frozen=True, slots=True)
class Timings:
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    ttft_seconds: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The request's one terminal record. `error` is the message of an in-band failure (reason `error`)."""

    finish_reasons: tuple[FinishReason, ...]
    usage: Usage
    graph: GraphUse
    timings: Timings
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice since the last delta of that choice; several steps merge when the reader is slow.

    `finish_reason` is set on a choice's last delta, `finished` on the request's last delta: exactly one delta of every
    accepted request bears `finished`, whatever ended it. `token_ids` includes the token of a stop that prints nothing.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    finished: Finished | None = None
