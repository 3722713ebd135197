"""Clients of an engine without a network: sequences added at once, greedy, to a fixed length, each token timed; and
sequences that stay, decoded by as many steps as their owner asks for at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from nanoserve.engine import Engine
from nanoserve.request import SamplingParams
from nanoserve.sequence import Sequence
from nanoserve.stepper import Stepper


@dataclass(frozen=True, slots=True)
class Run:
    """tokens     of each sequence, in the order they were added
    seconds    when each of the first sequence's tokens came, from the moment it was added
    recorded   indices of its tokens whose step recorded a graph first
    """

    tokens: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    recorded: tuple[int, ...]

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds from each token to the next: entry i lies before token i + 1."""
        return tuple(after - before for before, after in zip(self.seconds, self.seconds[1:], strict=False))


def new_sequence(
    prompt_ids: list[int],
    *,
    row: int,
    max_tokens: int,
    block_size: int,
    params: SamplingParams = SamplingParams(temperature=0.0),  # noqa: B008 - frozen
) -> Sequence:
    """A sequence that ends at its length and nowhere else."""
    return Sequence(
        request_id=f"bench-{row}",
        choice=row,
        prompt_ids=prompt_ids,
        params=params,
        seed=row,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset(),
        block_size=block_size,
    )


NO_GAP_BOUND = 3600.0
"""`prefill_gap_seconds` of an engine that opens sessions: whole steps of prompts beside the rows that decode already,
since what those meanwhile wait is not measured."""


def steps_ahead(rows: int, prompt_tokens: int, step_rows: int) -> int:
    """Tokens that the first of `rows` sequences may have decoded when the last one's prompt has been computed: in steps
    of `step_rows`, one of them for each sequence that decodes."""
    return rows * prompt_tokens // max(1, step_rows - rows) + 1


class Session:
    """Sequences that decode together, from when each has its first token until `close`."""

    def __init__(self, engine: Engine, sequences: list[Sequence]) -> None:
        """Computes the prompts. The sequences are the engine's only ones."""
        self._engine = engine
        self._stepper = Stepper(engine)
        self._sequences = sequences
        for sequence in sequences:
            engine.add(sequence)
        while not all(sequence.generated for sequence in sequences):
            engine.step()

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of the next `steps` steps, every one of which chooses a token for every sequence. Each but
        the last is followed without a gap, as a server's are."""
        seconds = []
        for step in range(steps):
            started = perf_counter()
            new = self._stepper.step(ahead=step + 1 < steps)
            seconds.append(perf_counter() - started)
            assert len(new) == len(self._sequences), "a step without all of its sequences"
        return seconds

    def choose_with(self, params: SamplingParams) -> None:
        """How tokens are chosen from the next step on."""
        for sequence in self._sequences:
            sequence.params = params

    def close(self) -> None:
        for sequence in self._sequences:
            self._engine.finish(sequence, "cancelled")


def generate(engine: Engine, *, rows: int, prompt_tokens: int, generated: int, vocab_size: int, block_size: int) -> Run:
    """`rows` sequences with prompts of their own, together from the first step to the last."""
    sequences = [
        new_sequence(
            [(7 * row + 3 * position + 1) % vocab_size for position in range(prompt_tokens)],
            row=row,
            max_tokens=generated,
            block_size=block_size,
        )
        for row in range(rows)
    ]
    started = perf_counter()
    for sequence in sequences:
        engine.add(sequence)
    graphs = engine.runner.graphs
    seconds: list[float] = []
    recorded: list[int] = []
    while sequences[0].generated < generated:
        before = len(graphs) if graphs is not None else 0
        engine.step()
        if sequences[0].generated > len(seconds):
            if graphs is not None and len(graphs) > before:
                recorded.append(len(seconds))
            seconds.append(perf_counter() - started)
    return Run(tuple(tuple(each.output_ids) for each in sequences), tuple(seconds), tuple(recorded))


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep what is alive now out of Python's garbage collection: walking all that was imported takes as long as many
    recordings, and would be counted to whichever of them it fell into."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
