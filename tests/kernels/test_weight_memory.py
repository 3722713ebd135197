"""Where weights and K/V lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.kernels import memory
from nanoserve.kernels.memory import LINE, WeightMemory, lazy_zeros
from nanoserve.kernels.native_pack import NATIVE_TYPES, PackedMatrix, pack_dense, pack_gguf, packed_bytes, stack, unpack
from tests.kernels.test_native_pack import SIZES, random_blocks

SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def packed(name: str, rows: int, blocks: int, room: WeightMemory, seed: int = 0) -> PackedMatrix:
    raw = random_blocks(name, rows, blocks, seed).reshape(-1)
    return pack_gguf(raw, name, rows, blocks * SIZES[name][0], take=room.take)


def test_parts_packed_one_after_another_are_stacked_where_they_lie() -> None:
    room = WeightMemory()
    parts = [packed("Q4_1", 32, 2, room), packed("Q4_1", 16, 2, room, seed=1), packed("Q4_1", 9, 2, room, seed=2)]
    made = stack(parts)
    assert isinstance(made, PackedMatrix)
    assert made.data.data_ptr() == parts[0].data.data_ptr()
    assert torch.equal(unpack(made), torch.cat([unpack(part) for part in parts]))
    apart = stack([parts[0], parts[2]])
    assert isinstance(apart, PackedMatrix)
    assert torch.equal(unpack(apart), torch.cat([unpack(parts[0]), unpack(parts[2])]))


def test_what_was_reserved_lies_side_by_side_though_the_room_was_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROOM", 1 << 16)
    room = WeightMemory()
    room.take(1, (1 << 16) - 2 * LINE)
    room.reserve(4 * LINE)
    first, second = room.take(1, 3 * LINE), room.take(1, LINE)
    assert first.data_ptr() + 3 * LINE == second.data_ptr()
    assert len(room.take(1, 1 << 17)[0]) == 1 << 17


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 300)), min_size=1, max_size=20))
def test_room_is_given_once_and_begins_at_a_cache_line(sizes: list[tuple[int, int]]) -> None:
    room = WeightMemory()
    taken = [room.take(rows, row_bytes) for rows, row_bytes in sizes]
    for index, tensor in enumerate(taken):
        assert tensor.shape == sizes[index]
        assert not tensor.data_ptr() % LINE
        tensor.fill_(index + 1)
    for index, tensor in enumerate(taken):
        assert bool((tensor == index + 1).all())


@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_no_packed_matrix_is_larger_than_was_reserved_for_it(name: str) -> None:
    for rows in (1, 15, 16, 17, 100):
        for blocks in (1, 2, 3):
            assert packed(name, rows, blocks, WeightMemory()).nbytes <= packed_bytes(rows, blocks * SIZES[name][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(rows=st.integers(1, 50), cols=st.integers(1, 70))
def test_no_dense_matrix_is_larger_than_was_reserved_for_it(dtype: torch.dtype, rows: int, cols: int) -> None:
    made = pack_dense(torch.randn(rows, cols).to(dtype), take=WeightMemory().take)
    assert made.nbytes <= packed_bytes(rows, cols)


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no huge pages")
def test_weights_ask_for_huge_pages_and_kv_for_none() -> None:
    weights = WeightMemory().take(1, 8 << 20)
    pool = lazy_zeros((8 << 20,), torch.uint8)
    weights.fill_(1)
    pool.fill_(1)
    assert {"hg"} <= flags(weights)
    assert {"nh"} <= flags(pool)


def flags(tensor: torch.Tensor) -> set[str]:
    """What the kernel knows of the mapping that a tensor lies in (proc_pid_smaps(5), VmFlags)."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, stop = (int(each, 16) for each in first.split("-"))
            inside = start <= tensor.data_ptr() < stop
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    return set()
