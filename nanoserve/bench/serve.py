"""`nanoserve bench serve --url URL`: closed-loop load over SSE on any server with OpenAI's /v1/completions.

Each stream sends its next request when its last one has ended, greedy and to a fixed length. The client is part of the
load, so it is kept small (one event loop, no HTTP library) and its own share of a core is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from urllib.parse import SplitResult, urlsplit

from nanoserve.bench.flags import check_flags
from nanoserve.bench.tables import Column, Record, Table, milliseconds, publish
from nanoserve.errors import ConfigError

PATH = "/v1/completions"
LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's times, by the client's clock: `chunks` are when text came. `tokens` is the server's count."""

    sent: float
    chunks: tuple[float, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """One number of streams. `together` is the span in which all of them were decoding; gaps are counted within it."""

    streams: int
    seconds: float
    client_seconds: float
    answers: tuple[Answer, ...]

    def record(self) -> Record:
        firsts = [answer.chunks[0] - answer.sent for answer in self.answers]
        gaps = sorted(gap for answer in self.answers for gap in self._gaps(answer))
        return {
            "streams": self.streams,
            "tokens_per_second": sum(answer.tokens for answer in self.answers) / self.seconds,
            "ttft_seconds": median(firsts),
            "ttft_max_seconds": max(firsts),
            "gap_p50_seconds": _percentile(gaps, 0.5),
            "gap_p99_seconds": _percentile(gaps, 0.99),
            "gap_max_seconds": gaps[-1] if gaps else None,
            "client_share": self.client_seconds / self.seconds,
        }

    def _gaps(self, answer: Answer) -> list[float]:
        """Between chunks of an answer once every stream of its round has its first one, and until one of them ends."""
        peers = [other for other in self.answers if other.sent < answer.chunks[-1] and other.chunks[-1] > answer.sent]
        start, stop = max(peer.chunks[0] for peer in peers), min(peer.chunks[-1] for peer in peers)
        pairs = zip(answer.chunks, answer.chunks[1:], strict=False)
        return [after - before for before, after in pairs if before >= start and after <= stop]


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    url = urlsplit(args.url)
    if url.scheme != "http" or not url.hostname:
        raise ConfigError(f"--url {args.url} is no http:// address; name the server, such as http://127.0.0.1:8000")
    loads = [asyncio.run(measure(url, args, streams)) for streams in args.streams]
    about = f"{args.prompt_tokens} tokens in, {args.generated} out, {args.rounds} requests a stream"
    columns = (
        Column("streams", "streams"),
        Column("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
        Column("ttft_seconds", "first token p50", milliseconds),
        Column("ttft_max_seconds", "max", milliseconds),
        Column("gap_p50_seconds", "gap p50", milliseconds),
        Column("gap_p99_seconds", "p99", milliseconds),
        Column("gap_max_seconds", "max", milliseconds),
        Column("client_share", "client's core", lambda value: f"{value:.0%}"),
    )
    table = Table("load", "Load", about, columns, [load.record() for load in loads])
    if args.save_trace is not None:
        save_trace(args.save_trace, loads, args.prompt_tokens)
    publish("serve", args.url, [table], {"url": args.url}, csv_folder=args.csv, picture=None)
    return 0


def save_trace(path: Path, loads: list[Load], prompt_tokens: int) -> None:
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


async def measure(url: SplitResult, args: argparse.Namespace, streams: int) -> Load:
    """`streams` clients, `args.rounds` requests each. Raises ConfigError if the server refuses or cannot be reached."""
    before, started = _cpu_seconds(), perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_client(url, args)) for _ in range(streams)]
    except* (OSError, asyncio.IncompleteReadError) as errors:
        raise ConfigError(f"--url {args.url} cannot be reached: {errors.exceptions[0]}; start the server") from None
    except* ConfigError as errors:
        raise errors.exceptions[0] from None
    seconds = perf_counter() - started
    answers = [answer for task in tasks for answer in task.result()]
    return Load(streams, seconds, _cpu_seconds() - before, tuple(answers))


async def _client(url: SplitResult, args: argparse.Namespace) -> list[Answer]:
    return [await _ask(url, args) for _ in range(args.rounds)]


async def _ask(url: SplitResult, args: argparse.Namespace) -> Answer:
    """One streamed completion. Its prompt is drawn, so that no cache of prompts knows it from another request."""
    body = {
        "prompt": [100 + secrets.randbelow(128) for _ in range(args.prompt_tokens)],
        "max_tokens": args.generated,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"model": args.model} if args.model else {}),
    }
    payload = json.dumps(body).encode()
    key = f"Authorization: Bearer {args.api_key}\r\n" if args.api_key else ""
    head = (
        f"POST {url.path.rstrip('/')}{PATH} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"{key}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port or 80, limit=LIMIT)
    try:
        sent = perf_counter()
        writer.write(head.encode() + payload)
        chunks, tokens = await _read(reader, args.url)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return Answer(sent, tuple(chunks), tokens or len(chunks))


async def _read(reader: asyncio.StreamReader, url: str) -> tuple[list[float], int]:
    """(when each chunk of text came, the server's count of tokens). Raises ConfigError if there is no text."""
    status = (await reader.readline()).decode("latin-1").split(" ", 2)
    if len(status) < 2 or status[1] != "200":
        text = (await reader.read(LIMIT)).decode(errors="replace").strip().splitlines()
        raise ConfigError(f"--url {url} answered {' '.join(status).strip()}: {text[-1] if text else 'nothing'}")
    chunks: list[float] = []
    tokens = 0
    # Chunk sizes of the transfer coding stand on lines of their own, so lines are all that has to be told apart.
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            tokens = int(event["usage"]["completion_tokens"])
        if event.get("choices") and event["choices"][0].get("text"):
            chunks.append(perf_counter())
    if not chunks:
        raise ConfigError(f"--url {url} streamed no text; see the server's log")
    return chunks, tokens


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _percentile(ordered: list[float], share: float) -> float | None:
    """Nearest rank: a gap that occurred."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
