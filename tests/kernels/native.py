"""Running single native ops on plain tensors, and the models and plans the native tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.kernels import native_lib
from nanoserve.kernels.native_arena import Arena
from nanoserve.kernels.native_head import HeadRecorder
from nanoserve.kernels.native_ops import Program, new_kv_store, segments
from nanoserve.kernels.native_pack import PackedMatrix
from nanoserve.models.config import RopeConfig
from nanoserve.models.rope import rope_tables
from nanoserve.ops import SamplingWindow, StepWindow

MAX_ROWS = 256


class Harness:
    """A pool with a recorder over a private arena, for recording and running one thing at a time."""

    def __init__(self, library: native_lib.NativeLibrary, *, threads: int) -> None:
        self.library = library
        self.pool = library.pool(threads)
        self.live = torch.zeros(1, dtype=torch.int64)
        self.live_logits = torch.zeros(1, dtype=torch.int64)
        self.recorder = HeadRecorder(
            self.pool, Arena(1 << 26), max_rows=MAX_ROWS, live_rows=self.live, live_logit_rows=self.live_logits
        )

    def run(self, record: Callable[[HeadRecorder], Tensor | tuple[Tensor, ...]], live: int = MAX_ROWS) -> list[Tensor]:
        """Record, run once and return copies of the outputs."""
        self.live[0] = live
        self.live_logits[0] = live
        made = record(self.recorder)
        program = self.recorder.finish()
        outputs = made if isinstance(made, tuple) else (made,)
        self.pool.run(segments([program]))
        return [each.clone() for each in outputs]

    def replay(self, program: Program) -> None:
        self.pool.run(segments([program]))


def plain_step(rows: int, *, max_sequences: int = 4) -> StepWindow:
    """All fields zero, `context_lens` one."""
    zeros = [torch.zeros(rows, dtype=torch.int64) for _ in range(4)]
    return StepWindow(
        zeros[0], zeros[1], zeros[2], torch.ones(rows, dtype=torch.int64), zeros[3],
        torch.zeros(max_sequences + 1, dtype=torch.int64),
    )  # fmt: skip


def greedy(rows: int) -> SamplingWindow:
    ints = [torch.zeros(rows, dtype=torch.int64) for _ in range(3)]
    return SamplingWindow(torch.zeros(rows), ints[0], torch.ones(rows), torch.zeros(rows), ints[1], ints[2])


@dataclass(slots=True)
class TinyModel:
    """One decoder of random packed weights, driven through a recorder: every op the real one has."""

    harness: Harness
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    pack: Callable[[Tensor], PackedMatrix]
    layers: int = 2
    sequences: int = 8
    width: int = 512
    window: int | None = None

    def build(self, seed: int = 0) -> Runner:
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, cols: int) -> PackedMatrix:
            return self.pack(torch.randn(rows, cols, generator=generator) * cols**-0.5)

        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        layers = [
            {
                "qkv": weight(qkv, self.hidden),
                "o": weight(self.hidden, self.heads * self.head_dim),
                "gate_up": weight(2 * self.inner, self.hidden),
                "down": weight(self.hidden, self.inner),
            }
            for _ in range(self.layers)
        ]
        embed = torch.randn(self.vocab, self.hidden, generator=generator)
        return Runner(self, layers, embed, weight(self.vocab, self.hidden))


class Runner:
    """Programs of a TinyModel by (rows, logit rows), over K/V and a slot table of their own."""

    def __init__(
        self, model: TinyModel, layers: list[dict[str, PackedMatrix]], embed: Tensor, head: PackedMatrix
    ) -> None:
        self.model = model
        self.layers = layers
        self.embed = embed
        self.head = head
        self.slots = model.sequences * model.width
        self.stores = [new_kv_store(self.slots + 16, model.kv_heads, model.head_dim) for _ in layers]
        blocks = torch.randperm(model.sequences * model.width // 16, generator=torch.Generator().manual_seed(1))
        self.table = (blocks[:, None] * 16 + torch.arange(16)).view(model.sequences, model.width).contiguous()
        self.cos, self.sin = rope_tables(RopeConfig(), model.head_dim, model.width)
        self.norm = torch.ones(model.hidden)
        self._programs: dict[int, tuple[Program, StepWindow, Tensor, Tensor, SamplingWindow]] = {}

    def _program(self, rows: int) -> tuple[Program, StepWindow, Tensor, Tensor, SamplingWindow]:
        if rows in self._programs:
            return self._programs[rows]
        model, ops, step = self.model, self.model.harness.recorder, plain_step(rows, max_sequences=self.model.sequences)
        sampling, index = greedy(rows), torch.arange(rows)
        x = residual = ops.embed(self.embed, step)
        x = ops.rms_norm(residual, self.norm, 1e-5)
        for layer, store in zip(self.layers, self.stores, strict=True):
            q = ops.record_rope(ops.linear(x, layer["qkv"]), step, self.cos, self.sin, store, heads=model.heads)
            attended = ops.record_attention(q, step, self.table, store, scale=model.head_dim**-0.5, window=model.window)
            x, residual = ops.add_rms_norm(ops.linear(attended, layer["o"]), residual, self.norm, 1e-5)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer["gate_up"])), layer["down"])
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
        logits = ops.logits(ops.gather_rows(x, index), self.head)
        tokens = ops.sample(logits, sampling, step.context_lens, index)
        ops.remember(step.last_tokens, step.table_rows, tokens, index)
        self._programs[rows] = ops.finish(), step, logits, tokens, sampling
        return self._programs[rows]

    def step(self, ids: list[int], positions: list[int], table_rows: list[int], rows: int | None = None) -> Tensor:
        """`[len(ids), vocab]` logits of one step, in a program of `rows` rows (the rest are pad rows)."""
        real = len(ids)
        program, step, logits, _, _ = self._program(rows or real)
        step.input_ids.fill_(0)
        step.context_lens.fill_(0)
        step.write_slots.fill_(self.slots)
        step.table_rows.fill_(self.model.sequences)
        step.input_ids[:real] = torch.tensor(ids)
        step.positions[:real] = torch.tensor(positions)
        step.table_rows[:real] = torch.tensor(table_rows)
        step.context_lens[:real] = step.positions[:real] + 1
        step.write_slots[:real] = self.table[step.table_rows[:real], step.positions[:real]]
        self.model.harness.live[0] = self.model.harness.live_logits[0] = real
        self.model.harness.replay(program)
        return logits[:real].clone()

    def whole(self, ids: list[int], table_row: int, chunk: int, rows: int | None = None) -> Tensor:
        """Logits of every position, computed `chunk` tokens at a time."""
        parts = [
            self.step(
                ids[at : at + chunk],
                list(range(at, min(at + chunk, len(ids)))),
                [table_row] * len(ids[at : at + chunk]),
                rows,
            )
            for at in range(0, len(ids), chunk)
        ]
        return torch.cat(parts)

    def following(self, rows: int) -> tuple[Program, Tensor]:
        """A program whose every replay takes each row's newest token in and leaves the next, and those tokens."""
        program, step, _, _, sampling = self._program(rows)
        step.input_ids.fill_(-1)
        step.table_rows.copy_(torch.arange(rows))
        step.context_lens.fill_(1)
        step.write_slots.copy_(self.table[:rows, 0])
        step.last_tokens[:rows] = torch.arange(rows)
        sampling.temperature.fill_(1.0)
        sampling.seed.copy_(torch.arange(rows))
        self.model.harness.live[0] = self.model.harness.live_logits[0] = rows
        return program, step.last_tokens[:rows]
