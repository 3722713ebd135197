"""Random programs that the recorder accepts, run once: sizes of all sorts, every op, every kind of weights."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from nanoserve.history import HistoryTable
from nanoserve.kernels.native_head import HeadRecorder
from nanoserve.kernels.native_ops import new_kv_store
from nanoserve.kernels.native_pack import NATIVE_TYPES, PackedMatrix, StackedMatrix, pack_dense, stack
from nanoserve.ops import HistoryWindow, SamplingWindow, StepWindow
from nanoserve.request import SamplingParams
from tests.kernels.native import Harness, plain_step
from tests.kernels.test_native_ops import quantised
from tests.kernels.test_native_pack import SIZES

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MATRICES = (*NATIVE_TYPES, *DENSE)
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


def random_program(library: Any, rng: random.Random) -> None:
    """One layer and a head, from ids to remembered tokens, on a pool of `library`'s."""
    harness = Harness(library, threads=rng.randint(1, 3))
    rows, vocab = rng.choice((1, rng.randint(2, 20), rng.randint(2, 20), rng.randint(21, 150))), rng.randint(1, 200)
    hidden = rng.choice((64, 256, 32 * rng.randint(1, 6), rng.randint(1, 100)))
    head_dim, kv_heads = rng.choice(HEAD_DIMS), rng.randint(1, 3)
    heads, inner = (
        kv_heads * rng.choice((1, 2, 3, 5, 12)),
        rng.choice((256, 32 * rng.randint(1, 4), 16, rng.randint(1, 70))),
    )
    step, width, table = random_step(rng, rows, vocab)
    history = random_history(rng, len(step.last_tokens), vocab)

    def vector(n: int) -> Tensor | None:
        return torch.randn(n) if rng.random() < 0.5 else None

    def record(ops: HeadRecorder) -> Tensor:
        residual = ops.embed(_table(rng, vocab, hidden), step)
        x = ops.rms_norm(residual, torch.randn(hidden), 1e-5)
        qkv_size = (heads + 2 * kv_heads) * head_dim
        qkv = ops.linear(x, _stacked(rng, [heads * head_dim, 2 * kv_heads * head_dim], hidden), vector(qkv_size))
        store = new_kv_store(table.numel() + rows, kv_heads, head_dim)  # a sink slot for each row
        cos, sin = torch.randn(width, head_dim // 2), torch.randn(width, head_dim // 2)
        q = ops.record_rope(
            qkv, step, cos, sin, store, heads=heads, q_norm=vector(head_dim), k_norm=vector(head_dim), eps=1e-5
        )
        window = rng.choice((None, rng.randint(1, 200)))
        x = ops.record_attention(q, step, table, store, scale=0.1, window=window)
        x, residual = ops.add_rms_norm(
            ops.linear(x, _matrix(rng, hidden, heads * head_dim)), residual, torch.randn(hidden), 1e-5
        )
        both = ops.linear(x, _matrix(rng, 2 * inner, hidden), vector(2 * inner))
        if rng.random() < 0.5:
            ops.gather_rows(both, torch.arange(rows))  # read once more, so the gate is an op of its own
        x = ops.silu_mul(both) if rng.random() < 0.5 else ops.gelu_mul(both)
        x = ops.linear(x, _matrix(rng, hidden, inner))
        index = torch.tensor([rng.randrange(rows) for _ in range(rows)])
        logits = ops.logits(ops.gather_rows(x, index), _matrix(rng, vocab, hidden))
        adjusted = ops.adjust_logits(logits, history, step, index)
        tokens = ops.sample(adjusted, random_sampling(rng, rows), step.context_lens, index)
        ops.remember(step.last_tokens, step.table_rows, tokens, torch.arange(rows))
        ops.append_tokens(history, tokens, step, index)
        ops.logprobs(logits, tokens, history, step, index)
        ops.copy(torch.arange(9), torch.zeros(9, dtype=torch.int64))
        return tokens

    live = rng.choice((rows, rng.randint(0, rows)))
    (tokens,) = harness.run(record, live=live)
    assert ((tokens[:live] >= 0) & (tokens[:live] < vocab)).all()
    harness.pool.close()


def random_step(rng: random.Random, rows: int, vocab: int) -> tuple[StepWindow, int, Tensor]:
    """Rows of a few sequences, some of them consecutive positions of one; width, and the table's slots. A slot is
    written by one row: a thread sanitizer is to see the kernels' races, not the plan's."""
    sequences, width = rng.randint(1, 4), 16 * rng.randint(1, 30)
    step = plain_step(rows, max_sequences=max(sequences, rows))
    blocks = torch.tensor(rng.sample(range(sequences * width // 16), sequences * width // 16))
    table = (blocks[:, None] * 16 + torch.arange(16)).view(sequences, width).contiguous()
    taken: set[tuple[int, int]] = set()
    place = (0, 0)
    for row in range(rows):
        after = (place[0], place[1] + 1)
        place = after if rng.random() < 0.7 and after[1] < width else (rng.randrange(sequences), rng.randrange(width))
        real = place not in taken
        taken.add(place)
        step.input_ids[row] = rng.choice((-1, rng.randrange(vocab)))
        step.table_rows[row], step.positions[row] = place
        step.context_lens[row] = place[1] + 1 if real else 0
        step.write_slots[row] = table[place] if real else sequences * width + row
    step.last_tokens.copy_(torch.tensor([rng.randrange(-1, vocab + 1) for _ in range(len(step.last_tokens))]))
    return step, width, table


def random_history(rng: random.Random, rows: int, vocab: int) -> HistoryWindow:
    table = HistoryTable(rows, rng.randint(1, 300), torch.device("cpu"))
    for row in range(rows):
        params = SamplingParams(
            repetition_penalty=rng.choice((1.0, 1.3)), presence_penalty=rng.choice((0.0, -1.0)),
            frequency_penalty=rng.choice((0.0, 0.7)), logprobs=rng.choice((None, 0, 3, 20)),
            logit_bias=tuple((rng.randrange(vocab), 1.0) for _ in range(rng.randint(0, 4))),
        )  # fmt: skip
        known = [rng.randrange(vocab) for _ in range(rng.randint(1, table.window.tokens.shape[1]))]
        table.write(row, known, rng.randint(1, len(known)), params)
    return table.window


def random_sampling(rng: random.Random, rows: int) -> SamplingWindow:
    def floats(*choices: float) -> Tensor:
        return torch.tensor([rng.choice(choices) for _ in range(rows)], dtype=torch.float32)

    def integers(below: int) -> Tensor:
        return torch.tensor([rng.choice((0, rng.randrange(below))) for _ in range(rows)])

    return SamplingWindow(
        floats(0.0, 1e-5, 0.7, 2.0),
        integers(60),
        floats(1.0, 0.9, 0.3, 0.0),
        floats(0.0, 0.05, 1.0),
        integers(1 << 62),
        integers(4),
    )


def _kind(rng: random.Random, cols: int) -> str:
    """A kind whose blocks fit; one with the largest blocks that do, as often as not."""
    fitting = [name for name in MATRICES if name in DENSE or cols % max(SIZES[name][0], 32) == 0]
    largest = max(SIZES[name][0] if name not in DENSE else 1 for name in fitting)
    rarest = [name for name in fitting if name not in DENSE and SIZES[name][0] == largest]
    return rng.choice(rarest if rarest and rng.random() < 0.5 else fitting)


def _table(rng: random.Random, rows: int, cols: int) -> PackedMatrix | Tensor:
    name = _kind(rng, cols)
    return torch.randn(rows, cols).to(DENSE[name]) if name in DENSE else quantised(name, rows, cols)


def _matrix(rng: random.Random, rows: int, cols: int) -> PackedMatrix:
    name = _kind(rng, cols)
    if name in DENSE:
        return pack_dense((torch.randn(rows, cols) * cols**-0.5).to(DENSE[name]))
    return quantised(name, rows, cols)


def _stacked(rng: random.Random, rows: list[int], cols: int) -> PackedMatrix | StackedMatrix:
    return stack([_matrix(rng, each, cols) for each in rows])
