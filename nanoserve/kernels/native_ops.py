"""Recording a body as a native program: ops of `ops.Ops`, each of which appends a record and runs nothing.

Outputs are fp32 views of the arena (native_arena). What a linear takes in is int8 groups, so the op before it writes
those itself where it can, and its fp32 output is dropped from the record once nobody has read it; a gated layer's two
halves never leave the linear. Pad rows are cut off at replay, through the counts the records point at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoserve.kernels import native_lib as lib
from nanoserve.kernels.memory import lazy_zeros
from nanoserve.kernels.native_arena import Arena
from nanoserve.kernels.native_pack import PackedMatrix, StackedMatrix
from nanoserve.ops import StepWindow

FUSES_QUANTS = (lib.NormRecord, lib.AttentionRecord, lib.GatherRecord, lib.GateRecord)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Recorded ops. `keep` is everything the records point at."""

    records: ctypes.Array[lib.Record]
    keep: tuple[object, ...]

    def __len__(self) -> int:
        return len(self.records)

    def narrowed(self, rows: int) -> Program:
        """The same for at most `rows` rows: a row's place in what an op takes and leaves does not depend on how many
        there are, so nothing else differs."""
        records = type(self.records).from_buffer_copy(self.records)
        for record in records:
            record.head.rows = min(record.head.rows, rows)
        return Program(records, self.keep)


def segments(programs: Sequence[Program]) -> lib.Launch:
    """Programs to run one after the other in one launch."""
    array = (lib.Segment * len(programs))()
    for segment, program in zip(array, programs, strict=True):
        segment.records, segment.count = ctypes.addressof(program.records), len(program)
    return lib.Launch(array, tuple(programs))


@dataclass(slots=True, eq=False)
class _Value:
    """An op's output in the arena.

    record   what writes it, and `field` where its address stands there
    live     address of what bounds its rows at replay
    quants   room for it as int8 groups. Taken together with the output, because a place that comes free later may be
             one that the record still reads; `quantised` once the record writes them
    reads    how often it was read as fp32
    """

    record: Any
    live: int | None
    field: str = "out"
    quants: Tensor | None = None
    quantised: bool = False
    reads: int = 0


class Recorder:
    """Records a body (`native_head`: a head too) over one arena, for one pool. Not thread-safe; one program at a time.

    live_rows, live_logit_rows  int64 scalars read at replay: how many step rows, and logit rows, are real
    """

    def __init__(
        self,
        pool: lib.Pool,
        arena: Arena,
        *,
        max_rows: int,
        live_rows: Tensor | None = None,
        live_logit_rows: Tensor | None = None,
        head_dim: int = lib.MAX_HEAD_DIM,
    ) -> None:
        self._pool = pool
        self._arena = arena
        self._live = live_rows
        self._live_logits = live_logit_rows
        self._plan = torch.zeros(lib.PLAN_BYTES + max_rows * lib.ROW_GROUP_BYTES, dtype=torch.uint8)
        self._partials = torch.empty(lib.PLAN_PARTIALS * (head_dim + 2), dtype=torch.float32)
        self._records: list[Any] = []
        self._keep: list[object] = []
        self._values: dict[int, _Value] = {}
        self._planned = False
        self._scratch_bytes = 0

    @property
    def arena_bytes(self) -> int:
        """The most the arena ever held at once."""
        return self._arena.peak

    def finish(self) -> Program:
        """What was recorded since the last call."""
        array = (lib.Record * max(len(self._records), 1))()
        for target, record in zip(array, self._records, strict=False):
            ctypes.memmove(ctypes.addressof(target), ctypes.addressof(record), ctypes.sizeof(record))
        records = (lib.Record * len(self._records)).from_buffer(array)
        self._pool.reserve(self._scratch_bytes)
        program = Program(records, (array, *self._keep))
        self._records, self._keep, self._planned = [], [], False
        return program

    # --- the decoder's vocabulary ---------------------------------------------------------------------------------

    def embed(self, table: PackedMatrix | Tensor, step: StepWindow) -> Tensor:
        live = address_of(self._live)
        cols = table.cols if isinstance(table, PackedMatrix) else table.shape[1]
        record = lib.EmbedRecord(
            table=self._matrix(table),
            ids=self._at(step.input_ids),
            table_rows=self._at(step.table_rows),
            last_tokens=self._at(step.last_tokens),
            ld=cols,
        )
        return self._output(record, step.rows, cols, live)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = self._norm(x, residual, weight, eps)
        assert total is not None
        return out, total

    def linear(self, x: Tensor, weight: PackedMatrix | StackedMatrix, bias: Tensor | None = None) -> Tensor:
        """`[rows, out]`; x is taken as int8 groups, bf16 or fp32, whichever the weight's kind multiplies."""
        if isinstance(weight, StackedMatrix):
            return self._stacked(x, weight, bias)
        record, taken = self._product(x, weight, bias)
        out = self._output(record, x.shape[0], weight.rows, self._value(x).live)
        del taken  # held until the output had its place, which must not be the input's
        return out

    def _product(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> tuple[Any, Tensor | None]:
        """A record without an output, and the converted input it points at."""
        record = lib.LinearRecord(
            w=self._matrix(weight), bias=self._at(bias), x_ld=x.stride(0), out_ld=weight.rows, gate=-1
        )
        if weight.kind is lib.Kind.BF16:
            taken = self._halves(x)
            record.halves = taken.data_ptr()
            return record, taken
        if weight.kind.is_dense:
            record.x = self._read(x)
            return record, None
        taken = self._quants(x)
        record.quants = taken.data_ptr()
        return record, taken

    def _stacked(self, x: Tensor, weight: StackedMatrix, bias: Tensor | None) -> Tensor:
        rows, live, start = x.shape[0], self._value(x).live, 0
        out = self._arena.tensor(rows, weight.rows, torch.float32, self._forget)
        for part in weight.parts:
            record, taken = self._product(x, part, None if bias is None else bias[start : start + part.rows])
            record.out, record.out_ld = out[:, start:].data_ptr(), weight.rows
            self._append(record, rows, live)
            start += part.rows
            del taken
        self._values[out.data_ptr()] = _Value(None, live)
        return out

    def logits(self, x: Tensor, weight: PackedMatrix | StackedMatrix) -> Tensor:
        return self.linear(x, weight)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, lib.Gate.SILU)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, lib.Gate.GELU)

    def record_rope(
        self,
        qkv: Tensor,
        step: StepWindow,
        cos: Tensor,
        sin: Tensor,
        store: tuple[Tensor, Tensor],
        *,
        heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Rotate q in place and store k and v at `write_slots`. Returns q, a view `[rows, heads, head_dim]` of qkv."""
        keys, values = store
        kv_heads, head_dim = keys.shape[1], keys.shape[2] * 2
        record = lib.RopeRecord(
            qkv=self._read(qkv), q_norm=self._at(q_norm), k_norm=self._at(k_norm), cos=self._at(cos), sin=self._at(sin),
            positions=self._at(step.positions), write_slots=self._at(step.write_slots), keys=self._at(keys),
            values=self._at(values), qkv_ld=qkv.stride(0), heads=heads, kv_heads=kv_heads, head_dim=head_dim, eps=eps,
        )  # fmt: skip
        self._append(record, qkv.shape[0], self._value(qkv).live)
        return qkv[:, : heads * head_dim].view(qkv.shape[0], heads, head_dim)

    def record_attention(
        self,
        q: Tensor,
        step: StepWindow,
        slot_table: Tensor,
        store: tuple[Tensor, Tensor],
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """`[rows, heads * head_dim]`; slot_table is `[max_sequences, width]` int64 (see `ops.CacheRows`)."""
        rows, heads, head_dim = q.shape
        keys, values = store
        kv_heads = keys.shape[1]
        live = self._value(q).live
        self._plan_attention(step, kv_heads, heads // kv_heads, live)
        record = lib.AttentionRecord(
            q=self._read(q), table=self._at(slot_table), table_rows=self._at(step.table_rows),
            context_lens=self._at(step.context_lens), keys=self._at(keys), values=self._at(values),
            plan=self._at(self._plan), partials=self._at(self._partials), q_ld=q.stride(0),
            table_ld=slot_table.stride(0), heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window or 0,
            scale=scale,
        )  # fmt: skip
        queries = max(lib.MAX_QUERIES, heads // kv_heads)
        self._need(queries * (lib.SPLIT * 8 + head_dim * 12 + 6 * 4))
        return self._output(record, rows, heads * head_dim, live)

    def keep(self, x: Tensor, place: Tensor) -> None:
        """The op that made x leaves it in `place` instead; x is copied if it has been read where it was."""
        value = self._value(x)
        if value.record is None or value.reads or value.quantised:
            self.copy(x, place[: x.shape[0]])
            return
        setattr(value.record, value.field, self._at(place))
        value.reads += 1

    def copy(self, source: Tensor, target: Tensor) -> None:
        """All bytes of one contiguous tensor into another, whatever is real."""
        record = lib.CopyRecord(source=self._at(source), target=self._at(target), bytes=source.nbytes)
        assert source.is_contiguous(), "a copy of scattered bytes"
        assert target.is_contiguous(), "a copy to scattered bytes"
        assert source.nbytes == target.nbytes, "a copy of another size"
        self._append(record, 1, None)

    # --- records and values ---------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
        rows, cols = x.shape
        live = self._value(x).live
        record = lib.NormRecord(x=self._read(x), weight=self._at(weight), x_ld=x.stride(0), cols=cols, eps=eps)
        total: Tensor | None = None
        if residual is not None:
            record.residual = self._read(residual)
            total = self._made(rows, cols, torch.float32, x)
            record.total = total.data_ptr()
            self._values[total.data_ptr()] = _Value(record, live, field="total")
        self._need(lib.ROWS * (cols + 16) * 4)
        return self._output(record, rows, cols, live), total

    def _gated(self, gate_up: Tensor, gate: lib.Gate) -> Tensor:
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        value = self._value(gate_up)
        record = value.record
        last = bool(self._records) and record is self._records[-1]
        if last and isinstance(record, lib.LinearRecord) and not value.reads and n % lib.LANES == 0:
            record.gate, record.out_ld = gate, n
            # The first half of the rows' storage takes the result: nothing else is known to be free.
            return gate_up.view(-1)[: rows * n].view(rows, n)
        self._need((n + 16) * 4)
        new = lib.GateRecord(x=self._read(gate_up), x_ld=gate_up.stride(0), n=n, gate=gate)
        return self._output(new, rows, n, value.live)

    def _quants(self, x: Tensor) -> Tensor:
        """x as int8 groups: written by the op that made x, if that is the last one; else by a record of its own."""
        rows, cols = x.shape
        value = self._value(x)
        record, quants = value.record, value.quants
        if value.quantised and quants is not None:
            return quants
        if quants is not None and self._records and record is self._records[-1] and self._can_fuse(record, cols):
            value.quantised = True
            setattr(record, "out_quants" if isinstance(record, lib.LinearRecord) else "quants", quants.data_ptr())
            return quants
        quants = self._new_quants(rows, cols)
        self._append(
            lib.QuantRecord(x=self._read(x), quants=quants.data_ptr(), x_ld=x.stride(0), cols=cols), rows, value.live
        )
        return quants

    def _halves(self, x: Tensor) -> Tensor:
        """x rounded to bf16, `[rows, cols]` with an odd last column paired with zero."""
        rows, cols = x.shape
        halves = self._arena.tensor(rows, cols + cols % 2, torch.bfloat16)
        record = lib.QuantRecord(x=self._read(x), halves=halves.data_ptr(), x_ld=x.stride(0), cols=cols)
        self._append(record, rows, self._value(x).live)
        return halves

    def _new_quants(self, rows: int, cols: int) -> Tensor:
        return self._arena.tensor(-(-rows // lib.ROWS) * (cols // lib.GROUP), lib.QGROUP_BYTES, torch.uint8)

    @staticmethod
    def _can_fuse(record: Any, cols: int) -> bool:
        if isinstance(record, lib.LinearRecord):
            return int(record.w.rows) == 2 * cols and cols % lib.GROUP == 0
        if isinstance(record, lib.AttentionRecord):
            return int(record.head_dim) % lib.GROUP == 0
        return isinstance(record, FUSES_QUANTS) and cols % lib.GROUP == 0

    def _plan_attention(self, step: StepWindow, kv_heads: int, queries: int, live: int | None) -> None:
        if self._planned:
            return
        self._planned = True
        record = lib.PlanRecord(
            table_rows=self._at(step.table_rows), context_lens=self._at(step.context_lens), plan=self._at(self._plan),
            rows_per_group=max(1, lib.MAX_QUERIES // queries), kv_heads=kv_heads, group_queries=queries,
        )  # fmt: skip
        self._append(record, step.rows, live)

    def _output(self, record: Any, rows: int, cols: int, live: int | None) -> Tensor:
        out = self._arena.tensor(rows, cols, torch.float32, self._forget)
        record.out = out.data_ptr()
        self._append(record, rows, live)
        width = cols // 2 if isinstance(record, lib.LinearRecord) else cols
        quants = self._new_quants(rows, width) if width and self._can_fuse(record, width) else None
        self._values[out.data_ptr()] = _Value(record, live, quants=quants)
        return out

    def _made(self, rows: int, cols: int, dtype: torch.dtype, source: Tensor) -> Tensor:
        """Room for an output that no linear will read, with as many live rows as `source`."""
        out = self._arena.tensor(rows, cols, dtype, self._forget)
        self._values[out.data_ptr()] = _Value(None, self._value(source).live)
        return out

    def _append(self, record: Any, rows: int, live: int | None) -> None:
        record.head = lib.Head(lib.OP_OF[type(record)], rows, live)
        self._records.append(record)

    def _forget(self, address: int) -> None:
        """A value's last view is gone: what nobody read as fp32 need not be written as fp32."""
        value = self._values.pop(address, None)
        if value is not None and value.quantised and not value.reads:
            value.record.out = None

    def _value(self, x: Tensor) -> _Value:
        """What is known of an op's output; of a tensor that another program left, nothing."""
        value = self._values.get(x.untyped_storage().data_ptr())
        if value is None:
            self._keep.append(x)
            return _Value(None, None)
        return value

    def _read(self, x: Tensor) -> int:
        self._value(x).reads += 1
        return x.data_ptr()

    def _at(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, matrix: PackedMatrix | Tensor) -> lib.Matrix:
        if isinstance(matrix, PackedMatrix):
            return lib.Matrix(matrix.kind, matrix.rows, matrix.cols, 0, self._at(matrix.data))
        kind = {torch.float32: lib.Kind.F32, torch.float16: lib.Kind.F16, torch.bfloat16: lib.Kind.BF16}[matrix.dtype]
        return lib.Matrix(kind, matrix.shape[0], matrix.shape[1], 0, self._at(matrix))

    def _need(self, scratch_bytes: int) -> None:
        self._scratch_bytes = max(self._scratch_bytes, scratch_bytes)


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def new_kv_store(slots: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """(keys `[blocks, kv_heads, head_dim/2, 16, 2]`, values `[blocks, kv_heads, 8, head_dim, 2]`), bf16, zero."""
    blocks = -(-slots // lib.ROWS)
    keys = lazy_zeros((blocks, kv_heads, head_dim // 2, lib.ROWS, 2), torch.bfloat16)
    values = lazy_zeros((blocks, kv_heads, lib.ROWS // 2, head_dim, 2), torch.bfloat16)
    return keys, values
