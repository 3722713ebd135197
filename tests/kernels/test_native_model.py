"""The real model in native kernels against the reference kernels' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.boot import BootProgress
from nanoserve.build import Prepared, prepare
from nanoserve.config import EngineConfig
from nanoserve.metrics import Metrics
from nanoserve.request import Request, SamplingParams, TokenPrompt
from nanoserve.source import resolve
from nanoserve.tokens import load_tokenizer

pytestmark = pytest.mark.model
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:900]


def ignore(progress: BootProgress) -> None:
    """A test waits for the end."""


def engine(path: Path, **fields: object) -> Prepared:
    defaults: dict[str, object] = {"model": str(path), "device": "cpu", "max_model_len": 256, "warmup_seconds": 0.0}
    return prepare(EngineConfig(**{**defaults, **fields}), Metrics("test"), ignore, bar=False)  # type: ignore[arg-type]


def distributions(prepared: Prepared, ids: list[int]) -> Tensor:
    """`[len(ids) - 1, 1 + TOP]`: of each next token of `ids` its log-probability, then those of the likeliest, sorted.

    Each prefix is a request of its own, all served together, so rows of every chunk size and batch size are among them.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    wanted: dict[str, int] = {}
    for end in range(1, len(ids)):
        (sequence,) = prepared.intake.sequences(Request(f"r{end}", TokenPrompt(tuple(ids[:end])), params))
        wanted[sequence.request_id] = end
        prepared.engine.add(sequence)
    rows: dict[int, Tensor] = {}
    while prepared.engine.scheduler.has_work:
        for new in prepared.engine.step():
            rows[wanted[new.sequence.request_id]] = torch.tensor([float(new.token), *(value for _, value in new.top)])
    return torch.stack([rows[end] for end in sorted(rows)])


@pytest.fixture(scope="module")
def ids(smollm2_path: Path) -> list[int]:
    return list(load_tokenizer(resolve(str(smollm2_path))).encode(TEXT))[:64]


def test_the_real_model_chooses_as_the_reference_does_and_bitwise_alike_in_any_company(
    smollm2_path: Path, ids: list[int]
) -> None:
    wanted = distributions(engine(smollm2_path, kernels="reference", attention_read="paged", max_sequences=8), ids)
    alone = distributions(engine(smollm2_path, max_sequences=1, threads=1), ids)
    together = distributions(engine(smollm2_path, max_sequences=32, threads=2), ids)
    chunked = distributions(engine(smollm2_path, max_sequences=5, max_step_rows=16, threads=2), ids)
    assert torch.equal(alone, together)
    assert torch.equal(alone, chunked)
    assert float((alone[:, 0] == wanted[:, 0]).float().mean()) > 0.9, "the likeliest token agrees"
    assert float(F.l1_loss(alone[:, 1:], wanted[:, 1:])) < 0.15, "and so do the likeliest ones' log-probabilities"
