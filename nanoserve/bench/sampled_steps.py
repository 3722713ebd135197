"""What choosing tokens by temperature, top-k and top-p costs a decode step, against taking the most likely one.

The same sequences go on from the same text, some steps greedy and some sampled, in turn: both read the same contexts,
and the logits are those of text, whose distribution decides how much a sampler has to look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

from nanoserve.bench.client import Session, new_sequence, steps_ahead
from nanoserve.bench.tables import Column, Record, Table, milliseconds, thousands
from nanoserve.build import Prepared
from nanoserve.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95)
STRETCH = 4
"""Steps of one kind before it is the other's turn."""
TEXT = """The sea was calm when the boat left the harbour. Anna had packed bread, cheese and a map that her father drew
when he was young. "The island lies two hours to the north," he had said, "and the light on its tower is the first thing
you will see." She did not hurry. A few birds followed for a while, then turned back to the shore, and there was nothing
but wind and water, and the small sound of the rope against the mast. """


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of steps of both kinds, entry i of each from the same turn."""

    rows: int
    context: int
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    def record(self) -> Record:
        """`cost` is of the medians; `cost_low` and `cost_high` are the least and the greatest of one turn."""
        turns = [sampled / greedy - 1 for greedy, sampled in zip(self.greedy, self.sampled, strict=True)]
        return {
            "rows": self.rows,
            "context": self.context,
            "greedy_seconds": median(self.greedy),
            "sampled_seconds": median(self.sampled),
            "cost": median(self.sampled) / median(self.greedy) - 1,
            "cost_low": min(turns),
            "cost_high": max(turns),
        }


def decoded_tokens(rows: int, context: int, repeats: int, step_rows: int) -> int:
    """Tokens that `measure_sampling` takes a sequence on, at most."""
    return steps_ahead(rows, context, step_rows) + 2 * STRETCH * (repeats + 1) + 1


def measure_sampling(prepared: Prepared, rows: int, context: int, repeats: int) -> Pair:
    """Steps of `rows` sequences whose contexts begin at `context` tokens, or a few more where others' prompts came in
    between; the first turn is not counted."""
    ids = prepared.intake.tokenizer.encode(TEXT, add_special_tokens=False)
    size, limit = prepared.pool.block_size, decoded_tokens(rows, context, repeats, prepared.choices.config.step_rows)
    prompts = [list(islice(cycle(ids), row, row + context)) for row in range(rows)]
    sequences = [new_sequence(prompt, row=row, max_tokens=limit, block_size=size) for row, prompt in enumerate(prompts)]
    session = Session(prepared.engine, sequences)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(repeats + 1):
        for sampled in (False, True) if turn % 2 else (True, False):
            session.choose_with(SAMPLED if sampled else GREEDY)
            stretch = median(session.decode(STRETCH))
            seconds[sampled] += [stretch] if turn else []
    session.close()
    return Pair(rows, context, tuple(seconds[False]), tuple(seconds[True]))


def sampling_table(pairs: list[Pair]) -> Table:
    columns = (
        Column("rows", "rows"),
        Column("context", "tokens of context", thousands),
        Column("greedy_seconds", "greedy step", milliseconds),
        Column("sampled_seconds", "sampled step", milliseconds),
        Column("cost", "sampling costs", _signed),
        Column("cost_low", "least", _signed),
        Column("cost_high", "most", _signed),
    )
    about = f"temperature {SAMPLED.temperature}, top_k {SAMPLED.top_k}, top_p {SAMPLED.top_p}, in turn with greedy"
    return Table("sampling", "Sampling", about, columns, [pair.record() for pair in pairs])


def _signed(share: float) -> str:
    return f"{share:+.1%}"
