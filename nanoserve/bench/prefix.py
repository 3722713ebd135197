"""`nanoserve bench prefix`: how soon a chat's second turn begins, with and without the prefix cache, on the engine that
would serve and without a network.

A first turn has `history` tokens; the second repeats them and the answer, and adds `added` tokens. Every conversation
is new to the engine. Both engines must answer alike.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from statistics import median

from nanoserve.bench.client import settled_heap
from nanoserve.bench.flags import check_flags
from nanoserve.bench.tables import Column, Record, Table, milliseconds, publish, thousands
from nanoserve.config import EngineConfig
from nanoserve.errors import ConfigError
from nanoserve.llm import LLM
from nanoserve.request import SamplingParams

VOCABULARY = 199
"""Every model has these ids; as many conversations begin differently."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its answer, the prompt tokens it reused, and the seconds to its first token."""

    answer: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_seconds: float


Conversation = tuple[Turn, Turn]


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    config = EngineConfig(
        model=args.model,
        kernels=args.kernels,
        threads=args.threads,
        max_sequences=1,
        max_model_len=args.history + args.generated + args.added + args.generated,
        warmup_seconds=0.0,
    )
    cached = converse(LLM(config=config), args)
    plain = converse(LLM(config=replace(config, prefix_cache=False)), args)
    alike = [[turn.answer for turn in each] for each in cached] == [[turn.answer for turn in each] for each in plain]
    records = [
        _record("first, cache on", [first for first, _ in cached]),
        _record("second, cache on", [second for _, second in cached]),
        _record("second, cache off", [second for _, second in plain]),
    ]
    ratio = records[1]["ttft_seconds"] / records[0]["ttft_seconds"]
    about = f"{args.history:,} tokens, an answer of {args.generated}, {args.added} more; medians of {args.repeats}"
    columns = (
        Column("turn", "turn"),
        Column("prompt_tokens", "prompt", thousands),
        Column("cached_tokens", "reused", thousands),
        Column("ttft_seconds", "first token", milliseconds),
        Column("least_seconds", "least", milliseconds),
    )
    notes = (f"second ÷ first: {ratio:.3f}", f"answers with and without the cache are {'' if alike else 'NOT '}equal")
    table = Table("turns", "First and second turn", about, columns, records, notes)
    summary = {"model": args.model, "second_over_first": ratio, "answers_equal": alike}
    publish("prefix", args.model, [table], summary, csv_folder=args.csv, picture=None)
    return 0 if alike else 1


def converse(llm: LLM, args: argparse.Namespace) -> list[Conversation]:
    """The conversations; one more before them, which records the shapes, is not counted. Raises ConfigError if the
    memory is too small for one."""
    wanted = args.history + args.added + 2 * args.generated
    if llm.max_model_len < wanted:
        raise ConfigError(
            f"a conversation is {wanted:,} tokens; the K/V pool holds {llm.max_model_len:,}; lower --history"
        )
    with settled_heap():
        return [_conversation(llm, args, number) for number in range(args.repeats + 1)][1:]


def _conversation(llm: LLM, args: argparse.Namespace, number: int) -> Conversation:
    first = [(number * 7919 + position * 31) % VOCABULARY for position in range(args.history)]
    answered = _ask(llm, first, args.generated)
    more = [(number * 104729 + position * 17) % VOCABULARY for position in range(args.added)]
    return answered, _ask(llm, [*first, *answered.answer, *more], args.generated)


def _ask(llm: LLM, prompt: list[int], generated: int) -> Turn:
    params = SamplingParams(temperature=0.0, max_tokens=generated, ignore_eos=True)
    (output,) = llm.generate(prompt, params, progress=False)
    finished = output.finished
    assert finished is not None, "an answer that has not ended"
    assert finished.timings.ttft_seconds is not None, "an answer without a first token"
    usage = finished.usage
    return Turn(output.outputs[0].token_ids, usage.prompt_tokens, usage.cached_tokens, finished.timings.ttft_seconds)


def _record(name: str, turns: list[Turn]) -> Record:
    seconds = [turn.ttft_seconds for turn in turns]
    return {
        "turn": name,
        "prompt_tokens": turns[0].prompt_tokens,
        "cached_tokens": turns[0].cached_tokens,
        "ttft_seconds": median(seconds),
        "least_seconds": min(seconds),
    }
