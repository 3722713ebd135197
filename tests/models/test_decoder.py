"""The decoder's logits are transformers' logits, in fp32, for every family and everything a family adds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanoserve.models.decoder import Decoder
from nanoserve.models.load import load_model
from tests.models.dense import dense_logits
from tests.models.tiny import VARIANTS, source_of, token_ids, write_model

LENGTH = 230
IDS = token_ids(LENGTH)


def transformers_logits(folder: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits: Tensor = model.eval()(torch.tensor([ids])).logits[0]
    return logits


def load(folder: Path) -> Decoder:
    return load_model(source_of(folder), bar=False).decoder


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tensor]:
    folder = write_model(tmp_path_factory.mktemp("model") / request.param, request.param)
    return load(folder), transformers_logits(folder, IDS)


def test_logits_equal_transformers_when_prefilled_at_once(case: tuple[Decoder, Tensor]) -> None:
    decoder, expected = case
    logits = dense_logits(decoder, IDS)
    assert logits.dtype == torch.float32
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_logits_equal_transformers_when_chunked_and_decoded(case: tuple[Decoder, Tensor]) -> None:
    decoder, expected = case
    torch.testing.assert_close(dense_logits(decoder, IDS, chunks=(7, 64, 130)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["mistral-window", "qwen2-window", "qwen3-layer-types"])
def test_window_changes_logits_when_the_prompt_is_longer(variant: str, tmp_path: Path) -> None:
    decoder = load(write_model(tmp_path / "model", variant))
    whole = Decoder(
        load(write_model(tmp_path / "whole", variant, sliding_window=LENGTH)).config,
        decoder.weights,
        decoder.cos,
        decoder.sin,
    )
    windowed, full = dense_logits(decoder, IDS[:40]), dense_logits(whole, IDS[:40])
    first = min(window for window in decoder.config.windows if window is not None)
    torch.testing.assert_close(windowed[:first], full[:first], atol=1e-5, rtol=0)
    assert (windowed[first:] - full[first:]).abs().amax() > 1e-2


def test_logits_equal_transformers_when_the_dtype_is_bfloat16(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "bf16", "llama", dtype=torch.bfloat16)
    decoder = load(folder)
    assert decoder.weights.embed.dtype == torch.bfloat16
    logits = dense_logits(decoder, IDS[:40])
    assert logits.dtype == torch.float32
    assert (logits - transformers_logits(folder, IDS[:40])).abs().mean() < 0.05


def test_negative_id_reads_the_last_token_when_embedded(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.models.dense import DenseCache, DenseOps, step_of

    decoder = load(write_model(tmp_path / "model"))
    plain, late = step_of([5, 9], 0), step_of([5, -1], 0)
    late = replace(late, last_tokens=torch.tensor([9, 0]))
    outputs = []
    for step in (plain, late):
        cache = DenseCache()
        cache.step = step
        outputs.append(decoder.body(DenseOps(), step, cache))
    for plain_part, late_part in zip(*outputs, strict=True):
        assert torch.equal(plain_part, late_part)


def test_only_the_row_that_chooses_goes_past_the_last_attention(tmp_path: Path) -> None:
    from tests.models.dense import DenseCache, DenseOps, step_of

    rows: list[int] = []

    class Counting(DenseOps):
        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            rows.append(x.shape[0])
            return super().linear(x, weight, bias)

    decoder, ops, cache = load(write_model(tmp_path / "model")), Counting(), DenseCache()
    cache.step = step_of(IDS[:40], 0)
    hidden = decoder.body(ops, cache.step, cache)
    logits = decoder.head(ops, hidden.rows(ops, torch.tensor([39])))
    torch.testing.assert_close(logits, dense_logits(decoder, IDS[:40])[39:])
    assert rows == [40] * (4 * len(decoder.weights.layers) - 3) + [1] * 3


def test_weight_bytes_count_a_tied_head_once_when_summed(tmp_path: Path) -> None:
    tied = load(write_model(tmp_path / "tied", "llama-tied")).weights
    untied = load(write_model(tmp_path / "untied", "llama")).weights
    assert tied.head is tied.embed
    assert untied.nbytes - tied.nbytes == untied.head.nbytes
