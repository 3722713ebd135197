"""Measurements of this engine on this machine: `nanoserve bench NAME`. A table, CSV and a picture, and one JSON line.

flags     the command line of every measurement
subject   the model under test and the engines made from it
client    sequences driven through an engine, token by token
load      clients of a server over HTTP, and what they saw
contenders, peer_worker   engines under comparison, driven alike: this one, and others in a process of theirs
tables    results as text, CSV and JSON
svg       pictures
and one module for each measurement, with `run(args) -> exit code`, and its picture beside it

Imports nothing heavy: a measurement's module is loaded when it is run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from nanoserve.bench.flags import (
    add_engine_flags,
    add_mixed_flags,
    add_peer_flags,
    add_prefix_flags,
    add_quality_flags,
    add_serve_flags,
    add_stalls_flags,
    add_start_flags,
    add_warm_flags,
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """`name` is the subcommand and the module that runs it."""

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]

    def run(self, args: argparse.Namespace) -> int:
        return while_read(lambda: int(import_module(f"{__name__}.{self.name}").run(args)))


def while_read(command: Callable[[], int]) -> int:
    """Run a command that prints results; the exit code. A reader who has what it wanted (`| head`) ends it quietly."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    return code


MEASUREMENTS = (
    Measurement(
        "warm", "recordings: how many a run makes, where they are paid for, what memory allows", add_warm_flags
    ),
    Measurement("engine", "seconds of whole decode and prefill steps, and the bandwidth they take", add_engine_flags),
    Measurement("mixed", "gaps of running streams while a long prompt is computed", add_mixed_flags),
    Measurement("prefix", "first token of a chat's second turn, with and without the prefix cache", add_prefix_flags),
    Measurement("serve", "load over SSE on a running server: tokens/s, first token, gaps", add_serve_flags),
    Measurement("peer", "the same work through this engine and through others, in turn", add_peer_flags),
    Measurement("quality", "perplexity of a text by weight format, beside the fp32 model's", add_quality_flags),
    Measurement("start", "seconds from the command to the first token, stage by stage", add_start_flags),
    Measurement("stalls", "gaps between one client's tokens, with and without warming", add_stalls_flags),
)


def add_bench_parser(commands: Any, **parser_options: Any) -> None:
    """Add `bench` and its measurements to a parser's subcommands."""
    bench = commands.add_parser("bench", help="measure this engine on this machine", **parser_options)
    measurements = bench.add_subparsers(dest="measurement", required=True, metavar="measurement")
    for each in MEASUREMENTS:
        parser = measurements.add_parser(each.name, help=each.help, description=each.help, **parser_options)
        each.add_flags(parser)
        parser.set_defaults(run=partial(Measurement.run, each))
