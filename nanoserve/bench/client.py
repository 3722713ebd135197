"""Clients of an engine without a network: sequences added at once, greedy, to a fixed length, each token timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from nanoserve.engine import Engine
from nanoserve.request import SamplingParams
from nanoserve.sequence import Sequence


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


def generate(engine: Engine, *, rows: int, prompt_tokens: int, generated: int, vocab_size: int, block_size: int) -> Run:
    """`rows` sequences with prompts of their own, together from the first step to the last."""
    sequences = [
        Sequence(
            request_id=f"bench-{row}",
            choice=0,
            prompt_ids=[(7 * row + 3 * position + 1) % vocab_size for position in range(prompt_tokens)],
            params=SamplingParams(temperature=0.0),
            seed=0,
            max_tokens=generated,
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(),
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
