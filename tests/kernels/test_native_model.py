"""The real model in native kernels against the reference engine's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.bench.native_step import NativeModel, measure_decode, measure_prefill
from nanoserve.cache import BatchedPagedKVCache, Chunk
from nanoserve.kernels.reference import ReferenceOps
from nanoserve.models.load import load_model
from nanoserve.ops import StepWindow
from nanoserve.source import resolve
from nanoserve.tokens import load_tokenizer

pytestmark = pytest.mark.model
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:900]


def prompt_ids(path: Path) -> list[int]:
    return list(load_tokenizer(resolve(str(path))).encode(TEXT))[:160]


@torch.inference_mode()
def reference_logits(path: Path, ids: list[int]) -> Tensor:
    loaded, ops, count = load_model(resolve(str(path)), dtype="float32", bar=False), ReferenceOps(), len(ids)
    config = loaded.config
    cache = BatchedPagedKVCache(
        ops, num_layers=config.num_hidden_layers, num_blocks=count // 16 + 1, block_size=16,
        num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    at = torch.arange(count)
    step = StepWindow(torch.tensor(ids), at, at, at + 1, torch.zeros_like(at), torch.zeros(2, dtype=torch.int64))
    return loaded.decoder.head(ops, loaded.decoder.body(ops, step, cache.view_chunks([Chunk(0, count, at)], step)))


def native_logits(model: NativeModel, ids: list[int], table_row: int, chunk: int) -> Tensor:
    recorded, parts = model.record(chunk, chunk), []
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        model.run(recorded, part, range(at, at + len(part)), [table_row] * len(part), range(len(part)))
        parts.append(recorded.logits[: len(part)].clone())
    return torch.cat(parts)


def test_the_real_models_logits_are_close_to_the_references_and_bitwise_their_own(smollm2_path: Path) -> None:
    ids = prompt_ids(smollm2_path)
    wanted = reference_logits(smollm2_path, ids)
    outs = []
    for threads in (1, 2):
        model = NativeModel(smollm2_path, threads=threads, sequences=4, width=256)
        outs += [native_logits(model, ids, row, chunk) for row, chunk in enumerate((1, 16, 64, len(ids)))]
        model.close()
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    divergence = F.kl_div(outs[0].log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert float(divergence.mean()) < 0.01
    assert float((outs[0].argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.9
    targets = torch.tensor(ids[1:])
    losses = [F.cross_entropy(logits[:-1], targets) for logits in (outs[0], wanted)]
    assert abs(float(losses[0] - losses[1])) < 0.03


def test_the_measurements_count_what_a_step_moves(smollm2_path: Path) -> None:
    model = NativeModel(smollm2_path, threads=2, sequences=2, width=64)
    decode, prefill = measure_decode(model, 2, 33, repeats=3), measure_prefill(model, 40, repeats=2, chunk=16)
    model.close()
    kv = 33 * 2 * 30 * 3 * 64 * 2 * 2
    assert decode.bytes_read == model.weight_bytes + kv
    assert (decode.tokens, prefill.tokens, prefill.rows) == (2, 40, 16)
    assert 0 < decode.least_seconds <= decode.median_seconds
    assert prefill.tokens_per_second > 0
