"""`nanoserve bench serve --url URL`: closed-loop load over SSE on any server with OpenAI's /v1/completions."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from nanoserve.bench.flags import check_flags
from nanoserve.bench.load import Load, Server, Work, measure
from nanoserve.bench.tables import Column, Table, milliseconds, percent, publish, whole
from nanoserve.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    server = Server.at(args.url, model=args.model, api_key=args.api_key)
    work = Work.of(args)
    loads = [asyncio.run(measure(server, work, streams)) for streams in args.streams]
    columns = (
        Column("streams", "streams"),
        Column("tokens_per_second", "tokens/s", whole),
        Column("ttft_seconds", "first token p50", milliseconds),
        Column("ttft_max_seconds", "max", milliseconds),
        Column("gap_p50_seconds", "gap p50", milliseconds),
        Column("gap_p99_seconds", "p99", milliseconds),
        Column("gap_max_seconds", "max", milliseconds),
        Column("full_gap_p50_seconds", "all decode: p50", milliseconds),
        Column("full_gap_p99_seconds", "p99", milliseconds),
        Column("full_gap_max_seconds", "max", milliseconds),
        Column("full_gaps", "gaps", whole),
        Column("client_share", "client's core", percent),
    )
    notes = ("all decode: gaps that lie between the last stream's first token and the first stream's end",)
    table = Table("load", "Load", work.describe(), columns, [load.record() for load in loads], notes)
    if args.save_trace is not None:
        save_trace(args.save_trace, loads, args.prompt_tokens)
    publish("serve", args.url, [table], {"url": args.url}, csv_folder=args.csv, picture=None)
    return 0


def save_trace(path: Path, loads: Sequence[Load], prompt_tokens: int) -> None:
    """What was sent when, for `nanoserve simulate --trace`; loads follow one another without a pause.

    Raises ConfigError if the file cannot be written."""
    lines, offset = [], 0.0
    for load in loads:
        first = min(answer.sent for answer in load.answers)
        for answer in sorted(load.answers, key=lambda answer: answer.sent):
            arrival = offset + answer.sent - first
            ask = {"arrival_seconds": arrival, "prompt_tokens": prompt_tokens, "output_tokens": answer.tokens}
            lines.append(json.dumps(ask))
        offset += load.seconds
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-trace: {path} cannot be written: {error.strerror}; name another file") from error
