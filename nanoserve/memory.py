"""How many blocks the K/V pool gets: arithmetic over numbers that the caller probed. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.blocks import blocks_for
from nanoserve.errors import ConfigError, OutOfMemory

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVPoolPlan:
    """What was decided, and from what.

    num_blocks       blocks the allocator hands out; one more (the sink) is allocated behind them
    capacity_tokens  num_blocks * block_size
    max_model_len    most tokens of one sequence: the deployment's, or the pool's capacity where that is smaller
    limited_by       what the size follows from: the flag, the free memory, or all that the table could ever use
    """

    num_blocks: int
    block_size: int
    bytes_per_token: int
    pool_bytes: int
    free_bytes: int
    capacity_tokens: int
    max_model_len: int
    max_sequences: int
    limited_by: str

    def describe(self) -> str:
        return (
            f"K/V pool: {self.num_blocks} blocks of {self.block_size} = {self.capacity_tokens:,} tokens, "
            f"{self.pool_bytes / MIB:,.0f} MiB (limited by {self.limited_by}); "
            f"{self.max_sequences} sequences of up to {self.max_model_len:,} tokens"
        )


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * itemsize


def plan_kv_pool(
    *,
    bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    max_sequences: int,
    free_bytes: int,
    share: float,
    requested_bytes: int | None,
) -> KVPoolPlan:
    """Size the pool: `requested_bytes` if given, else `share` of `free_bytes`, never more than the table can use.

    `free_bytes` is what is free after the weights. Raises ConfigError for a share outside (0, 1] and OutOfMemory if not
    even one block beside the sink fits, no two tokens do or the request exceeds what is free.
    """
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"--kv-memory-share is {share}; it must be above 0 and at most 1")
    bytes_per_block = bytes_per_token * block_size
    useful_blocks = max_sequences * blocks_for(max_model_len, block_size)
    if requested_bytes is not None:
        budget, limited_by = requested_bytes, "--kv-memory"
        if requested_bytes > free_bytes:
            raise OutOfMemory(
                f"--kv-memory asks for {requested_bytes / MIB:,.0f} MiB; {free_bytes / MIB:,.0f} MiB are free after "
                "the weights; lower it"
            )
    else:
        budget, limited_by = int(free_bytes * share), "free memory"
    num_blocks = budget // bytes_per_block - 1
    if num_blocks >= useful_blocks:
        num_blocks, limited_by = useful_blocks, "max_sequences x max_model_len"
    if num_blocks * block_size < 2:
        raise OutOfMemory(
            f"the K/V pool has {budget / MIB:,.1f} MiB ({limited_by}); one block and the sink take "
            f"{2 * bytes_per_block / MIB:,.1f} MiB; raise --kv-memory or free memory"
        )
    capacity = num_blocks * block_size
    return KVPoolPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        bytes_per_token=bytes_per_token,
        pool_bytes=(num_blocks + 1) * bytes_per_block,
        free_bytes=free_bytes,
        capacity_tokens=capacity,
        max_model_len=min(max_model_len, capacity),
        max_sequences=max_sequences,
        limited_by=limited_by,
    )
