"""The K/V pool as integers: which blocks are free, who holds the others, and one sequence's list of blocks.

Owns the free list and the reference counts, through the scheduler alone. Knows no tensors and no requests.

    pool     [ block 0 | block 1 | ... | block N-1 | sink block ]
    slot     block * block_size + offset
    sink     N * block_size: a legal address that no BlockTable can name, since the allocator never hands block N out
"""

from __future__ import annotations

from collections.abc import Iterable

from nanoserve.errors import PoolExhausted


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks of `block_size` slots."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def sink_slot(self) -> int:
        """First slot of the one block past the pool: where rows that stand for nothing write."""
        return self.num_blocks * self.block_size

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; all or none.

        Raises PoolExhausted, which the scheduler answers by preempting.
        """
        if count > len(self._free):
            raise PoolExhausted(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block; those without any become free."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} released more often than it was taken"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """The integrity check: free + used = total, and reference counts equal what the tables hold.

        Raises AssertionError; run after every step in tests and under `--paranoid`.
        """
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        assert held == self._refs, "reference counts differ from what the block tables hold"
        assert len(set(self._free)) == len(self._free), "a block is twice in the free list"
        assert sorted(self._free) == [block for block, refs in enumerate(self._refs) if refs == 0], (
            "the free list is not exactly the unreferenced blocks"
        )


class BlockTable:
    """One sequence's blocks, in the order of its positions."""

    __slots__ = ("block_size", "blocks")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[int] = []

    @property
    def capacity(self) -> int:
        """Positions that have a slot."""
        return len(self.blocks) * self.block_size

    def slot(self, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return self.blocks[block] * self.block_size + offset

    def slots(self, start: int, stop: int) -> list[int]:
        """Slots of positions start … stop - 1, all of which must be within `capacity`."""
        size, blocks = self.block_size, self.blocks
        return [blocks[position // size] * size + position % size for position in range(start, stop)]

    def missing_for(self, tokens: int) -> int:
        """Blocks still to be allocated before `tokens` positions have slots."""
        return max(0, blocks_for(tokens, self.block_size) - len(self.blocks))
