"""SlotTable: windows are views on one address, pads read the sink, refusals name what broke."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.slots import SlotTable

SINK = 999


def test_every_entry_is_the_sink_when_nothing_was_assigned() -> None:
    table = SlotTable(3, 32, SINK)
    assert table.shape == (3, 32)
    assert torch.equal(table.read((), pad_rows=3, width=32), torch.full((3, 32), SINK))


def test_window_follows_later_writes_when_it_was_handed_out_before() -> None:
    """A recorded graph keeps its window for ever: what is written afterwards must show through it."""
    table = SlotTable(4, 64, SINK)
    window = table.read((), pad_rows=2, width=32)
    table.write(1, 30, [7, 8, 9])
    assert window[1, 29:].tolist() == [SINK, 7, 8]
    table.clear(1)
    assert window[1].tolist() == [SINK] * 32


def test_window_is_a_view_with_the_tables_address_and_stride() -> None:
    table = SlotTable(4, 64, SINK)
    window = table.read((0, 1), pad_rows=1, width=32)
    assert tuple(window.shape) == (3, 32)
    assert window.data_ptr() == table.address
    assert window.stride() == (64, 1)
    assert table.row(2, 16).data_ptr() == table.address + 2 * 64 * 8


def test_address_moves_when_the_table_is_moved_elsewhere() -> None:
    table = SlotTable(4, 64, SINK)
    stale = table.read((), pad_rows=1, width=8)
    table.to("meta")
    assert table.device.type == "meta"
    assert stale.device.type == "cpu"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 3), st.integers(0, 9), st.integers(0, 6)),
            st.tuples(st.just("clear"), st.integers(0, 3), st.just(0), st.just(0)),
            st.tuples(st.just("swap"), st.integers(0, 3), st.integers(0, 3), st.just(0)),
        ),
        max_size=30,
    )
)
def test_table_equals_plain_lists_when_edited_in_any_order(edits: list[tuple[str, int, int, int]]) -> None:
    table = SlotTable(4, 16, SINK)
    address = table.address
    model = [[SINK] * 16 for _ in range(4)]
    for number, (kind, a, b, count) in enumerate(edits):
        if kind == "write":
            slots = [100 * number + i for i in range(count)]
            table.write(a, b, slots)
            model[a][b : b + count] = slots
        elif kind == "clear":
            table.clear(a)
            model[a] = [SINK] * 16
        else:
            table.swap(a, b)
            model[a], model[b] = model[b], model[a]
    assert table.read((0, 1, 2, 3), width=16).tolist() == model
    assert table.address == address


@pytest.mark.parametrize(
    ("rows", "pads", "width", "message"),
    [
        ((), 0, 8, "no rows and no pad rows"),
        ((1,), 0, 8, "not a prefix"),
        ((0, 2), 0, 8, "not a prefix"),
        ((1, 0), 2, 8, "not a prefix"),
        ((0, 1), 3, 8, "does not lie within"),
        ((0,), 0, 65, "does not lie within"),
        ((0,), 0, 0, "does not lie within"),
    ],
)
def test_window_is_refused_when_it_is_not_on_the_table(
    rows: tuple[int, ...], pads: int, width: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SlotTable(4, 64, SINK).read(rows, pad_rows=pads, width=width)
