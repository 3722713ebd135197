"""`nanoserve bench serve --url URL`: closed-loop load over SSE on any server with OpenAI's /v1/completions."""

from __future__ import annotations

import argparse
import asyncio

from nanoserve.bench.flags import check_flags
from nanoserve.bench.load import Server, Work, measure
from nanoserve.bench.tables import Column, Table, milliseconds, percent, publish, whole


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
    publish("serve", args.url, [table], {"url": args.url}, csv_folder=args.csv, picture=None)
    return 0
