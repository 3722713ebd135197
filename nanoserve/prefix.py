"""Prefix caching: which computed blocks hold what a sequence would compute next. Integers and bytes.

K and V of a token depend on that token and on all before it, so a full block is named by a digest chained from the
sequence's start:

    digest[-1] = BLAKE2b(key, cache_salt)
    digest[i]  = BLAKE2b(key, digest[i - 1] + tokens of block i)

A digest is believed without comparing tokens, hence a keyed cryptographic hash: the key is drawn for each engine, so no
client can construct two prompts with one digest, and equal prompts of two models share nothing. `cache_salt` parts
tenants: without the salt nobody can tell, by how fast an answer begins, what was asked under it.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable
from hashlib import blake2b

from nanoserve.blocks import BlockPool
from nanoserve.sequence import Sequence

DIGEST_BYTES = 32


class PrefixCache:
    """Finds, awaits and publishes blocks of one pool by what they hold. Counts tokens, of first admissions only.

    queried_tokens  tokens that were looked for
    cached_tokens   tokens that were found
    key             of the hash, at most 64 bytes; None draws one
    """

    def __init__(self, pool: BlockPool, key: bytes | None = None) -> None:
        self._pool = pool
        self._key = secrets.token_bytes(DIGEST_BYTES) if key is None else key
        self.queried_tokens = 0
        self.cached_tokens = 0

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens, in order; a copy of the longest run there is.

        The last known token is never among them: computing it is what chooses the next one.
        """
        blocks = []
        for digest in self.digests(sequence, self._reusable(sequence)):
            if (block := self._pool.holders.get(digest)) is None:
                break
            blocks.append(block)
        return blocks

    def awaited(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> int:
        """Leading blocks the sequence shares with one of `prefilling` that will compute the first it lacks; 0 if none.

        It is to be admitted after that one has computed them: to compute them a second time would gain nothing.
        """
        lacking = None
        for other in prefilling:
            lacking = len(self.find(sequence)) if lacking is None else lacking
            common = min(self._reusable(sequence), other.target // self._pool.block_size)
            if not other.computed // self._pool.block_size <= lacking < common:
                continue
            ours, theirs = self.digests(sequence, common), self.digests(other, common)
            if ours[lacking] == theirs[lacking]:
                return next((index for index in range(lacking, common) if ours[index] != theirs[index]), common)
        return 0

    def count(self, sequence: Sequence) -> None:
        """Account for an admission that reused `sequence.computed` tokens. A second one, after a preemption, finds the
        sequence's own work again and counts for nothing."""
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            self.queried_tokens += sequence.target
            self.cached_tokens += sequence.computed

    def publish(self, sequence: Sequence, computed: int) -> None:
        """K/V of the first `computed` tokens is written, of `sequence.computed` it was before: share what got full."""
        size = self._pool.block_size
        first, full = sequence.computed // size, computed // size
        if first < full:
            for block, digest in zip(
                sequence.table.blocks[first:full], self.digests(sequence, full)[first:], strict=True
            ):
                self._pool.publish(block, digest)

    def check(self, sequence: Sequence) -> None:
        """Raises AssertionError unless the digests of a running sequence's blocks are those of its own tokens."""
        for index, digest in enumerate(self.digests(sequence, sequence.computed // self._pool.block_size)):
            block = sequence.table.blocks[index]
            known = self._pool.digest(block)
            assert known in (None, digest), f"block {block} holds other tokens than the sequence that reads it"

    def digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """Of the sequence's first `count` blocks, all of whose tokens must be known. Computed once, kept with it."""
        size, chain = self._pool.block_size, sequence.digests
        for index in range(len(chain), count):
            tokens = array("I", sequence.tokens[index * size : (index + 1) * size])
            assert len(tokens) == size, "a digest of a block that is not full"
            parent = chain[-1] if chain else self._hash(sequence.cache_salt.encode("utf-8", "surrogatepass"))
            chain.append(self._hash(parent + tokens.tobytes()))
        return chain[:count]

    def _reusable(self, sequence: Sequence) -> int:
        """Full blocks before the last known token."""
        return (sequence.target - 1) // self._pool.block_size

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=DIGEST_BYTES).digest()
