"""The native kernels alone, on a GGUF model: seconds of whole decode steps and prefills, no scheduler around them.

A step is one launch of one recorded program, from token ids to sampled tokens. Every decode row is a sequence of its
own; a prefill is one sequence in chunks, whose rows share a table row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanoserve.errors import BadCheckpoint
from nanoserve.gguf_file import GGUFFile, read_gguf
from nanoserve.kernels import native_lib
from nanoserve.kernels.native_arena import Arena
from nanoserve.kernels.native_ops import Program, Recorder, new_kv_store, segments
from nanoserve.kernels.native_pack import NATIVE_TYPES, PackedMatrix, StackedMatrix, pack_dense, pack_gguf, stack
from nanoserve.models.config import ModelConfig
from nanoserve.models.gguf_config import gguf_config
from nanoserve.models.gguf_loader import read_tensor
from nanoserve.models.rope import rope_tables
from nanoserve.ops import SamplingWindow, StepWindow

ARENA_BYTES = 1 << 30
Matrix = PackedMatrix | StackedMatrix


@dataclass(frozen=True, slots=True)
class StepFigure:
    """One measured shape. `context` counts the row's own token; `kind` is decode or prefill."""

    kind: str
    rows: int
    context: int
    median_seconds: float
    least_seconds: float
    tokens: int
    bytes_read: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.median_seconds


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    post_attention_norm: Tensor
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix


class NativeModel:
    """A Llama-architecture GGUF with weights packed, its K/V, and recorded programs. `close` ends the threads."""

    def __init__(self, path: Path, *, threads: int, sequences: int, width: int, isa: str | None = None) -> None:
        """`sequences` table rows of `width` positions. Raises BadCheckpoint, KernelBuildError."""
        file = read_gguf(path)
        self.config = config = gguf_config(file)
        if config.architecture != "LlamaForCausalLM" or config.attention_bias or config.qk_norm:
            raise BadCheckpoint(f"{path} is a {config.architecture}; this measurement runs plain Llama models")
        self._layers = [_load_layer(file, config, index) for index in range(config.num_hidden_layers)]
        self._embed = _pack(file, "token_embd.weight")
        self._head = self._embed if config.tie_word_embeddings else _pack(file, "output.weight")
        self._final_norm = _floats(file, "output_norm.weight")
        self.pool = native_lib.load(isa).pool(threads)
        self.width, self.sequences = width, sequences
        slots = sequences * width
        self._stores = [
            new_kv_store(slots + native_lib.ROWS, config.num_key_value_heads, config.head_dim) for _ in self._layers
        ]
        self._table = torch.arange(slots).view(sequences, width)
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, width)
        self._counts = torch.zeros(2, dtype=torch.int64)
        self._arena = Arena(ARENA_BYTES)
        self._recorder = Recorder(
            self.pool, self._arena, max_rows=width, live_rows=self._counts[:1], live_logit_rows=self._counts[1:],
            head_dim=config.head_dim,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        """Bytes a decode step reads of the weights: a tied embedding is read once, as the head."""
        layers = sum(each.qkv.nbytes + each.o.nbytes + each.gate_up.nbytes + each.down.nbytes for each in self._layers)
        return self._head.nbytes + layers

    @property
    def kv_bytes_per_token(self) -> int:
        return self.config.kv_bytes_per_token(2)

    def record(self, rows: int, logit_rows: int) -> RecordedStep:
        """A whole step of up to `rows` rows, `logit_rows` of which choose a token."""
        ops, config, eps = self._recorder, self.config, self.config.rms_norm_eps
        step, sampling = _new_step(rows, self.sequences), _new_sampling(logit_rows)
        index = torch.zeros(logit_rows, dtype=torch.int64)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        residual = ops.embed(self._embed, step)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for layer, store, next_norm in zip(self._layers, self._stores, next_norms, strict=True):
            x = ops.linear(x, layer.qkv)
            q = ops.record_rope(x, step, self._cos, self._sin, store, heads=config.num_attention_heads)
            x = ops.record_attention(q, step, self._table, store, scale=config.head_dim**-0.5)
            x, residual = ops.add_rms_norm(ops.linear(x, layer.o), residual, layer.post_attention_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            x, residual = ops.add_rms_norm(x, residual, next_norm, eps)
        logits = ops.logits(ops.gather_rows(x, index), self._head)
        tokens = ops.sample(logits, sampling, step.context_lens, index)
        ops.remember(step.last_tokens, step.table_rows, tokens, index)
        return RecordedStep(self, ops.finish(), step, sampling, index, logits, tokens)

    def run(
        self,
        recorded: RecordedStep,
        ids: Sequence[int],
        positions: Sequence[int],
        table_rows: Sequence[int],
        logit_rows: Sequence[int],
    ) -> None:
        recorded.fill(ids, positions, table_rows, logit_rows)
        self.pool.run(recorded.launch)

    def slots_of(self, table_rows: Tensor, positions: Tensor) -> Tensor:
        return self._table[table_rows, positions]

    def set_counts(self, rows: int, logit_rows: int) -> None:
        self._counts[0], self._counts[1] = rows, logit_rows

    def close(self) -> None:
        self.pool.close()


class RecordedStep:
    """A program and the buffers it is bound to. `logits` `[logit rows, vocab]` fp32, `tokens` `[logit rows]` int64."""

    def __init__(
        self,
        model: NativeModel,
        program: Program,
        step: StepWindow,
        sampling: SamplingWindow,
        index: Tensor,
        logits: Tensor,
        tokens: Tensor,
    ) -> None:
        self._model = model
        self._index = index
        self.program = program
        self.launch = segments([program])
        self.step = step
        self.sampling = sampling
        self.logits = logits
        self.tokens = tokens

    def fill(
        self, ids: Sequence[int], positions: Sequence[int], table_rows: Sequence[int], logit_rows: Sequence[int]
    ) -> None:
        """Write a step's numbers; the rows past them are not run."""
        rows, step = len(ids), self.step
        step.input_ids[:rows] = torch.tensor(ids)
        step.positions[:rows] = torch.tensor(positions)
        step.table_rows[:rows] = torch.tensor(table_rows)
        step.context_lens[:rows] = step.positions[:rows] + 1
        step.write_slots[:rows] = self._model.slots_of(step.table_rows[:rows], step.positions[:rows])
        self._index[: len(logit_rows)] = torch.tensor(logit_rows, dtype=torch.int64)
        self._model.set_counts(rows, len(logit_rows))


def measure_decode(model: NativeModel, rows: int, context: int, repeats: int) -> StepFigure:
    """A step of `rows` sequences with `context` tokens each."""
    recorded = model.record(rows, rows)
    recorded.fill([5] * rows, [context - 1] * rows, range(rows), range(rows))
    seconds = list(_timed(model, recorded, repeats))
    read = model.weight_bytes + rows * context * model.kv_bytes_per_token
    return StepFigure("decode", rows, context, median(seconds), min(seconds), rows, read)


def measure_prefill(model: NativeModel, tokens: int, repeats: int, chunk: int = 512) -> StepFigure:
    """A prompt of `tokens` tokens in chunks, the first token chosen at its end."""
    chunk = min(chunk, tokens)
    recorded, seconds, read = model.record(chunk, 1), [], 0
    for _ in range(repeats):
        started, read = perf_counter(), 0
        for at in range(0, tokens, chunk):
            count = min(chunk, tokens - at)
            last = [count - 1] if at + count == tokens else []
            model.run(recorded, [5] * count, range(at, at + count), [0] * count, last)
            read += model.weight_bytes + (at + count) * model.kv_bytes_per_token
        seconds.append(perf_counter() - started)
    return StepFigure("prefill", chunk, tokens, median(seconds), min(seconds), tokens, read)


def measure_memory_bandwidth(threads: int, megabytes: int = 512) -> float:
    """Bytes a second of summing a large array once, over `threads` threads: the bound beside every figure."""
    torch.set_num_threads(threads)
    data = torch.zeros(megabytes << 18, dtype=torch.float32)
    best = float("inf")
    for _ in range(5):
        started = perf_counter()
        data.sum()
        best = min(best, perf_counter() - started)
    return data.nbytes / best


def _timed(model: NativeModel, recorded: RecordedStep, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        started = perf_counter()
        model.pool.run(recorded.launch)
        yield perf_counter() - started


def _new_step(rows: int, sequences: int) -> StepWindow:
    ids, positions, slots, lens, tables = torch.zeros((5, rows), dtype=torch.int64).unbind()
    return StepWindow(ids, positions, slots, lens, tables, torch.zeros(sequences + 1, dtype=torch.int64))


def _new_sampling(rows: int) -> SamplingWindow:
    ints = torch.zeros((3, rows), dtype=torch.int64)
    return SamplingWindow(torch.zeros(rows), ints[0], torch.ones(rows), torch.zeros(rows), ints[1], ints[2])


def _floats(file: GGUFFile, name: str) -> Tensor:
    tensor = file.tensors[name]
    return read_tensor(file.raw(name), tensor.type_name, tensor.shape).float()


def _pack(file: GGUFFile, name: str, order: npt.NDArray[np.int64] | None = None) -> PackedMatrix:
    tensor = file.tensors[name]
    rows, cols = tensor.shape
    if tensor.type_name in NATIVE_TYPES:
        return pack_gguf(np.asarray(file.raw(name)), tensor.type_name, rows, cols, order)
    values = read_tensor(file.raw(name), tensor.type_name, tensor.shape)
    return pack_dense(values if order is None else values[torch.from_numpy(order)])


def _load_layer(file: GGUFFile, config: ModelConfig, index: int) -> _Layer:
    prefix = f"blk.{index}."

    def halves_apart(heads: int) -> npt.NDArray[np.int64]:
        """The rows of each head, which GGUF interleaves for Llama, back in the order of two halves."""
        order = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
        return order.transpose(0, 2, 1).reshape(-1)

    def pack(name: str, order: npt.NDArray[np.int64] | None = None) -> PackedMatrix:
        return _pack(file, f"{prefix}{name}.weight", order)

    q = pack("attn_q", halves_apart(config.num_attention_heads))
    k = pack("attn_k", halves_apart(config.num_key_value_heads))
    return _Layer(
        input_norm=_floats(file, prefix + "attn_norm.weight"),
        post_attention_norm=_floats(file, prefix + "ffn_norm.weight"),
        qkv=stack([q, k, pack("attn_v")]),
        o=pack("attn_output"),
        gate_up=stack([pack("ffn_gate"), pack("ffn_up")]),
        down=pack("ffn_down"),
    )
