"""`nanoserve bench quality`: how well the served model predicts a text, beside the same file's values in fp32.

The text is cut into windows that are predicted one by one; every token but a window's first is scored. The baseline is
the reference kernels in fp32 on the stored weights, dequantised; each format runs on the kernels that would serve it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from nanoserve import __version__
from nanoserve.bench.flags import WeightFormat, check_flags, parse_format
from nanoserve.bench.tables import Column, Record, Table, publish, thousands
from nanoserve.blocks import blocks_for
from nanoserve.buckets import StepRows
from nanoserve.build import Prepared, prepare
from nanoserve.config import EngineConfig
from nanoserve.errors import ConfigError
from nanoserve.metrics import Metrics
from nanoserve.models.config import load_config
from nanoserve.paged_runner import PagedRunner
from nanoserve.source import ModelSource, resolve
from nanoserve.tokens import load_tokenizer

ROWS = 128
"""Rows of a step, each of which has its logits taken."""
BLOCK = EngineConfig().block_size


@dataclass(frozen=True, slots=True)
class Expected:
    """What the baseline predicts at n positions, and what came.

    targets        [n] int64
    probabilities  [n, vocab] fp32, and Σ p · ln p of each row in `negentropy` [n]
    nll            [n] fp64: −ln p(target)
    likeliest      [n] int64
    """

    targets: Tensor
    probabilities: Tensor
    negentropy: Tensor
    nll: Tensor
    likeliest: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> Expected:
        """`logits` `[n, vocab]` fp32."""
        logs = logits.log_softmax(-1)
        probabilities = logs.exp()
        negentropy = torch.linalg.vecdot(probabilities, logs)
        return cls(targets, probabilities, negentropy, _nll(logits, targets), logits.argmax(-1))


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """`[n]` fp64."""
    return logits.logsumexp(-1).double() - logits.gather(1, targets[:, None])[:, 0].double()


@dataclass(slots=True)
class Score:
    """Sums over the scored tokens of one engine; those that compare are against the baseline's distribution.

    nll         −ln p(token), and its square summed for the baseline's difference
    divergence  KL(baseline ‖ this), in nats
    agreeing    tokens whose likeliest prediction is the baseline's
    """

    name: str
    weights: Record
    tokens: int = 0
    nll: float = 0.0
    extra: float = 0.0
    extra_squares: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0
    worst: list[float] = field(default_factory=list)

    def add(self, logits: Tensor, expected: Expected) -> None:
        """`logits` `[n, vocab]` fp32."""
        nll = _nll(logits, expected.targets)
        extra = nll - expected.nll
        # Σ p · (ln p − ln q), with ln q = logits − logsumexp(logits); rounding may take a zero below it.
        cross = torch.linalg.vecdot(expected.probabilities, logits) - logits.logsumexp(-1)
        divergence = (expected.negentropy - cross).clamp(min=0)
        self.tokens += len(nll)
        self.nll += float(nll.sum())
        self.extra += float(extra.sum())
        self.extra_squares += float(extra.square().sum())
        self.divergence += float(divergence.sum())
        self.worst += divergence.tolist()
        self.agreeing += int((logits.argmax(-1) == expected.likeliest).sum())

    def record(self) -> Record:
        mean = self.extra / self.tokens
        variance = max(0.0, self.extra_squares / self.tokens - mean * mean)
        return {
            "format": self.name,
            "layers": self.weights["layers"],
            "head": self.weights["head"],
            "tokens": self.tokens,
            "perplexity": math.exp(self.nll / self.tokens),
            "perplexity_change": math.exp(mean) - 1,
            "change_error": math.sqrt(variance / self.tokens),
            "divergence": self.divergence / self.tokens,
            "divergence_p99": sorted(self.worst)[math.ceil(0.99 * len(self.worst)) - 1],
            "greedy_agreement": self.agreeing / self.tokens,
        }


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    source = resolve(args.model)
    ids = text_ids(args.text, source, args.tokens)
    context = min(args.context, load_config(source).max_position_embeddings)
    baseline = _engine(args, source, context, parse_format("stored"), kernels="reference")
    subjects = [_engine(args, source, context, each, kernels=args.kernels) for each in args.formats]
    scores = measure(ids, context, baseline, subjects, [each.name for each in args.formats])
    kernels = subjects[0].choices.kernels
    about = f"{args.text.name}, windows of {context:,} tokens"
    summary = {"model": args.model, "kernels": kernels, "context": context, "torch": torch.__version__}
    heading = f"{args.model} on {kernels} kernels, beside the reference kernels in fp32"
    publish("quality", heading, [_table(scores, about)], summary, csv_folder=args.csv, picture=None)
    return 0


def text_ids(path: Path, source: ModelSource, count: int) -> list[int]:
    """The first `count` tokens of a file. Raises ConfigError if it cannot be read or has fewer than two."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {path} cannot be read ({error}); name a file of plain text in UTF-8") from error
    # A token prints one byte or more, so this many characters hold enough of them.
    ids = load_tokenizer(source).encode(text[: count * 16])[:count]
    if len(ids) < 2:
        raise ConfigError(f"--text: {path} has {len(ids)} tokens; at least 2 are needed")
    return ids


def measure(
    ids: Sequence[int], context: int, baseline: Prepared, subjects: Sequence[Prepared], names: Sequence[str]
) -> list[Score]:
    """Scores of the baseline, then of each subject, over windows of `context` tokens of `ids`."""
    engines = [baseline, *subjects]
    scores = [Score(name, engine.weights) for name, engine in zip(["fp32", *names], engines, strict=True)]
    windows = [ids[at : at + context] for at in range(0, len(ids), context)]
    with tqdm(total=len(ids), desc="scoring", unit="token", mininterval=0.5) as bar:
        for window in windows:
            for start, stop in _parts(len(window)):
                targets = torch.tensor(window[start + 1 : stop + 1])
                if not len(targets):
                    continue
                logits = [_logits(engine, window, start, stop)[: len(targets)] for engine in engines]
                expected = Expected.of(logits[0], targets)
                for score, each in zip(scores, logits, strict=True):
                    score.add(each, expected)
            bar.update(len(window))
    return scores


def _parts(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, ROWS):
        yield start, min(start + ROWS, length)


def _logits(engine: Prepared, window: Sequence[int], start: int, stop: int) -> Tensor:
    """`[stop - start, vocab]`: what follows each of these positions, whose predecessors are in the cache."""
    runner = engine.engine.runner
    assert isinstance(runner, PagedRunner), "the measurement asks for the paged read"
    slots = range(start, stop)
    runner.slots.write(0, start, slots)
    rows = StepRows()
    rows.add(window[start:stop], start, slots, 0)
    rows.logit_rows += range(stop - start)
    return runner.logits(rows)


def _engine(
    args: argparse.Namespace, source: ModelSource, context: int, form: WeightFormat, *, kernels: str
) -> Prepared:
    """An engine whose every row has logits and whose pool holds one window."""
    blocks = blocks_for(context, BLOCK) + 1
    config = EngineConfig(
        model=args.model,
        kernels=kernels,  # type: ignore[arg-type]
        device="cpu",
        attention_read="paged",
        quantize=form.quantize,
        quantize_head=form.quantize_head,
        threads=args.threads,
        max_model_len=context,
        max_sequences=ROWS,
        max_step_rows=ROWS,
        kv_memory_bytes=blocks * BLOCK * load_config(source).kv_bytes_per_token(4),
        warmup_seconds=0.0,
    )
    return prepare(config, Metrics(__version__), lambda progress: None, bar=False, source=source)


def _table(scores: Sequence[Score], about: str) -> Table:
    columns = (
        Column("format", "format"),
        Column("layers", "layers"),
        Column("head", "head"),
        Column("tokens", "tokens", thousands),
        Column("perplexity", "perplexity", lambda value: f"{value:.3f}"),
        Column("perplexity_change", "change", lambda value: f"{value:+.2%}"),
        Column("change_error", "± (1 σ)", lambda value: f"{value:.2%}"),
        Column("divergence", "KL mean", lambda value: f"{value:.4f}"),
        Column("divergence_p99", "KL p99", lambda value: f"{value:.3f}"),
        Column("greedy_agreement", "greedy alike", lambda value: f"{value:.1%}"),
    )
    return Table("quality", "Quality", about, columns, [score.record() for score in scores])
