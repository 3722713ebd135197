"""Closed-loop load over SSE on any server with OpenAI's /v1/completions, and what its clients saw.

Each stream sends its next request when its last one has ended, greedy and to a fixed length. The client is part of the
load, so it is kept small (one event loop, no HTTP library) and its own share of a core is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import resource
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import SystemRandom
from statistics import median
from time import perf_counter
from urllib.parse import SplitResult, urlsplit
from urllib.request import urlopen

from nanoserve.bench.tables import Record
from nanoserve.errors import ConfigError

PATH = "/v1/completions"
LIMIT = 1 << 20
FIRST_ID = 100
"""Prompts are made of ids from this one on: below lie the special ones of most vocabularies."""
DRAWN = SystemRandom()


@dataclass(frozen=True, slots=True)
class Server:
    """Where the load goes. `url` is without /v1; `flag` named it and stands in messages."""

    url: SplitResult
    flag: str = "--url"
    model: str | None = None
    api_key: str | None = None

    @classmethod
    def at(cls, address: str, flag: str = "--url", *, model: str | None = None, api_key: str | None = None) -> Server:
        """Raises ConfigError unless `address` is an http:// one."""
        url = urlsplit(address)
        if url.scheme != "http" or not url.hostname:
            raise ConfigError(f"{flag} {address} is no http:// address; name the server, such as http://127.0.0.1:8000")
        return cls(url, flag, model, api_key)

    @property
    def name(self) -> str:
        return f"{self.flag} {self.url.geturl()}"


@dataclass(frozen=True, slots=True)
class Work:
    """`rounds` requests of each stream, one after the other. Prompts are drawn from the token ids below `ids`."""

    prompt_tokens: int
    generated: int
    rounds: int
    ids: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Work:
        """What the flags of a load say. Raises ConfigError."""
        if args.prompt_ids <= FIRST_ID:
            raise ConfigError(f"--prompt-ids is {args.prompt_ids}; it must be above {FIRST_ID}")
        return cls(args.prompt_tokens, args.generated, args.rounds, args.prompt_ids)

    def describe(self) -> str:
        return f"{self.prompt_tokens} tokens in, {self.generated} out, {self.rounds} requests a stream"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that came: when, by the client's clock, and how many tokens the answer had with it."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. `tokens` is the server's count."""

    sent: float
    chunks: tuple[Chunk, ...]
    tokens: int

    @property
    def gaps(self) -> list[tuple[float, float, float]]:
        """(start, stop, seconds for each token) between one chunk and the next."""
        return [(a.at, b.at, (b.at - a.at) / max(1, b.tokens - a.tokens)) for a, b in pairwise(self.chunks)]


@dataclass(frozen=True, slots=True)
class Load:
    """What one number of streams saw."""

    streams: int
    seconds: float
    client_seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def record(self) -> Record:
        firsts = [answer.chunks[0].at - answer.sent for answer in self.answers]
        gaps = [gap for answer in self.answers for gap in answer.gaps]
        every = sorted(seconds for _, _, seconds in gaps)
        spans = self.full_spans()
        full = sorted(seconds for start, stop, seconds in gaps if any(a <= start and stop <= b for a, b in spans))
        return {
            "streams": self.streams,
            "tokens_per_second": self.tokens_per_second,
            "ttft_seconds": median(firsts),
            "ttft_max_seconds": max(firsts),
            "gap_p50_seconds": percentile(every, 0.5),
            "gap_p99_seconds": percentile(every, 0.99),
            "gap_max_seconds": percentile(every, 1.0),
            "full_gap_p50_seconds": percentile(full, 0.5),
            "full_gap_p99_seconds": percentile(full, 0.99),
            "full_gap_max_seconds": percentile(full, 1.0),
            "full_gaps": len(full),
            "client_share": self.client_seconds / self.seconds,
        }

    def full_spans(self) -> list[tuple[float, float]]:
        """The spans of time in which every stream is between its answer's first chunk and its last: nothing but
        decoding is asked of the server then."""
        edges = sorted(edge for each in self.answers for edge in ((each.chunks[0].at, 1), (each.chunks[-1].at, -1)))
        spans, decoding = [], 0
        for (start, change), (stop, _) in pairwise(edges):
            decoding += change
            if decoding == self.streams:
                spans.append((start, stop))
        return spans


async def measure(server: Server, work: Work, streams: int) -> Load:
    """`streams` clients at once. Raises ConfigError if the server refuses or cannot be reached."""
    before, started = _cpu_seconds(), perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_client(server, work)) for _ in range(streams)]
    except* (OSError, asyncio.IncompleteReadError) as errors:
        raise ConfigError(f"{server.name} cannot be reached: {errors.exceptions[0]}; start the server") from None
    except* ConfigError as errors:
        raise errors.exceptions[0] from None
    seconds = perf_counter() - started
    answers = [answer for task in tasks for answer in task.result()]
    return Load(streams, seconds, _cpu_seconds() - before, tuple(answers))


def name_of(server: Server) -> str:
    """Its address and the first model that it lists, which tells the format of most. Raises ConfigError."""
    try:
        with urlopen(f"{server.url.geturl().rstrip('/')}/v1/models", timeout=10) as response:
            models = json.load(response)["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{server.name} lists no models: {error}; start the server") from error
    return f"{server.url.netloc} {Path(str(models[0]['id'])).name}" if models else server.url.netloc


def percentile(ordered: list[float], share: float) -> float | None:
    """Nearest rank: one that occurred. None if there is none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


async def _client(server: Server, work: Work) -> list[Answer]:
    return [await _ask(server, work) for _ in range(work.rounds)]


async def _ask(server: Server, work: Work) -> Answer:
    """One streamed completion. Its prompt is drawn, so that no cache of prompts knows it from another request."""
    body = {
        "prompt": DRAWN.choices(range(FIRST_ID, work.ids), k=work.prompt_tokens),
        "max_tokens": work.generated,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"model": server.model} if server.model else {}),
    }
    payload = json.dumps(body).encode()
    key = f"Authorization: Bearer {server.api_key}\r\n" if server.api_key else ""
    head = (
        f"POST {server.url.path.rstrip('/')}{PATH} HTTP/1.1\r\nHost: {server.url.netloc}\r\n"
        f"Content-Type: application/json\r\n{key}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(server.url.hostname, server.url.port or 80, limit=LIMIT)
    try:
        sent = perf_counter()
        writer.write(head.encode() + payload)
        chunks, tokens = await _read(reader, server)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return Answer(sent, tuple(chunks), tokens or len(chunks))


async def _read(reader: asyncio.StreamReader, server: Server) -> tuple[list[Chunk], int]:
    """(the chunks of text, the server's count of tokens). Raises ConfigError if there is no text.

    Where the server counts along (`continuous_usage_stats`), a chunk bears the count; elsewhere it is one token."""
    status = (await reader.readline()).decode("latin-1").split(" ", 2)
    if len(status) < 2 or status[1] != "200":
        text = (await reader.read(LIMIT)).decode(errors="replace").strip().splitlines()
        raise ConfigError(f"{server.name} answered {' '.join(status).strip()}: {text[-1] if text else 'nothing'}")
    chunks: list[Chunk] = []
    tokens = 0
    # Chunk sizes of the transfer coding stand on lines of their own, so lines are all that has to be told apart.
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            tokens = int(event["usage"]["completion_tokens"])
        if event.get("choices") and event["choices"][0].get("text"):
            before = chunks[-1].tokens if chunks else 0
            chunks.append(Chunk(perf_counter(), tokens if event.get("usage") else before + 1))
    if not chunks:
        raise ConfigError(f"{server.name} streamed no text; see the server's log")
    return chunks, tokens


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
