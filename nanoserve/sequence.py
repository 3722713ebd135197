"""Sequence: one choice of one request while it lives, and the plan of a step over sequences. Integers only.

The Scheduler is the only writer of a sequence's lifecycle; the engine adds what the steps it took part in cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nanoserve.blocks import BlockTable
from nanoserve.buckets import DecodeRow
from nanoserve.request import FinishReason, SamplingParams


class State(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Sequence:
    """Prompt and generated tokens of one choice, and how far they are computed.

    tokens      prompt then generated ids; the newest generated token is not in the K/V pool yet
    computed    tokens whose K/V is in the pool
    priority    the lower, the sooner (`turns.turn`); arrival numbers all sequences of a scheduler
    digests     of the first full blocks, as far as they were needed (`prefix`); cache_salt goes into them
    cached_tokens  prompt tokens whose K/V was there when it was first admitted; None before
    target      tokens a prefill has to compute before the next token is chosen (all known tokens, at admission)
    """

    __slots__ = (
        "arrival",
        "cache_salt",
        "cached_tokens",
        "choice",
        "computed",
        "digests",
        "eager_steps",
        "eos_token_ids",
        "finish_reason",
        "max_tokens",
        "pad_rows",
        "params",
        "priority",
        "prompt_tokens",
        "replays",
        "request_id",
        "seed",
        "state",
        "steps",
        "stop_token_ids",
        "table",
        "table_row",
        "target",
        "tokens",
    )

    def __init__(
        self,
        *,
        request_id: str,
        choice: int,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        eos_token_ids: frozenset[int],
        block_size: int,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        self.request_id = request_id
        self.choice = choice
        self.tokens = prompt_ids
        self.prompt_tokens = len(prompt_ids)
        self.params = params
        self.priority = priority
        self.seed = seed
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.eos_token_ids = eos_token_ids
        self.arrival = 0
        self.state = State.WAITING
        self.finish_reason: FinishReason | None = None
        self.table = BlockTable(block_size)
        self.table_row = -1
        self.computed = 0
        self.target = len(prompt_ids)
        self.cache_salt = cache_salt
        self.digests: list[bytes] = []
        self.cached_tokens: int | None = None
        self.steps = 0
        self.replays = 0
        self.eager_steps = 0
        self.pad_rows = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def reason_after(self, token: int) -> FinishReason | None:
        """Why the sequence ends with `token` as its newest, if it does. A stop wins over the limit."""
        if token in self.stop_token_ids or token in self.eos_token_ids:
            return "stop"
        return "length" if self.generated >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Prompt tokens start … start + len(token_ids) - 1 of one sequence; `last` if the next token is chosen after it."""

    table_row: int
    start: int
    token_ids: tuple[int, ...]
    write_slots: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, in full, before anything ran. Slot table edits come first, in this order: clears, swaps, writes.

    slot_writes   (table row, first position, slots)
    decode, chunks and their sequences correspond by index
    """

    clears: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...]
    slot_writes: tuple[tuple[int, int, tuple[int, ...]], ...]
    decode: tuple[DecodeRow, ...]
    decode_sequences: tuple[Sequence, ...]
    chunks: tuple[ChunkPlan, ...]
    chunk_sequences: tuple[Sequence, ...]

    @property
    def prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class NewToken:
    """What one step chose for one sequence. `logprob` and `top` are of the model's own distribution, if asked for."""

    sequence: Sequence
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = field(default=())
