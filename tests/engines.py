"""Runners without weights for engine tests, and engines and boots around them.

`ScriptedRunner` says what it is told to; `HashRunner` is a model in integers whose answer changes if any slot of a
sequence's whole context holds anything but what it should. Both stand where `nanoserve.runner.Runner` stands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

from nanoserve.blocks import BlockPool
from nanoserve.boot import Boot, Booted, Report
from nanoserve.buckets import DecodeShape
from nanoserve.budget import StepBudget
from nanoserve.engine import Engine
from nanoserve.intake import Intake
from nanoserve.metrics import Metrics
from nanoserve.prefix import PrefixCache
from nanoserve.request import Delta, SamplingParams
from nanoserve.runner import Runner, StepOutcome
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import NewToken, Sequence, State, StepPlan
from tests.fakes import ByteTokenizer

SAMPLED = SamplingParams(temperature=1.0)
EOS = 0
VOCABULARY = 23
"""Of the hash model."""
Script = Callable[[str, int, int], int]
"""(request id, choice, how many tokens the choice has) → its next token."""


class SlotLists:
    """The slot table as lists, edited as a plan says: clears, swaps, writes."""

    def __init__(self, max_sequences: int, width: int, sink_slot: int) -> None:
        self.sink_slot = sink_slot
        self.rows = [[sink_slot] * width for _ in range(max_sequences)]
        self.last_tokens = [-1] * max_sequences

    def edit(self, plan: StepPlan) -> None:
        for row in plan.clears:
            self.rows[row] = [self.sink_slot] * len(self.rows[row])
        for a, b in plan.swaps:
            self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
            self.last_tokens[a], self.last_tokens[b] = self.last_tokens[b], self.last_tokens[a]
        for row, start, slots in plan.slot_writes:
            self.rows[row][start : start + len(slots)] = slots


def outcome_of(plan: StepPlan, tokens: Iterable[NewToken]) -> StepOutcome:
    """What a runner without graphs returns."""
    shape = DecodeShape(len(plan.decode), max(row.position for row in plan.decode) + 1) if plan.decode else None
    return StepOutcome(tuple(tokens), shape=shape, replayed=False, hit=False, pad_rows=0, seconds=0.001)


def choosing(plan: StepPlan) -> list[Sequence]:
    """The sequences that get a token in this step."""
    return [
        *plan.decode_sequences,
        *(sequence for sequence, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True) if chunk.last),
    ]


class ScriptedRunner:
    """Emits `script(request id, choice, index)`. `gate` holds a step back until it is set; `seconds` are slept in each
    step; `fail_at` raises in the step of that number. `plans` are all the plans it ran."""

    graphs = None
    starts = False
    shapes = None

    def __init__(self, script: Script = lambda *_: ord("x"), *, seconds: float = 0.0) -> None:
        self.script = script
        self.seconds = seconds
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.fail_at: int | None = None
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plan)
        self.started.set()
        assert self.gate.wait(30), "a test left the gate shut"
        time.sleep(self.seconds)
        if self.fail_at is not None and len(self.plans) > self.fail_at:
            raise RuntimeError("the device is on fire")
        return outcome_of(plan, [NewToken(s, self.script(s.request_id, s.choice, s.generated)) for s in choosing(plan)])

    def check_mirror(self, sequence: Sequence, planned: int) -> None:
        """It has no slot table to compare."""


def text_script(texts: dict[str, str], end: int = ByteTokenizer.EOS) -> Script:
    """Each request says its text byte by byte, then `end`."""

    def script(request_id: str, choice: int, index: int) -> int:
        raw = texts[request_id].encode()
        return raw[index] if index < len(raw) else end

    return script


# --- the hash model ------------------------------------------------------------------------------------------------


class HashRunner:
    """K/V of a token is a hash of (token, position, K/V of every earlier position), read and written through the slots
    the plan names; the next token is a function of all of it and of (seed, choice, position)."""

    graphs = None
    starts = False
    shapes = None

    def __init__(self, pool: BlockPool, *, max_sequences: int, width: int, vocab_size: int) -> None:
        self.slots = SlotLists(max_sequences, width, pool.sink_slot)
        self.store = [0] * (pool.sink_slot + pool.block_size)
        self.vocab_size = vocab_size

    def run(self, plan: StepPlan) -> StepOutcome:
        self.slots.edit(plan)
        return self.compute(plan)

    def compute(self, plan: StepPlan) -> StepOutcome:
        """What is left of a step once the slot table was edited, perhaps for the next step too."""
        tokens = []
        for row, sequence in zip(plan.decode, plan.decode_sequences, strict=True):
            self._write(row.table_row, row.position, row.write_slot, self.slots.last_tokens[row.table_row])
            tokens.append(self._choose(sequence, row.table_row, row.position))
        for chunk, sequence in zip(plan.chunks, plan.chunk_sequences, strict=True):
            for offset, (token, slot) in enumerate(zip(chunk.token_ids, chunk.write_slots, strict=True)):
                self._write(chunk.table_row, chunk.start + offset, slot, token)
            if chunk.last:
                position = chunk.start + len(chunk.token_ids) - 1
                tokens.append(self._choose(sequence, chunk.table_row, position))
        return outcome_of(plan, tokens)

    def check_mirror(self, sequence: Sequence, planned: int) -> None:
        check_row(sequence, planned, self.slots)

    def _context(self, table_row: int, length: int) -> list[int]:
        return [self.store[slot] for slot in self.slots.rows[table_row][:length]]

    def _write(self, table_row: int, position: int, slot: int, token: int) -> None:
        self.store[slot] = entry_of(token, position, self._context(table_row, position))

    def _choose(self, sequence: Sequence, table_row: int, position: int) -> NewToken:
        context = self._context(table_row, position + 1)
        token = next_token(context, sequence.seed, sequence.choice, self.vocab_size)
        self.slots.last_tokens[table_row] = token
        return NewToken(sequence, token)


class Contents:
    """What every digest must stand for: the K/V of one full block of a sequence's own tokens, by the hash model.

    A digest that no sequence's tokens explain, such as a discarded token's, is a fault like a wrong content.
    """

    def __init__(self, pool: BlockPool, prefix: PrefixCache, runner: HashRunner) -> None:
        self._pool, self._prefix, self._runner = pool, prefix, runner
        self._expected: dict[bytes, list[int]] = {}
        self._entries: dict[Sequence, list[int]] = {}

    def check(self, sequences: Iterable[Sequence]) -> None:
        """`sequences` are all there ever were; their tokens only grow."""
        size = self._pool.block_size
        for sequence in sequences:
            entries = self._entries.setdefault(sequence, [])
            known = len(entries) // size
            for token in sequence.tokens[len(entries) :]:
                entries.append(entry_of(token, len(entries), entries))
            for index in range(known, len(entries) // size):
                digest = self._prefix.digests(sequence, index + 1)[index]
                self._expected[digest] = entries[index * size : (index + 1) * size]
        for digest, block in self._pool.holders.items():
            assert self._runner.store[block * size : (block + 1) * size] == self._expected[digest]


def entry_of(token: int, position: int, context: list[int]) -> int:
    return hash((token, position, *context))


def next_token(context: list[int], seed: int, choice: int, vocab_size: int) -> int:
    return hash((seed, choice, *context)) % vocab_size


def hash_answer(sequence: Sequence, prompt: list[int], vocab_size: int) -> list[int]:
    """What the sequence answers when nothing goes wrong, computed without slots, blocks or a scheduler."""
    context: list[int] = []
    for token in prompt:
        context.append(entry_of(token, len(context), context))
    answer: list[int] = []
    while True:
        answer.append(next_token(context, sequence.seed, sequence.choice, vocab_size))
        if answer[-1] in sequence.eos_token_ids | sequence.stop_token_ids or len(answer) == sequence.max_tokens:
            return answer
        context.append(entry_of(answer[-1], len(context), context))


def check_mirror(engine: Engine, slots: SlotLists) -> None:
    """The slot table says of each running sequence what its block table says, and nothing past what is planned."""
    for sequence in engine.scheduler.live():
        if sequence.state in (State.PREFILL, State.DECODE):
            check_row(sequence, engine.scheduler.planned(sequence), slots)


def check_row(sequence: Sequence, planned: int, slots: SlotLists) -> None:
    row = slots.rows[sequence.table_row]
    assert row[:planned] == sequence.table.slots(0, planned)
    assert set(row[planned:]) <= {slots.sink_slot}


# --- engines -------------------------------------------------------------------------------------------------------


def sequence_of(
    prompt: list[int],
    *,
    max_tokens: int = 8,
    seed: int = 0,
    choice: int = 0,
    block_size: int = 4,
    eos: frozenset[int] = frozenset(),
    request_id: str = "r",
    params: SamplingParams = SAMPLED,
    priority: int = 0,
    cache_salt: str = "",
) -> Sequence:
    return Sequence(
        request_id=request_id,
        choice=choice,
        prompt_ids=list(prompt),
        params=params,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        eos_token_ids=eos,
        block_size=block_size,
        priority=priority,
        cache_salt=cache_salt,
    )


def engine_of(
    runner: Any,
    pool: BlockPool,
    *,
    max_sequences: int = 4,
    max_step_rows: int = 64,
    metrics: Metrics | None = None,
    prefix_cache: bool = True,
) -> Engine:
    prefix = PrefixCache(pool) if prefix_cache else None
    scheduler = Scheduler(pool, max_sequences=max_sequences, budget=StepBudget(max_step_rows), prefix=prefix)
    return Engine(scheduler, pool, cast(Runner, runner), metrics or Metrics("test"), paranoid=True)


def hash_engine(
    *,
    blocks: int,
    block_size: int = 4,
    max_sequences: int = 4,
    max_step_rows: int = 64,
    vocab_size: int = VOCABULARY,
    prefix_cache: bool = True,
) -> tuple[Engine, HashRunner, BlockPool]:
    pool = BlockPool(blocks, block_size)
    width = blocks * block_size
    runner = HashRunner(pool, max_sequences=max_sequences, width=width, vocab_size=vocab_size)
    engine = engine_of(
        runner, pool, max_sequences=max_sequences, max_step_rows=max_step_rows, prefix_cache=prefix_cache
    )
    return engine, runner, pool


def scripted_boot(
    runner: Any,
    metrics: Metrics,
    *,
    blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    max_sequences: int = 8,
    max_step_rows: int = 64,
    tokenizer: ByteTokenizer | None = None,
    before: Callable[[Report], None] = lambda report: None,
    degraded: str | None = None,
) -> Boot:
    """A boot that builds an engine around `runner`; `before` runs first, on the engine thread. `degraded` is what the
    engine says of itself."""

    def boot(report: Report) -> Booted:
        before(report)
        pool = BlockPool(blocks, block_size)
        engine = engine_of(runner, pool, max_sequences=max_sequences, max_step_rows=max_step_rows, metrics=metrics)
        tokens = cast(Any, tokenizer or ByteTokenizer())
        intake = Intake(
            tokens,
            vocab_size=300,
            max_model_len=max_model_len,
            eos_token_ids=tokens.eos_token_ids,
            block_size=block_size,
        )
        return Booted(engine=engine, intake=intake, kernels="scripted", kv_pool={}, degraded=lambda: degraded)

    return boot


def prompt_of(length: int, kind: int = 0) -> list[int]:
    """Prompts of one kind are prefixes of each other; two kinds share their first five tokens."""
    return [(position if position < 5 else position * (kind + 2) + kind) % VOCABULARY for position in range(length)]


def run_to_end(engine: Engine, runner: HashRunner, *, limit: int = 5_000) -> int:
    """Step until nothing is left, checking every step; returns the number of steps."""
    for step in range(limit):
        if not engine.scheduler.has_work:
            return step
        engine.step()
        engine.check()
        check_mirror(engine, runner.slots)
    raise AssertionError(f"{limit} steps and still work left: something starves")


def assert_exact(sequence: Sequence, prompt: list[int]) -> None:
    assert sequence.state is State.FINISHED
    assert sequence.output_ids == hash_answer(sequence, prompt, VOCABULARY)
    assert sequence.finish_reason == ("stop" if sequence.output_ids[-1] in sequence.eos_token_ids else "length")


class Sink:
    """Collects the deltas of one request."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]

    @property
    def finishes(self) -> list[Delta]:
        return [delta for delta in self.deltas if delta.finished is not None]
