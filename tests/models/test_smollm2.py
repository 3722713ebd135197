"""The real SmolLM2-135M: our loader and decoder give transformers' greedy tokens in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.gguf_file import read_gguf
from nanoserve.kernels.native_weights import NativeWeights
from nanoserve.models.config import load_config
from nanoserve.models.decoder import Decoder
from nanoserve.models.load import load_model
from nanoserve.source import check_source, resolve
from nanoserve.tokens import load_tokenizer
from tests.models.dense import dense_logits
from tests.models.oracle import transformers_from_gguf, transformers_greedy

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text(encoding="utf-8")
)["prompts"]
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_model(resolve("smollm2-135m"), max_positions=512, bar=False).decoder


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers_from_gguf(resolve("smollm2-135m").path)


def follows(decoder: Decoder, prompt_ids: list[int], token_ids: list[int]) -> list[int]:
    """The greedy choice after the prompt and after every token but the last; equal to `token_ids` exactly when greedy
    decoding, which would feed its own choices, yields them."""
    logits = dense_logits(decoder, prompt_ids + token_ids[:-1])
    return logits[len(prompt_ids) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["text"][-24:])
def test_greedy_tokens_are_the_golden_ones_when_decoded_in_float32(case: dict[str, Any], decoder: Decoder) -> None:
    assert len(case["token_ids"]) == 24
    assert follows(decoder, case["prompt_ids"], case["token_ids"]) == case["token_ids"]


def test_header_is_parsed_once_when_all_that_need_it_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr("nanoserve.source.read_gguf", lambda path: read.append(path) or read_gguf(path))
    source = resolve("smollm2-135m")
    check_source(source)
    load_config(source)
    load_model(source, maker=NativeWeights(), max_positions=8, bar=False)
    load_tokenizer(source)
    assert read == [source.path]


@pytest.mark.slow
def test_logits_and_tokens_equal_transformers_when_it_loads_the_same_file(decoder: Decoder, theirs: Any) -> None:
    prompt_ids = GOLDEN[0]["prompt_ids"]
    token_ids = transformers_greedy(theirs, prompt_ids, 8)
    assert token_ids == GOLDEN[0]["token_ids"][:8]
    assert follows(decoder, prompt_ids, token_ids) == token_ids
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt_ids])).logits[0]
    torch.testing.assert_close(dense_logits(decoder, prompt_ids), expected, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["text"][-24:])
def test_golden_tokens_are_transformers_when_generated_again(case: dict[str, Any], theirs: Any) -> None:
    assert transformers_greedy(theirs, case["prompt_ids"], 24) == case["token_ids"]
