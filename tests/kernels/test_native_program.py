"""Whole native programs: invariance to the bit, the pool's life, the arena."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
import weakref
from random import Random

import pytest
import torch

from nanoserve.errors import OutOfMemory
from nanoserve.kernels import native_lib
from nanoserve.kernels.native_arena import Arena
from nanoserve.kernels.native_ops import segments
from nanoserve.kernels.native_pack import pack_dense
from tests.kernels.native import Harness, Runner, TinyModel
from tests.kernels.test_native_ops import feed

TOKENS = [(7 * i * i + 3) % 90 for i in range(150)]


def tiny(harness: Harness, *, window: int | None = None, quantised: bool = True) -> Runner:
    def pack(weight: torch.Tensor):  # type: ignore[no-untyped-def]
        if not quantised:
            return pack_dense(weight.bfloat16())
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import quantize

        from nanoserve.kernels.native_pack import pack_gguf

        raw = quantize(weight.numpy(), GGMLQuantizationType.Q4_1)
        return pack_gguf(raw.reshape(-1), "Q4_1", *weight.shape)

    return TinyModel(
        harness, hidden=64, heads=6, kv_heads=2, head_dim=32, inner=96, vocab=90, pack=pack, window=window
    ).build()


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("window", [None, 50])
def test_logits_have_the_same_bits_however_a_prompt_is_cut(
    library: native_lib.NativeLibrary, window: int | None, quantised: bool
) -> None:
    harness = Harness(library, threads=2)
    runner = tiny(harness, window=window, quantised=quantised)
    whole = runner.whole(TOKENS, 0, chunk=len(TOKENS))
    assert whole.isfinite().all()
    for table_row, (chunk, rows) in enumerate([(1, 1), (1, 32), (16, 16), (64, 64), (13, 40)], start=1):
        assert torch.equal(runner.whole(TOKENS, table_row, chunk=chunk, rows=rows), whole), (chunk, rows)
    harness.pool.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_logits_have_the_same_bits_on_any_number_of_threads(library: native_lib.NativeLibrary, threads: int) -> None:
    outs = []
    for count in (2, threads):
        harness = Harness(library, threads=count)
        outs.append(tiny(harness).whole(TOKENS, 0, chunk=50))
        harness.pool.close()
    assert torch.equal(*outs)


@pytest.mark.parametrize("neighbours", [1, 7])
def test_a_sequences_logits_have_the_same_bits_beside_others(harness: Harness, neighbours: int) -> None:
    runner = tiny(harness)
    alone = runner.whole(TOKENS[:40], 0, chunk=1)
    together = []
    for position in range(40):
        ids = [TOKENS[position]] + [(position * 5 + n) % 90 for n in range(neighbours)]
        rows = [0, *range(1, neighbours)] if neighbours < 8 else [0]
        ids = ids[: len(rows)]
        together.append(runner.step(ids, [position] * len(ids), rows, rows=32)[0])
    assert torch.equal(torch.stack(together), alone)


def test_poison_in_every_unwritten_slot_changes_nothing(harness: Harness) -> None:
    clean = tiny(harness).whole(TOKENS, 3, chunk=30)
    runner = tiny(harness)
    for store in runner.stores:
        for side in store:
            side.fill_(float("nan"))
    assert torch.equal(runner.whole(TOKENS, 3, chunk=30), clean)


def test_pad_rows_leave_the_pool_as_it_was(harness: Harness) -> None:
    runner = tiny(harness)
    runner.whole(TOKENS, 0, chunk=50)
    before = [side.clone() for store in runner.stores for side in store]
    runner.step([1, 2, 3], [0, 0, 0], [1, 2, 5], rows=32)
    after = [side for store in runner.stores for side in store]
    written = set((runner.table[[1, 2, 5], 0] // 16).tolist())
    for old, new in zip(before, after, strict=True):
        changed = (old.view(torch.int16) != new.view(torch.int16)).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= written


def test_a_narrowed_program_writes_the_same_bits_and_no_row_beyond(harness: Harness) -> None:
    """A program of 32 rows and its narrowed copy, with 20 real rows: the copy stops after 8."""
    x, weight = torch.randn(32, 64), pack_dense(torch.randn(90, 64))
    out = harness.recorder.linear(feed(harness.recorder, x), weight)
    program = harness.recorder.finish()
    harness.live[0] = 20
    harness.replay(program)
    whole = out.clone()
    out.fill_(-1)
    harness.replay(program.narrowed(8))
    assert torch.equal(out[:8], whole[:8])
    assert bool((out[8:] == -1).all())
    harness.replay(program)
    assert torch.equal(out[:20], whole[:20]), "the program it was made from is what it was"


def test_a_launch_returns_at_once_and_tells_its_end_through_the_descriptor(fastest: native_lib.NativeLibrary) -> None:
    harness = Harness(fastest, threads=2)
    weight = pack_dense(torch.randn(4096, 1024))
    x = torch.randn(64, 1024)
    out = harness.recorder.linear(feed(harness.recorder, x), weight)
    program = segments([harness.recorder.finish()] * 8)
    harness.live[0] = 64
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def launch_thrice() -> bool:
        """Whether the first still ran when the third was launched, which is refused then: one may wait, not two."""
        harness.pool.launch(program, descriptor)
        harness.pool.launch(program, descriptor)
        try:
            harness.pool.launch(program, descriptor)
        except RuntimeError:
            refused = True
        else:
            refused = False  # the machine took this thread's core away for as long as the program ran
        told = 0
        while told < 3 - refused:
            assert select.select([descriptor], [], [], 60)[0] == [descriptor]
            told += os.eventfd_read(descriptor)
        harness.pool.wait()
        return refused

    assert any(launch_thrice() for _ in range(5))
    os.close(descriptor)
    torch.testing.assert_close(out, x @ weight_of(weight).T, rtol=1e-3, atol=1e-3)
    harness.pool.close()


def test_the_end_has_been_told_once_nothing_runs(fastest: native_lib.NativeLibrary) -> None:
    """Or a descriptor that is closed then is written to when it is somebody else's."""
    harness = Harness(fastest, threads=2)
    x = torch.randn(4, 64)
    out = feed(harness.recorder, x)
    program = segments([harness.recorder.finish()])
    harness.live[0] = 4
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    for _ in range(3000):
        harness.pool.launch(program, descriptor)
        harness.pool.wait()
        assert os.eventfd_read(descriptor) == 1  # raises if nothing was written yet
    os.close(descriptor)
    assert torch.equal(out, x)
    harness.pool.close()
    harness.pool.wait()  # for nothing


def weight_of(packed):  # type: ignore[no-untyped-def]
    from nanoserve.kernels.native_pack import unpack

    return unpack(packed)


def test_idle_threads_use_no_processor_time(fastest: native_lib.NativeLibrary) -> None:
    harness = Harness(fastest, threads=2)
    harness.run(lambda r: r.linear(feed(r, torch.randn(4, 64)), pack_dense(torch.randn(64, 64))))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1
    harness.pool.close()


def test_many_launches_from_many_threads_run_one_at_a_time(fastest: native_lib.NativeLibrary) -> None:
    harness = Harness(fastest, threads=3)
    runner = tiny(harness)
    expected = runner.step([5], [0], [0])
    lock, wrong = threading.Lock(), []

    def work() -> None:
        for _ in range(100):
            with lock:
                if not torch.equal(runner.step([5], [0], [0]), expected):
                    wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    harness.pool.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_launches_made_ahead_run_in_order_and_each_tells_its_end(
    fastest: native_lib.NativeLibrary, threads: int
) -> None:
    harness, random = Harness(fastest, threads=threads), Random(threads)
    program, newest = tiny(harness).following(3)
    expected = [newest.tolist()]
    for _ in range(400):
        harness.replay(program)
        expected.append(newest.tolist())
    program, newest = tiny(harness).following(3)
    launch, descriptor = segments([program]), os.eventfd(0, os.EFD_NONBLOCK)
    told = 0
    for launched in range(400):
        if launched - told == 2:
            assert select.select([descriptor], [], [], 60)[0] == [descriptor]
            told += os.eventfd_read(descriptor)
        harness.pool.launch(launch, descriptor)
        if random.random() < 0.3:
            harness.pool.wait()
            assert newest.tolist() == expected[launched + 1]
    harness.pool.wait()
    assert newest.tolist() == expected[400]
    harness.pool.close()
    assert told + os.eventfd_read(descriptor) == 400
    os.close(descriptor)


def test_closing_a_pool_twice_is_harmless(fastest: native_lib.NativeLibrary) -> None:
    pool = fastest.pool(2)
    pool.close()
    pool.close()


class Released:
    """Whom an arena tells of places that are free again."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def note(self, address: int) -> None:
        self.addresses.append(address)


def test_an_arena_hands_a_place_back_once_the_last_view_is_gone() -> None:
    arena, released = Arena(1 << 16), Released()
    tensor = arena.tensor(4, 8, torch.float32, released.note)
    address, view = tensor.data_ptr(), tensor[:, 2:4].view(4, 2)
    del tensor
    gc.collect()
    assert not released.addresses
    assert arena.used == 128
    view.fill_(1.0)
    del view
    assert released.addresses == [address]
    assert arena.used == 0


def test_an_arena_and_its_owner_are_let_go_though_they_keep_a_tensor() -> None:
    released = Released()
    arena = Arena(1 << 12)
    tensor = arena.tensor(1, 8, torch.float32, released.note)
    owners = weakref.ref(arena), weakref.ref(released)
    released.kept = tensor  # type: ignore[attr-defined]
    del arena, released, tensor
    gc.collect()
    assert [owner() for owner in owners] == [None, None]


def test_an_arena_merges_what_is_given_back_in_any_order() -> None:
    arena = Arena(1 << 12)
    places = [arena.take(512) for _ in range(8)]
    with pytest.raises(OutOfMemory, match="lower the step's rows"):
        arena.take(1)
    for index in (3, 0, 7, 1, 2, 6, 5, 4):
        arena.give(places[index], 512)
    assert arena.take(1 << 12) == 0
    assert arena.peak == 1 << 12


def test_what_nobody_reads_as_floats_is_not_written_as_floats(harness: Harness) -> None:
    recorder = harness.recorder
    x = recorder.rms_norm(feed(recorder, torch.randn(3, 64)), torch.ones(64), 1e-5)
    kept = recorder.linear(x, _packed())
    del x
    program = recorder.finish()
    assert len(program) == 3
    assert program.records[1].norm.out is None
    assert program.records[1].norm.quants
    assert kept.shape == (3, 32)


def _packed():  # type: ignore[no-untyped-def]
    from tests.kernels.test_native_ops import quantised

    return quantised("Q4_1", 32, 64)
