"""StepBudget: how many prompt tokens a step may compute beside its decode rows.

The scheduler asks in rows and is told in rows. The bound on what prompts may add to the gap between two tokens of a
running stream is a time, so it is translated by what rows have cost in the steps so far. No torch, and no clock.
"""

from __future__ import annotations

FIXED_ROWS = 8
"""What a step costs before its first row (mostly the weights' way through memory), in decode rows."""
RATE = 0.3
"""How far a step's cost moves what the next one is expected to cost, if it has nothing but the rows in question."""
RISE = 0.6
"""The same for a prompt row that cost more than expected, as each does behind a growing context."""
LEARN_AFTER = 16
"""Steps of decode rows and prompts in a row, after which one has no prompts: what decode rows cost cannot be told from
steps of both, and prompts that are taken for dear are given so few rows that there are no other steps."""
AIM = 0.8
"""Of the bound on what prompts add: steps scatter about what they should take."""
SURPRISE = 2.0
"""A step counts for no more than this many times what was expected: it met a recording, or a busy machine."""


class RowCosts:
    """Seconds of a decode row and of a prompt row, moving averages over steps, which are taken to last

        decode_row * (decode rows + FIXED_ROWS) + prefill_row * prompt rows

    Steps without prompts tell the first, the more the longer there was none; in a step with prompts, what the decode
    rows should take is theirs and the rest is the prompts'. So a context that grows, which makes its prompt's rows
    dearer, is not held against decoding. Zero before the first step.
    """

    def __init__(self) -> None:
        self.decode_row = 0.0
        self.prefill_row = 0.0
        self.mixed_steps = 0
        """Steps of both kinds of rows since the last one of decode rows alone."""

    def decode_seconds(self, decode_rows: int) -> float:
        """What a step of these rows alone should take."""
        return self.decode_row * (decode_rows + FIXED_ROWS)

    def observe(self, decode_rows: int, prefill_rows: int, seconds: float) -> None:
        """A step of these rows took `seconds`."""
        weight = decode_rows + FIXED_ROWS
        mixed_steps = self.mixed_steps
        self.mixed_steps = mixed_steps + bool(decode_rows) if prefill_rows else 0
        if not self.prefill_row:
            self.decode_row = self.prefill_row = seconds / (weight + prefill_rows)
            return
        decode = self.decode_seconds(decode_rows)
        seconds = min(seconds, SURPRISE * (decode + self.prefill_row * prefill_rows))
        if not prefill_rows:
            rate = max(RATE, mixed_steps / (mixed_steps + LEARN_AFTER / 2))
            self.decode_row += rate * (seconds / weight - self.decode_row)
            return
        share = prefill_rows / (weight + prefill_rows)
        rest = max(seconds - decode, seconds * share / 4)  # a decode cost that is out of date must not leave nothing
        change = rest / prefill_rows - self.prefill_row
        self.prefill_row += (RISE if change > 0 else RATE) * share * change


class StepBudget:
    """max_step_rows  decode rows and prompt rows of a step together; at least the sequences that may run at once, so
                      that a sequence which does not decode yet always finds a row left
    gap_seconds       a step with decode rows may spend this long on prompts, or as long as its decode rows take if
                      that is longer: a prompt never waits more than about twice its time. None: no bound
    """

    def __init__(self, max_step_rows: int, *, gap_seconds: float | None = None) -> None:
        self.max_step_rows = max_step_rows
        self.gap_seconds = gap_seconds
        self.costs = RowCosts()

    def prefill_rows(self, decode_rows: int) -> int:
        """The most prompt rows of a step with this many decode rows: all that are left where nobody decodes, and none
        in one that is to tell what decoding takes."""
        room = self.max_step_rows - decode_rows
        costs = self.costs
        if self.gap_seconds is None or not decode_rows or not costs.prefill_row:
            return room
        if costs.mixed_steps >= LEARN_AFTER:
            return 0
        seconds = AIM * max(self.gap_seconds, costs.decode_seconds(decode_rows))
        return max(1, round(min(room, seconds / costs.prefill_row)))

    def observe(self, decode_rows: int, prefill_rows: int, seconds: float) -> None:
        """A step of these rows took `seconds`."""
        self.costs.observe(decode_rows, prefill_rows, seconds)
