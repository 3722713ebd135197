"""BlockPool and BlockTable: nothing lost, nothing handed out twice, the sink never handed out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.blocks import BlockPool, BlockTable, blocks_for
from nanoserve.errors import PoolExhausted


def table_of(pool: BlockPool, count: int) -> BlockTable:
    table = BlockTable(pool.block_size)
    table.blocks = pool.allocate(count)
    return table


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_for_is_the_least_count_that_holds_the_tokens(tokens: int, block_size: int) -> None:
    count = blocks_for(tokens, block_size)
    assert (count - 1) * block_size < tokens <= count * block_size


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_pool_balances_when_tables_come_and_go_in_any_order(num_blocks: int, moves: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks, 4)
    tables: list[BlockTable] = []
    for takes, amount in moves:
        if takes and amount <= pool.free_blocks:
            tables.append(table_of(pool, amount))
        elif takes:
            with pytest.raises(PoolExhausted):
                pool.allocate(amount)
        elif tables:
            pool.release(tables.pop(amount % len(tables)).blocks)
        pool.check(tables)
        held = [block for table in tables for block in table.blocks]
        assert len(set(held)) == len(held) == pool.used_blocks
        assert pool.free_blocks + pool.used_blocks == num_blocks
        assert all(0 <= block < num_blocks for block in held)


def test_allocation_takes_nothing_when_it_cannot_take_all() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match="2 blocks wanted, 1 of 3 free"):
        pool.allocate(2)
    assert pool.free_blocks == 1


def test_no_table_can_name_the_sink_when_the_whole_pool_is_handed_out() -> None:
    pool = BlockPool(5, 16)
    table = table_of(pool, 5)
    assert pool.sink_slot == 5 * 16
    assert sorted(table.slots(0, table.capacity)) == list(range(pool.sink_slot))


def test_block_stays_used_when_one_of_two_references_goes() -> None:
    pool = BlockPool(2, 16)
    first = table_of(pool, 1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([first, first])
    pool.release(first.blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(first.blocks)


def test_published_block_can_be_shared_until_its_space_is_needed() -> None:
    pool = BlockPool(3, 16)
    first = table_of(pool, 2)
    pool.publish(first.blocks[0], b"a")
    assert [pool.is_writable(block) for block in first.blocks] == [False, True]
    shared = pool.holders[b"a"]
    pool.share([shared])
    second = BlockTable(16)
    second.blocks = [shared]
    pool.check([first, second])
    assert (pool.used_blocks, pool.idle([shared])) == (2, 0)
    pool.release(second.blocks)
    pool.release(first.blocks)
    pool.check([])
    assert (pool.free_blocks, pool.idle([shared])) == (3, 1)
    pool.allocate(2)
    assert pool.holders == {b"a": shared}, "blocks of unknown content go first"
    assert pool.allocate(1) == [shared]
    assert not pool.holders


@pytest.mark.parametrize("in_use", [True, False])
def test_content_stays_where_it_is_used_when_two_blocks_hold_it(in_use: bool) -> None:
    pool = BlockPool(4, 16)
    old, young = table_of(pool, 1), table_of(pool, 1)
    pool.publish(old.blocks[0], b"a")
    if not in_use:
        pool.release(old.blocks)
    pool.publish(young.blocks[0], b"a")
    assert pool.holders[b"a"] == (old if in_use else young).blocks[0]
    pool.check([old, young] if in_use else [young])


def test_pool_speaks_up_when_content_is_published_or_shared_against_the_rules() -> None:
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="its content is not known"):
        pool.share([block])
    pool.publish(block, b"a")
    with pytest.raises(AssertionError, match="published twice"):
        pool.publish(block, b"b")
    pool.release([block])
    pool.forget()
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.publish(block, b"a")


@pytest.mark.parametrize(
    ("lost", "message"), [(True, "reference counts"), (False, "reference counts")], ids=["forgotten", "doubled"]
)
def test_check_speaks_up_when_a_table_and_the_counts_disagree(lost: bool, message: str) -> None:
    pool = BlockPool(4, 16)
    table = table_of(pool, 2)
    if lost:
        table.blocks.pop()
    else:
        table.blocks.append(table.blocks[0])
    with pytest.raises(AssertionError, match=message):
        pool.check([table])


@given(st.permutations(range(8)), st.integers(1, 9), st.data())
def test_slots_follow_the_blocks_when_a_range_is_read(order: list[int], block_size: int, data: st.DataObject) -> None:
    table = BlockTable(block_size)
    table.blocks = list(order)
    start = data.draw(st.integers(0, table.capacity))
    stop = data.draw(st.integers(start, table.capacity))
    expected = [order[p // block_size] * block_size + p % block_size for p in range(start, stop)]
    assert table.slots(start, stop) == expected == [table.slot(p) for p in range(start, stop)]


@given(st.integers(0, 8), st.integers(0, 100), st.integers(1, 16))
def test_missing_blocks_are_exactly_what_makes_the_tokens_fit(blocks: int, tokens: int, block_size: int) -> None:
    table = BlockTable(block_size)
    table.blocks = list(range(blocks))
    missing = table.missing_for(tokens)
    table.blocks += range(missing)
    assert table.capacity >= tokens
    assert missing == 0 or table.capacity - block_size < tokens
