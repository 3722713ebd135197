"""Who runs next: waiting and running sequences, chunked prefill, preemption by recompute. Integers only, no torch.

Sole writer of the request lifecycle and, through the BlockPool, of who holds which block. Who is next and who gives way
is `turns`' to say, how much a step may hold `budget`'s.

    waiting --admit: a table row and blocks for all known tokens--> prefill --last chunk--> decode --> finished
       ^                                                             |                        |
       +------- preempted: blocks given back, all known tokens found in the cache or computed again

Full blocks that committed steps have written are shared with whoever starts with the same tokens (`prefix`). What a
sequence writes goes into blocks that it alone holds.

Decoding sequences hold table rows 0 … n - 1 without a gap, so a decode batch is a window on the slot table; prefilling
ones hold any row above. A step in flight addresses blocks, so what ends meanwhile keeps them until `commit`.
"""

from __future__ import annotations

from collections.abc import Iterator

from nanoserve.blocks import BlockPool, blocks_for
from nanoserve.buckets import DecodeRow
from nanoserve.budget import StepBudget
from nanoserve.errors import PoolExhausted
from nanoserve.prefix import PrefixCache
from nanoserve.request import FinishReason
from nanoserve.sequence import ChunkPlan, Sequence, State, StepPlan
from nanoserve.turns import WaitingLine, serving_order, turn


class Scheduler:
    """`plan` says what the next step is, `commit` takes its tokens; between the two a step is in flight. `plan_ahead`
    says what the one after it is, where that can be said before its tokens are known.

    prefix  finds blocks that hold what a sequence would compute; None: everything is computed
    """

    def __init__(
        self, pool: BlockPool, *, max_sequences: int, budget: StepBudget, prefix: PrefixCache | None = None
    ) -> None:
        assert budget.max_step_rows >= max_sequences, "a step has fewer rows than sequences may decode in it"
        self.prefix = prefix
        self._pool = pool
        self.budget = budget
        self.max_sequences = max_sequences
        self._waiting = WaitingLine()
        self._rows: list[Sequence | None] = [None] * max_sequences
        self._arrivals = 0
        self._in_flight: StepPlan | None = None
        self._ahead: StepPlan | None = None
        self._dirty: set[int] = set()
        self._reused_slots: list[tuple[int, int, tuple[int, ...]]] = []
        self.preemptions = 0

    # --- what others may ask -------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the prefills of the waiting sequences will have to compute."""
        return self._waiting.tokens

    @property
    def running(self) -> int:
        return sum(sequence is not None for sequence in self._rows)

    @property
    def free_rows(self) -> int:
        """Sequences that may still be admitted beside those that run."""
        return self._rows.count(None)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(sequence is not None for sequence in self._rows)

    def live(self) -> Iterator[Sequence]:
        """Every sequence that is not finished."""
        for sequence in (*self._waiting, *self._rows):
            if sequence is not None and sequence.finish_reason is None:
                yield sequence

    # --- lifecycle -----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence for a reason no token shows: a stop string, an abort, a deadline. A second call is ignored.

        Its blocks are back at once, or at `commit` if a step in flight addresses them.
        """
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            sequence.state = State.FINISHED
        elif not self._is_in_flight(sequence):
            self._leave(sequence, State.FINISHED)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        plans = (self._in_flight, self._ahead)
        return any(plan is not None and sequence in (*plan.decode_sequences, *plan.chunk_sequences) for plan in plans)

    def _leave(self, sequence: Sequence, state: State) -> None:
        """Give back the table row and the blocks."""
        self._rows[sequence.table_row] = None
        self._dirty.add(sequence.table_row)
        self._pool.release(sequence.table.blocks)
        sequence.table.blocks = []
        sequence.table_row = -1
        sequence.computed = 0
        sequence.state = state

    # --- plan ----------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to run. Must not be called while a step is in flight."""
        assert self._in_flight is None, "plan() while a step is in flight"
        writes: list[tuple[int, int, tuple[int, ...]]] = []
        for sequence in self._decoding():
            if len(sequence.tokens) > sequence.table.capacity and sequence.state is State.DECODE:
                self._reserve_next_slot(sequence)
        swaps = self._compact()
        decoding = self._decoding()
        rows = []
        for sequence in decoding:
            position = len(sequence.tokens) - 1
            slot = sequence.table.slot(position)
            rows.append(DecodeRow(sequence.table_row, position, slot))
            writes.append((sequence.table_row, position, (slot,)))
        prefilling = self._prefilling(len(rows))
        writes, self._reused_slots = writes + self._reused_slots, []
        chunks = [self._chunk(sequence, count) for sequence, count in prefilling]
        writes.extend((chunk.table_row, chunk.start, chunk.write_slots) for chunk in chunks)
        if not rows and not chunks:
            return None
        self._in_flight = StepPlan(
            clears=self._take_dirty(),
            swaps=swaps,
            slot_writes=tuple(writes),
            decode=tuple(rows),
            decode_sequences=tuple(decoding),
            chunks=tuple(chunks),
            chunk_sequences=tuple(sequence for sequence, _ in prefilling),
        )
        return self._in_flight

    def plan_ahead(self) -> StepPlan | None:
        """The step after the one in flight, if all it does is decode what that one decodes: then only the rows' tokens
        are not known yet, and the program itself finds those in `last_tokens`.

        None if one is planned already, if a prompt is being computed or could be, if blocks are lacking, or if every
        sequence ends with the step in flight. A sequence that turns out to have ended costs one token that nobody sees.
        """
        plan = self._in_flight
        if plan is None or self._ahead is not None or plan.chunks:
            return None
        if any(s is not None and s.state is State.PREFILL for s in self._rows) or any(self._admissible()):
            return None
        going_on = [s for s in plan.decode_sequences if s.finish_reason is None and s.generated + 1 < s.max_tokens]
        missing = [sequence.table.missing_for(len(sequence.tokens) + 1) for sequence in going_on]
        if not going_on or sum(missing) > self._pool.free_blocks:
            return None
        for sequence, count in zip(going_on, missing, strict=True):
            if count:
                sequence.table.blocks += self._pool.allocate(count)
        rows = tuple(
            DecodeRow(sequence.table_row, len(sequence.tokens), sequence.table.slot(len(sequence.tokens)))
            for sequence in going_on
        )
        self._ahead = StepPlan(
            clears=self._take_dirty(),
            swaps=(),
            slot_writes=tuple((row.table_row, row.position, (row.write_slot,)) for row in rows),
            decode=rows,
            decode_sequences=tuple(going_on),
            chunks=(),
            chunk_sequences=(),
        )
        return self._ahead

    def _decoding(self) -> list[Sequence]:
        return [sequence for sequence in self._rows if sequence is not None and sequence.state is State.DECODE]

    def _reserve_next_slot(self, sequence: Sequence) -> None:
        """Make room for the newest token's K/V, preempting the last in line; possibly the sequence itself."""
        missing = sequence.table.missing_for(len(sequence.tokens))
        while missing and sequence.state is State.DECODE:
            try:
                sequence.table.blocks += self._pool.allocate(missing)
                return
            except PoolExhausted:
                self._preempt(max((s for s in self._rows if s is not None), key=turn))

    def _preempt(self, victim: Sequence) -> None:
        """Back to its place in line."""
        self._leave(victim, State.WAITING)
        victim.target = len(victim.tokens)
        self._waiting.add(victim)
        self.preemptions += 1

    def _compact(self) -> tuple[tuple[int, int], ...]:
        """Swap table rows until the decoding sequences hold the first ones."""
        decoding = self._decoding()
        count = len(decoding)
        outside = [sequence.table_row for sequence in decoding if sequence.table_row >= count]
        holes = [row for row in range(count) if (s := self._rows[row]) is None or s.state is not State.DECODE]
        swaps = []
        for high, low in zip(outside, holes, strict=True):
            swaps.append((low, high))
            self._rows[low], self._rows[high] = self._rows[high], self._rows[low]
            for row in (low, high):
                if (sequence := self._rows[row]) is not None:
                    sequence.table_row = row
        return tuple(swaps)

    def _take_dirty(self) -> tuple[int, ...]:
        """Rows given back since the last plan. Cleared before the swaps, so a swap may carry a cleared row."""
        dirty = tuple(sorted(self._dirty))
        self._dirty.clear()
        return dirty

    def _prefilling(self, decode_rows: int) -> list[tuple[Sequence, int]]:
        """(sequence, tokens) to compute in this step beside the decode rows, admitting those whose turn it is."""
        budget = self.budget.prefill_rows(decode_rows)
        started = [s for s in self._rows if s is not None and s.state is State.PREFILL]
        line = sorted((*started, *self._admissible()), key=turn)
        counts: dict[Sequence, int] = {}
        for sequence, most in serving_order(line, budget):
            if not budget:
                break
            if sequence.state is State.WAITING and not self._admit(sequence):
                continue
            count = min(budget, most, sequence.target - sequence.computed - counts.get(sequence, 0))
            if count:
                counts[sequence] = counts.get(sequence, 0) + count
                budget -= count
        return list(counts.items())

    def _admissible(self) -> Iterator[Sequence]:
        """The first in line, as far as rows and blocks reach for all of them. So one that is served before an earlier
        one takes nothing from it, and none behind one that does not fit is admitted at all."""
        rows, blocks = self.free_rows, self._pool.free_blocks
        for sequence in self._waiting:
            rows, blocks = rows - 1, blocks - self._blocks_wanted(sequence)
            if rows < 0 or blocks < 0:
                return
            yield sequence

    def _blocks_wanted(self, sequence: Sequence) -> int:
        """Free blocks that it takes for all its known tokens and one more: all but those that others hold for it, or
        will, if it awaits what they compute."""
        total = blocks_for(sequence.target + 1, self._pool.block_size)
        if awaited := self._awaited_blocks(sequence):
            return total - awaited
        reused = self.prefix.find(sequence) if self.prefix is not None else []
        return total - len(reused) + self._pool.idle(reused)

    def _awaited_blocks(self, sequence: Sequence) -> int:
        """Blocks that one before it in line has or is about to compute, if they are more than can be shared now.

        Only those before it are awaited, so the first never waits, and nobody starves.
        """
        if self.prefix is None:
            return 0
        prefilling = (other for other in self._rows if other is not None and other.state is State.PREFILL)
        return self.prefix.awaited(sequence, (other for other in prefilling if turn(other) < turn(sequence)))

    def _admit(self, sequence: Sequence) -> bool:
        """Take it out of the line and give it the last free table row and blocks for all its known tokens and one more,
        of which those are shared that hold the first of them already. False if it had better await some of them."""
        if self._awaited_blocks(sequence):
            return False
        reused = self.prefix.find(sequence) if self.prefix is not None else []
        fresh = blocks_for(sequence.target + 1, self._pool.block_size) - len(reused)
        self._waiting.remove(sequence)
        self._pool.share(reused)
        sequence.table.blocks = reused + self._pool.allocate(fresh)
        sequence.table_row = row = max(row for row, holder in enumerate(self._rows) if holder is None)
        sequence.state = State.PREFILL
        sequence.computed = len(reused) * self._pool.block_size
        self._rows[row] = sequence
        if reused:
            self._reused_slots.append((row, 0, tuple(sequence.table.slots(0, sequence.computed))))
        if self.prefix is not None:
            self.prefix.count(sequence)
        return True

    @staticmethod
    def _chunk(sequence: Sequence, count: int) -> ChunkPlan:
        start, stop = sequence.computed, sequence.computed + count
        return ChunkPlan(
            table_row=sequence.table_row,
            start=start,
            token_ids=tuple(sequence.tokens[start:stop]),
            write_slots=tuple(sequence.table.slots(start, stop)),
            last=stop == sequence.target,
        )

    # --- commit --------------------------------------------------------------------------------------------

    def commit(self, tokens: dict[Sequence, int]) -> list[Sequence]:
        """Take the tokens the step in flight chose, by sequence; returns the sequences that got one.

        A sequence that was ended while the step ran gets none; its blocks are back now, or once the step planned ahead
        is over, if that addresses them too.
        """
        plan = self._in_flight
        assert plan is not None, "commit() without a step in flight"
        self._in_flight, self._ahead = self._ahead, None
        for sequence, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True):
            self._computed(sequence, chunk.start + len(chunk.token_ids))
        for sequence in plan.decode_sequences:
            self._computed(sequence, len(sequence.tokens))
        taken = []
        for sequence in (*plan.decode_sequences, *plan.chunk_sequences):
            if sequence.finish_reason is None and sequence in tokens:
                sequence.state = State.DECODE
                sequence.tokens.append(tokens[sequence])
                sequence.finish_reason = sequence.reason_after(tokens[sequence])
                taken.append(sequence)
            if sequence.finish_reason is not None and not self._is_in_flight(sequence):
                self._leave(sequence, State.FINISHED)
        return taken

    def _computed(self, sequence: Sequence, count: int) -> None:
        """The step wrote K/V up to token `count`. What it wrote for a sequence that has ended is not shared."""
        if self.prefix is not None and sequence.finish_reason is None:
            self.prefix.publish(sequence, count)
        sequence.computed = count

    def abandon(self) -> None:
        """The step in flight raised: which of its edits and writes happened is unknown, so no K/V is trusted any more.

        Whatever still runs goes back to the queue and is computed again. Without a step in flight it does nothing.
        """
        if self._in_flight is None:
            return
        self._in_flight = self._ahead = None
        self._pool.forget()
        for sequence in [sequence for sequence in self._rows if sequence is not None]:
            if sequence.finish_reason is not None:
                self._leave(sequence, State.FINISHED)
            else:
                self._preempt(sequence)
        self._dirty.update(range(len(self._rows)))

    def planned(self, sequence: Sequence) -> int:
        """Tokens of a running sequence whose K/V is in the pool, or written by a decode step in flight."""
        return sequence.computed + self._is_in_flight(sequence)

    # --- integrity -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError if a block is lost, held twice, or a sequence is where it should not be."""
        self._waiting.check()
        running = [sequence for sequence in self._rows if sequence is not None]
        self._pool.check(sequence.table for sequence in running)
        for sequence in running:
            unwritten = sequence.table.blocks[sequence.computed // self._pool.block_size :]
            assert all(map(self._pool.is_writable, unwritten)), "a block to be written is another's too"
            if self.prefix is not None:
                self.prefix.check(sequence)
        assert all(self._rows[s.table_row] is s for s in running), "a sequence is not in the table row it names"
        assert not {id(s) for s in running} & {id(s) for s in self._waiting}, "a sequence waits and runs"
        assert all(s.state is State.WAITING for s in self._waiting), "a sequence in the queue is not waiting"
        assert not any(s.table.blocks for s in self._waiting), "a waiting sequence holds blocks"
