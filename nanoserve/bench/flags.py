"""The flags of every measurement, and the checks that need nothing but the flags. No torch."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from nanoserve.config import EngineConfig, GraphBackend, Kernels, Quantise, QuantiseHead
from nanoserve.errors import ConfigError

LOCAL = "http://127.0.0.1:8000"
PEERS = ("openvino-genai", "llama-cpp-python")


def add_warm_flags(parser: argparse.ArgumentParser) -> None:
    _add_subject_flags(parser)
    add = parser.add_argument_group("what is recorded (measured)").add_argument
    add("--rows", type=int, default=2, help="sequences that decode together")
    add("--prompt-tokens", type=int, default=16, help="tokens of each prompt")
    add("--width-multiple", type=int, default=32, help="widths are multiples of this")
    add("--generated", type=int, nargs="+", default=[8, 32, 64, 128], metavar="N", help="lengths of the answers")
    add = parser.add_argument_group("where it is paid for (arithmetic)").add_argument
    add("--serving-rows", type=int, default=256, help="rows of the deployment; also of the memory budgets")
    add("--serving-width", type=int, default=8192, help="longest context of the deployment")
    add("--serving-multiple", type=int, default=128, help="width multiple of the deployment")
    add(
        "--serving-generated",
        type=int,
        nargs="+",
        default=[128, 512, 2048, 8192],
        metavar="N",
        help="decode steps of one request",
    )
    add("--seconds-per-graph", type=float, default=0.05, help="price of one recording")
    add("--trim-rows", type=int, default=8, help="row ceiling of the trimmed lists")
    add("--trim-width", type=int, default=2048, help="width ceiling of the shorter trimmed list")
    add = parser.add_argument_group("what a memory budget allows (arithmetic)").add_argument
    add("--budget-mb", type=int, nargs="+", default=[64, 268, 1000], metavar="MB", help="budgets, in 10^6 bytes")
    add("--heads", type=int, default=32, help="attention heads; scores are fp32")
    _add_output_flags(parser)


def add_stalls_flags(parser: argparse.ArgumentParser) -> None:
    _add_subject_flags(parser)
    add = parser.add_argument_group("the client").add_argument
    add("--prompt-tokens", type=int, default=16, help="tokens of its prompt")
    add("--generated", type=int, default=128, metavar="N", help="tokens of its answer")
    add("--width-multiple", type=int, default=32, help="widths are multiples of this")
    add("--repeats", type=int, default=3, help="runs of each kind, in turn; a gap is the median over them")
    _add_output_flags(parser)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    _add_kernel_flags(parser)
    add = parser.add_argument_group("what is measured").add_argument
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N", help="sequences that decode")
    add("--context", type=int, nargs="*", default=[192, 1024, 4096], metavar="N", help="tokens of each")
    add("--prefill", type=int, nargs="*", default=[128, 512, 2048], metavar="N", help="tokens of a prompt")
    add("--max-step-rows", type=int, default=512, help="prompt tokens of one step")
    add(
        "--sampling",
        type=int,
        nargs="*",
        default=[],
        metavar="N",
        help="rows whose sampled steps are compared with greedy ones, in turn, at the first context",
    )
    add("--repeats", type=int, default=15, help="steps of each kind; a figure is their median")
    _add_csv_flag(parser)


def add_mixed_flags(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig()
    add = _add_kernel_flags(parser)
    add("--max-step-rows", type=int, help="rows of a step (default: what serve takes)")
    add("--prefill-gap-seconds", type=float, default=default.prefill_gap_seconds, help="prompts may add to a gap")
    add = parser.add_argument_group("the load").add_argument
    add("--streams", type=int, default=8, metavar="N", help="sequences that decode")
    add("--stream-tokens", type=int, default=64, metavar="N", help="tokens of each one's prompt")
    add("--prompt-tokens", type=int, default=6000, metavar="N", help="tokens of the prompt that comes")
    add("--repeats", type=int, default=1, help="rounds: a prompt beside the streams, and one alone")
    _add_csv_flag(parser)


def add_prefix_flags(parser: argparse.ArgumentParser) -> None:
    _add_kernel_flags(parser)
    add = parser.add_argument_group("the conversations").add_argument
    add("--history", type=int, default=2000, metavar="N", help="tokens of the first turn's prompt")
    add("--generated", type=int, default=32, metavar="N", help="tokens of each answer")
    add("--added", type=int, default=32, metavar="N", help="tokens the second turn adds to prompt and answer")
    add("--repeats", type=int, default=5, help="conversations; a figure is their median")
    _add_csv_flag(parser)


def add_peer_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("this engine").add_argument
    add("--model", default=EngineConfig().model, help="folder, .gguf file, hub id or short name")
    add("--kernels", default="auto", choices=get_args(Kernels), help="what computes")
    add("--threads", type=int, help="compute threads of every engine (default: one per core)")
    add("--quantize-head", default="auto", choices=get_args(QuantiseHead), help="as serve's")
    add = parser.add_argument_group("the other engines").add_argument
    add("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="which; none: servers alone")
    add("--peer-python", default=sys.executable, metavar="PATH", help="the interpreter that has them (default: this)")
    add("--openvino-model", type=Path, metavar="PATH", help="GGUF file or OpenVINO folder")
    add("--llama-model", type=Path, metavar="FILE.gguf", help="(default of both: the model's, made Q4_0 by llama.cpp)")
    add = parser.add_argument_group("their work").add_argument
    add("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="sequences that decode")
    add("--context", type=int, nargs="*", default=[192], metavar="N", help="tokens of each, in the mean")
    add("--prefill", type=int, nargs="*", default=[128, 512, 2048], metavar="N", help="tokens of a prompt")
    add("--steps", type=int, default=16, help="decode steps of an engine before it is the next one's turn")
    add("--repeats", type=int, default=5, help="turns of each engine; a figure is their median")
    add = parser.add_argument_group("servers, which are running").add_argument
    add("--server-url", metavar="URL", help="the other server, without /v1 (default: none is compared)")
    add("--server-model", metavar="NAME", help="the name of its model, where it wants one")
    add("--url", default=LOCAL, help="nanoserve's own")
    _add_load_flags(parser)
    _add_csv_flag(parser)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the server").add_argument
    add("--url", default=LOCAL, help="its address, without /v1")
    add("--model", help="the model's name, where the server wants one")
    add("--api-key", metavar="KEY", help="its key, where it wants one")
    _add_load_flags(parser)
    add = _add_csv_flag(parser)
    add("--save-trace", type=Path, metavar="FILE", help="write what was sent when, for `nanoserve simulate --trace`")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the load").add_argument
    add("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="clients at once")
    add("--rounds", type=int, default=2, help="requests of each client, one after the other")
    add("--prompt-tokens", type=int, default=100, help="tokens of each prompt")
    add("--generated", type=int, default=128, metavar="N", help="tokens of each answer")
    add("--prompt-ids", type=int, default=4096, metavar="N", help="prompts are drawn from the token ids below this")


def add_start_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the server").add_argument
    add("--model", default=EngineConfig().model, help="folder, .gguf file, hub id or short name")
    add("--flags", default="", metavar="'FLAGS'", help="more flags of `nanoserve serve`, in one argument")
    add("--repeats", type=int, default=5, help="starts; a figure is their median")
    _add_csv_flag(parser)


def add_quality_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and formats").add_argument
    add("--model", default=EngineConfig().model, help="folder, .gguf file, hub id or short name")
    add("--kernels", default="auto", choices=get_args(Kernels), help="what computes, beside the reference in fp32")
    add("--threads", type=int, help="compute threads (default: one per core)")
    add(
        "--formats",
        type=parse_format,
        nargs="+",
        default=[parse_format("stored")],
        metavar="MATRICES[/HEAD]",
        help="what --quantize and --quantize-head make of the weights: stored, w8, w4, stored/w4 …",
    )
    add = parser.add_argument_group("the text").add_argument
    add("--text", type=Path, required=True, metavar="FILE", help="what is predicted: plain text in UTF-8")
    add("--tokens", type=int, default=50_000, metavar="N", help="how much of it, in tokens")
    add("--context", type=int, default=512, metavar="N", help="tokens of a window; windows know nothing of each other")
    _add_csv_flag(parser)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The values of --quantize and --quantize-head that a measurement runs with, and how they were written."""

    name: str
    quantize: Quantise
    quantize_head: QuantiseHead


def parse_format(text: str) -> WeightFormat:
    """`MATRICES[/HEAD]`. Raises ArgumentTypeError."""
    matrices, _, head = text.partition("/")
    if matrices not in ("stored", "w8", "w4") or head not in ("", "w8", "w4"):
        raise argparse.ArgumentTypeError(f"{text!r} is no format; write stored, w8 or w4, or two of them as w4/w8")
    return WeightFormat(text, "none" if matrices == "stored" else matrices, head or "auto")  # type: ignore[arg-type]


def _add_subject_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model and backend").add_argument
    add("--model", help="folder, .gguf file, hub id or short name (default: a tiny random decoder, made in memory)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the weights")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--threads", type=int, help="compute threads (default: one per core; the tiny decoder: 1)")
    add("--graph-backend", default="auto", choices=get_args(GraphBackend), help="how to record")
    add(
        "--record-seconds",
        type=float,
        metavar="S",
        help="sleep this long in each recording: stands for a device whose recordings cost that, and is named so",
    )


def _add_kernel_flags(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """The group's `add_argument`, for what a measurement adds."""
    add = parser.add_argument_group("model and kernels").add_argument
    add("--model", default=EngineConfig().model, help="folder, .gguf file, hub id or short name")
    add("--kernels", default="auto", choices=get_args(Kernels), help="what computes")
    add("--threads", type=int, help="compute threads (default: one per core)")
    return add


def _add_csv_flag(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    add = parser.add_argument_group("output").add_argument
    add("--csv", type=Path, metavar="DIR", help="write the tables there, one file each")
    return add


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    add = _add_csv_flag(parser)
    add("--picture", type=Path, metavar="FILE.svg", help="draw the result")


def check_flags(args: argparse.Namespace, *, may_be_zero: Collection[str] = ()) -> None:
    """Numbers in range and outputs that can be written, before anything is measured. Raises ConfigError.

    may_be_zero  names of whole numbers that need not be at least 1
    """
    for name, value in vars(args).items():
        for each in value if isinstance(value, list) else [value]:
            _check_number(name, each, 0 if name in may_be_zero else 1)
    generated = getattr(args, "generated", [])
    for tokens in generated if isinstance(generated, list) else [generated]:
        if tokens < 2:
            raise ConfigError(f"--generated is {tokens}; an answer of at least 2 tokens has a decode step; raise it")
    if args.csv is not None:
        _make_folder(args.csv, "--csv")
    if getattr(args, "picture", None) is not None:
        if args.picture.suffix.lower() != ".svg":
            raise ConfigError(f"--picture {args.picture} is no SVG file; give it a name that ends in .svg")
        _make_folder(args.picture.parent, "--picture")


def _check_number(name: str, value: object, least: int) -> None:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{flag} is {value}; it must be a number of seconds, at least 0")
    if isinstance(value, int) and value < least:
        raise ConfigError(f"{flag} is {value}; it must be at least {least}")


def _make_folder(folder: Path, flag: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}: folder {folder} cannot be made: {error.strerror}; name another") from error
