"""How the K/V pool is sized, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nanoserve.errors import ConfigError, OutOfMemory
from nanoserve.memory import MIB, KVPoolPlan, kv_bytes_per_token, plan_kv_pool


def plan(**changes: Any) -> KVPoolPlan:
    arguments: dict[str, Any] = {
        "bytes_per_token": 1024,
        "block_size": 16,
        "max_model_len": 2048,
        "max_sequences": 8,
        "free_bytes": 64 * MIB,
        "share": 0.5,
        "requested_bytes": None,
    }
    return plan_kv_pool(**(arguments | changes))


def test_bytes_of_a_token_are_the_real_models() -> None:
    """SmolLM2-135M: 30 layers of 3 K/V heads of 64, in fp32."""
    assert kv_bytes_per_token(num_layers=30, num_kv_heads=3, head_dim=64, itemsize=4) == 46_080


@given(
    st.integers(1, 100_000),
    st.integers(1, 64),
    st.integers(2, 8192),
    st.integers(1, 64),
    st.integers(0, 1 << 32),
    st.floats(0.01, 1.0),
)
def test_pool_fits_its_share_and_serves_its_longest_sequence_when_it_is_planned(
    token: int, block: int, length: int, sequences: int, free: int, share: float
) -> None:
    try:
        made = plan(
            bytes_per_token=token,
            block_size=block,
            max_model_len=length,
            max_sequences=sequences,
            free_bytes=free,
            share=share,
        )
    except OutOfMemory:
        assert free * share < 3 * token * block or block == 1
        return
    assert made.pool_bytes == (made.num_blocks + 1) * block * token <= free * share
    assert made.capacity_tokens == made.num_blocks * block
    assert 2 <= made.max_model_len <= min(length, made.capacity_tokens)
    useful = sequences * -(-length // block)
    assert made.num_blocks <= useful
    if made.limited_by == "free memory":
        assert made.pool_bytes + token * block > int(free * share)
    else:
        assert made.num_blocks == useful


def test_pool_follows_the_flag_when_one_is_given() -> None:
    made = plan(requested_bytes=2 * MIB)
    assert (made.num_blocks, made.limited_by) == (127, "--kv-memory")
    assert made.max_model_len == 127 * 16
    assert "127 blocks of 16 = 2,032 tokens" in made.describe()


def test_pool_is_no_larger_than_the_table_can_use_when_memory_is_plenty() -> None:
    made = plan(free_bytes=1 << 40)
    assert (made.num_blocks, made.limited_by) == (8 * 128, "max_sequences x max_model_len")
    assert made.max_model_len == 2048


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_share_is_refused_when_it_is_no_share(share: float) -> None:
    with pytest.raises(ConfigError, match="--kv-memory-share"):
        plan(share=share)


@given(st.integers(0, 1 << 20))
def test_pool_is_refused_with_both_numbers_when_it_cannot_hold_one_block(requested: int) -> None:
    assume(requested < 2 * 16 * 1024)
    with pytest.raises(OutOfMemory, match=r"one block and the sink take 0\.0 MiB; raise --kv-memory"):
        plan(requested_bytes=requested)


def test_pool_is_refused_when_the_flag_asks_for_more_than_is_free() -> None:
    with pytest.raises(OutOfMemory, match="asks for 65 MiB; 64 MiB are free"):
        plan(requested_bytes=65 * MIB)


def test_pool_is_refused_when_it_holds_a_prompt_and_no_answer() -> None:
    with pytest.raises(OutOfMemory, match="raise --kv-memory"):
        plan(block_size=1, requested_bytes=2 * 1024)
