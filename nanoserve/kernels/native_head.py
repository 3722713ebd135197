"""Recording a head as a native program: which rows choose, what adjusts their logits, the choice, what is kept of it.

Rows are cut off at replay by how many logit rows are real, so pad rows choose nothing and join no history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoserve.kernels import native_lib as lib
from nanoserve.kernels.native_ops import Recorder, address_of
from nanoserve.ops import HistoryWindow, Logprobs, SamplingWindow, StepWindow


class HeadRecorder(Recorder):
    """A Recorder that knows the ops of a head too."""

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        record = lib.GatherRecord(x=self._read(x), index=self._at(rows), x_ld=x.stride(0), cols=x.shape[1])
        return self._output(record, rows.shape[0], x.shape[1], address_of(self._live_logits))

    def adjust_logits(
        self, logits: Tensor, history: HistoryWindow, step: StepWindow, index: Tensor | None = None
    ) -> Tensor:
        rows, vocab = logits.shape
        record = lib.AdjustRecord(
            logits=self._read(logits), table_rows=self._at(step.table_rows), positions=self._at(step.context_lens),
            index=self._at(index), tokens=self._at(history.tokens), counts=self._at(history.counts),
            penalties=self._at(history.penalties), bias_ids=self._at(history.bias_ids),
            bias_values=self._at(history.bias_values), tokens_ld=history.tokens.shape[1],
            bias_ld=history.bias_ids.shape[1], vocab=vocab,
        )  # fmt: skip
        self._need(vocab * 4)
        return self._output(record, rows, vocab, self._value(logits).live)

    def sample(
        self, logits: Tensor, sampling: SamplingWindow, positions: Tensor, index: Tensor | None = None
    ) -> Tensor:
        """`[rows]` int64; `positions[index[row]]` is the token's position, `positions[row]` without an index."""
        rows, vocab = logits.shape
        tokens = self._made(rows, 1, torch.int64, logits)
        record = lib.SampleRecord(
            logits=self._read(logits), temperature=self._at(sampling.temperature), top_p=self._at(sampling.top_p),
            min_p=self._at(sampling.min_p), top_k=self._at(sampling.top_k), seed=self._at(sampling.seed),
            choice=self._at(sampling.choice), positions=self._at(positions), index=self._at(index),
            tokens=tokens.data_ptr(), vocab=vocab,
        )  # fmt: skip
        self._append(record, rows, self._value(logits).live)
        self._need((vocab + 16) * 2 * 4)
        return tokens[:, 0]

    def remember(self, last_tokens: Tensor, table_rows: Tensor, tokens: Tensor, index: Tensor | None = None) -> None:
        record = lib.RememberRecord(
            tokens=tokens.data_ptr(),
            table_rows=self._at(table_rows),
            index=self._at(index),
            last_tokens=self._at(last_tokens),
        )
        self._append(record, tokens.shape[0], self._value(tokens).live)

    def append_tokens(
        self, history: HistoryWindow, tokens: Tensor, step: StepWindow, index: Tensor | None = None
    ) -> None:
        record = lib.AppendRecord(
            chosen=tokens.data_ptr(), table_rows=self._at(step.table_rows), positions=self._at(step.context_lens),
            index=self._at(index), tokens=self._at(history.tokens), tokens_ld=history.tokens.shape[1],
        )  # fmt: skip
        self._append(record, tokens.shape[0], self._value(tokens).live)

    def logprobs(
        self, logits: Tensor, tokens: Tensor, history: HistoryWindow, step: StepWindow, index: Tensor | None = None
    ) -> Logprobs:
        rows, vocab = logits.shape
        width = min(lib.MAX_TOP, vocab)
        chosen = self._made(rows, 1, torch.float32, logits)
        top_ids, top = (self._made(rows, width, dtype, logits) for dtype in (torch.int32, torch.float32))
        record = lib.LogprobsRecord(
            logits=self._read(logits), tokens=tokens.data_ptr(), table_rows=self._at(step.table_rows),
            index=self._at(index), counts=self._at(history.counts), chosen=chosen.data_ptr(),
            top_ids=top_ids.data_ptr(), top=top.data_ptr(), vocab=vocab, top_ld=width,
        )  # fmt: skip
        self._append(record, rows, self._value(logits).live)
        self._need((vocab + 16) * 4)
        return Logprobs(chosen[:, 0], top_ids, top)
