"""`nanoserve bench quality`: scores add up, formats are what they say, and the real model keeps its perplexity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.bench.quality import Expected, Score, text_ids
from nanoserve.cli import main
from nanoserve.errors import ConfigError
from nanoserve.models.load import load_model
from nanoserve.source import resolve
from tests.data.kjv import kjv_text
from tests.models.dense import dense_logits
from tests.tiny_folder import write_served_model

TEXT = "In the beginning God created the heaven and the earth. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("quality"))


def quality(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> list[dict[str, Any]]:
    assert main(["bench", "quality", *map(str, argv)]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["quality"]
    return found


def test_score_is_the_definition_of_each_of_its_figures() -> None:
    generator = torch.Generator().manual_seed(0)
    expected, ours = (torch.randn(40, 50, generator=generator).log_softmax(-1) for _ in range(2))
    targets = torch.randint(0, 50, (40,), generator=generator)
    score = Score("x", {"layers": "a", "head": "b"})
    for part in (slice(0, 13), slice(13, 40)):
        score.add(ours[part] + 3.0, Expected.of(expected[part] - 1.0, targets[part]))  # logits: any constant goes
    record = score.record()
    nll = -ours[range(40), targets].double()
    extra = nll + expected[range(40), targets].double()
    divergence = torch.nn.functional.kl_div(ours, expected, log_target=True, reduction="none").sum(-1)
    assert record["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert record["perplexity_change"] == pytest.approx(math.exp(extra.mean()) - 1, rel=1e-4)
    assert record["change_error"] == pytest.approx(float(extra.std(correction=0)) / math.sqrt(40), rel=1e-4)
    assert record["divergence"] == pytest.approx(float(divergence.mean()), rel=1e-4)
    assert record["divergence_p99"] == pytest.approx(float(divergence.max()), rel=1e-4)
    assert record["greedy_agreement"] == float((ours.argmax(-1) == expected.argmax(-1)).double().mean())


def test_baseline_is_the_models_perplexity_and_formats_lie_near_it_in_order(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    flags = ("--tokens", "150", "--context", "70", "--formats", "stored", "w8", "w4", "stored/w4")
    records = quality(capsys, "--model", folder, "--text", text, *flags)
    assert [record["format"] for record in records] == ["fp32", "stored", "w8", "w4", "stored/w4"]
    assert [(record["layers"], record["head"]) for record in records[1:]] == [
        ("F32", "F32"), ("w8", "w8"), ("w4", "w8"), ("F32", "w4"),
    ]  # fmt: skip
    source = resolve(str(folder))
    decoder, ids = load_model(source, bar=False).decoder, text_ids(text, source, 150)
    windows = [ids[0:70], ids[70:140], ids[140:150]]
    nll = torch.cat(
        [-dense_logits(decoder, window).log_softmax(-1)[range(len(window) - 1), window[1:]] for window in windows]
    )
    assert records[0]["tokens"] == len(nll) == 147
    assert records[0]["perplexity"] == pytest.approx(math.exp(nll.double().mean()), rel=1e-4)
    assert records[0]["greedy_agreement"] == 1.0
    assert records[0]["divergence"] < 1e-5
    stored, w8, w4 = (record["divergence"] for record in records[1:4])
    assert 0 < stored <= w8 * 1.1 < w4 < 0.5


def test_a_text_that_cannot_be_read_or_a_format_that_is_none_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("absent", "cannot be read"), ("binary", "UTF-8"), ("empty", "has 0 tokens")):
        with pytest.raises(ConfigError, match=reason):
            text_ids(tmp_path / name, resolve(str(folder)), 10)
    with pytest.raises(SystemExit):
        main(["bench", "quality", "--text", str(tmp_path / "empty"), "--formats", "w5"])
    assert "'w5' is no format; write stored, w8 or w4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_the_real_model_keeps_its_perplexity_within_a_hundredth_on_fifty_thousand_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "kjv.txt"
    text.write_text(kjv_text(), encoding="utf-8")
    baseline, stored, head = quality(capsys, "--text", text, "--formats", "stored", "stored/w4")
    assert stored["tokens"] > 49_000
    assert abs(stored["perplexity"] / baseline["perplexity"] - 1) < 0.01
    assert stored["greedy_agreement"] > 0.9
    assert abs(head["perplexity"] / baseline["perplexity"] - 1) < 0.10
