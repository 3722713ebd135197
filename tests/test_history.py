"""HistoryTable: what a row knows follows its sequence through writes, swaps and clears; nothing else is ever felt."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.history import HistoryTable
from nanoserve.request import MAX_BIASES, SamplingParams

ROWS, LONGEST = 4, 12
NEUTRAL = ((0, 0, -1), (1.0, 0.0, 0.0))

params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 2.0]),
    logit_bias=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([-3.0, 4.5])), max_size=3).map(tuple),
    logprobs=st.sampled_from([None, 0, 7]),
)
rows = st.integers(0, ROWS - 1)
writes = st.tuples(st.just("write"), rows, st.lists(st.integers(0, 99), min_size=1, max_size=LONGEST), params)
edits = st.one_of(writes, st.tuples(st.just("clear"), rows), st.tuples(st.just("swap"), rows, rows))


def table_of() -> HistoryTable:
    return HistoryTable(ROWS, LONGEST, torch.device("cpu"))


@given(st.lists(edits, max_size=30))
def test_rows_hold_what_was_written_last_when_edited_in_any_order(script: list[tuple]) -> None:
    table, known = table_of(), dict[int, tuple[list[int], SamplingParams]]()
    addresses = table.addresses
    for kind, row, *rest in script:
        if kind == "write":
            table.write(row, rest[0], 1, rest[1])
            known[row] = (rest[0], rest[1])
        elif kind == "clear":
            table.clear(row)
            known.pop(row, None)
        else:
            table.swap(row, rest[0])
            moved = {row: rest[0], rest[0]: row}
            known = {moved.get(each, each): what for each, what in known.items()}
    assert table.addresses == addresses
    assert table.bears_on(range(ROWS)) is bool(known)
    for row in range(ROWS + 1):
        counts, penalties = tuple(table.window.counts[row].tolist()), tuple(table.window.penalties[row].tolist())
        assert table.bears_on([row]) is (row in known)
        if row not in known:
            assert (counts, penalties, table.row(row, LONGEST)) == (*NEUTRAL, None)
            continue
        tokens, wishes = known[row]
        assert table.row(row, len(tokens)) == tokens
        assert counts == (1, len(wishes.logit_bias), -1 if wishes.logprobs is None else wishes.logprobs)
        assert penalties == (wishes.repetition_penalty, wishes.presence_penalty, wishes.frequency_penalty)
        ids, values = (side[row, : counts[1]].tolist() for side in (table.window.bias_ids, table.window.bias_values))
        assert tuple(zip(ids, values, strict=True)) == wishes.logit_bias


def test_the_longest_bias_and_the_longest_sequence_fit() -> None:
    table = table_of()
    table.write(3, list(range(LONGEST)), 2, SamplingParams(logit_bias=tuple((i, 1.0) for i in range(MAX_BIASES))))
    assert table.row(3, LONGEST) == list(range(LONGEST))
    assert table.window.counts[3].tolist() == [2, MAX_BIASES, -1]
