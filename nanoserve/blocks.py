"""The K/V pool as integers: which blocks are free, who holds the others, what they hold, and one sequence's blocks.

Owns the free list, the reference counts and the digests of blocks, through the scheduler alone. Knows no tensors and no
requests; what a digest stands for is `prefix`'s business.

    pool     [ block 0 | block 1 | ... | block N-1 | sink block ]
    slot     block * block_size + offset
    sink     N * block_size: a legal address that no BlockTable can name, since the allocator never hands block N out

    block    unwritten --publish--> shareable --last reference gone--> free, still shareable --allocate--> unwritten

A block with a digest is full and never written again. Free blocks are handed out in this order: those without a digest,
then the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from nanoserve.errors import PoolExhausted


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


class BlockPool:
    """Free list, reference counts and digests of `num_blocks` blocks of `block_size` slots."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self._refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._holders: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds; those whose content can still be shared among them."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def sink_slot(self) -> int:
        """First slot of the one block past the pool: where rows that stand for nothing write."""
        return self.num_blocks * self.block_size

    def digest(self, block: int) -> bytes | None:
        """What the block holds, as far as it has been published."""
        return self._digests[block]

    @property
    def holders(self) -> Mapping[bytes, int]:
        """The block that holds each digest's content."""
        return self._holders

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, whose content is forgotten; all or none.

        Raises PoolExhausted, which the scheduler answers by preempting.
        """
        if count > len(self._free):
            raise PoolExhausted(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
            if (digest := self._digests[block]) is not None:
                del self._holders[digest]
                self._digests[block] = None
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block of a table; those without any become free.

        From the last to the first: a block is worth nothing once one before it is gone, so the front is kept longest.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released more often than it was taken"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)

    # --- shared content ------------------------------------------------------------------------------------

    def publish(self, block: int, digest: bytes) -> None:
        """`block` is full and written: whoever needs this content may share it from now on.

        If somebody holds another block with the same content, that one goes on to be shared; a free one gives way, so
        that what was used last is kept longest.
        """
        assert self._refs[block] > 0, f"block {block} published, and nobody holds it"
        assert self._digests[block] is None, f"block {block} published twice"
        if (holder := self._holders.get(digest)) is not None:
            if self._refs[holder] > 0:
                return
            self._digests[holder] = None
            self._free.move_to_end(holder, last=False)
        self._holders[digest] = block
        self._digests[block] = digest

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free: sharing them takes as many off the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which must hold published content."""
        for block in blocks:
            assert self._digests[block] is not None, f"block {block} shared, and its content is not known"
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def is_writable(self, block: int) -> bool:
        """Whether it has one holder, and no content that another may come to rely on."""
        return self._refs[block] == 1 and self._digests[block] is None

    def forget(self) -> None:
        """No block's content is known any more."""
        self._holders.clear()
        self._digests = [None] * self.num_blocks

    def check(self, tables: Iterable[BlockTable]) -> None:
        """The integrity check: free + used = total, reference counts equal what the tables hold, and a digest and its
        block name each other.

        Raises AssertionError; run after every step in tests and under `--paranoid`.
        """
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        assert held == self._refs, "reference counts differ from what the block tables hold"
        assert sorted(self._free) == [block for block, refs in enumerate(self._refs) if refs == 0], (
            "the free list is not exactly the unreferenced blocks"
        )
        known = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        assert known == self._holders, "a digest and its block do not name each other"
        assert all(self._digests[block] is not None for block, refs in enumerate(self._refs) if refs > 1), (
            "a block that was never published is shared"
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
