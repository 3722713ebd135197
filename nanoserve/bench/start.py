"""`nanoserve bench start`: servers started one after the other, from the command to the first token of a chat.

The clock starts before the process does. Everything the start reads is in the system's file cache from the second start
on; the first one is not counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TypeVar
from urllib.parse import urlsplit

from nanoserve.bench.flags import check_flags
from nanoserve.bench.tables import Column, Record, Table, publish
from nanoserve.errors import ConfigError

END_SECONDS = 30.0
T = TypeVar("T")


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    command = [sys.executable, "-m", "nanoserve", "serve", "--model", args.model, "--port", "0"]
    command += shlex.split(args.flags)
    starts = [start(command) for _ in range(args.repeats + 1)][1:]
    stages = [name for name in starts[0] if all(name in each for each in starts)]
    records = [
        {
            "stage": stage,
            "seconds": median(each[stage] for each in starts),
            "least_seconds": min(each[stage] for each in starts),
        }
        for stage in stages
    ]
    columns = (
        Column("stage", "until or in"),
        Column("seconds", "median", lambda value: f"{value:.2f} s"),
        Column("least_seconds", "least", lambda value: f"{value:.2f} s"),
    )
    table = Table("start", "Start", f"medians of {args.repeats}, warm file cache", columns, records)
    summary = {"model": args.model, "flags": args.flags}
    publish("start", shlex.join(command), [table], summary, csv_folder=args.csv, picture=None)
    return 0


def start(command: list[str]) -> Record:
    """Seconds from the command until the port is open, until ready and until the first token; then those of the
    stages. Raises ConfigError if the server does not start."""
    began = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        opened = perf_counter()
        found = re.search(r"http://\S+", line)
        ready = process.stdout.readline() if found else ""
        if found is None or not ready:
            process.kill()
            _, errors = process.communicate()
            raise ConfigError(f"the server did not start: {(errors.strip().splitlines() or ['no message'])[-1]}")
        until_ready = perf_counter()
        address = str(urlsplit(found[0]).netloc)
        first = _first_token(address)
        stages = _get(address, "/health")["boot_seconds"]
        times = {"port open": opened, "ready": until_ready, "first token": first}
        return {**{name: at - began for name, at in times.items()}, **{f"  {name}": s for name, s in stages.items()}}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _first_token(address: str) -> float:
    """When the first text of a streamed chat came, by this process's clock."""

    def read(response: http.client.HTTPResponse) -> float:
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices")
                if choices and choices[0]["delta"].get("content"):
                    return perf_counter()
        raise ConfigError("the server streamed no text; see its log")

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "stream": True}
    return _ask(address, "POST", "/v1/chat/completions", json.dumps(body), read)


def _get(address: str, path: str) -> Record:
    return _ask(address, "GET", path, None, lambda response: dict(json.loads(response.read())))


def _ask(address: str, method: str, path: str, body: str | None, read: Callable[[http.client.HTTPResponse], T]) -> T:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        return read(connection.getresponse())
    finally:
        connection.close()
