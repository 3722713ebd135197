"""The flags of `nanoserve simulate`, and the checks that need nothing but the flags. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from nanoserve.config import EngineConfig, Kernels
from nanoserve.errors import ConfigError
from nanoserve.simulate.costs import READS
from nanoserve.simulate.trace import Lengths

DESCRIPTION = (
    "The scheduler that serves, driven by measured step costs instead of a device: how many sequences, how large a "
    "pool and which warm list a load needs. Flags that take several values are swept: a row for each combination."
)


FORMS = "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]"


def add_flags(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig()
    add = parser.add_argument_group("costs of a step (one of the two)").add_argument
    add("--costs", type=Path, metavar="FILE", help="measured costs, as --calibrate writes them")
    add("--step-ms", metavar="BASE,ROW,CONTEXT", help="by hand: of a step, a row, a context position a row reads")
    add = parser.add_argument_group("the load").add_argument
    add("--streams", type=int, nargs="+", metavar="N", help="closed loop: clients that send again when answered")
    add("--rate", type=float, nargs="+", metavar="R", help="open loop: Poisson arrivals a second")
    add("--trace", type=Path, metavar="FILE", help="open loop: a recorded trace, one JSON object a line")
    add("--requests", type=int, default=1000, metavar="N", help="synthetic requests in all")
    add("--prompt-tokens", type=lengths, default="100", metavar="DIST", help=FORMS)
    add("--output-tokens", type=lengths, default="128", metavar="DIST", help="likewise")
    add("--prefix-tokens", type=int, default=0, metavar="N", help="tokens that prompts begin with alike, in addition")
    add("--prefix-share", type=float, default=1.0, metavar="S", help="share of the requests that begin so")
    add("--seed", type=int, default=0, help="of lengths and arrivals")
    add = parser.add_argument_group("the deployment (flags of `nanoserve serve`)").add_argument
    add("--max-sequences", type=int, nargs="+", default=[32], metavar="N", help="sequences that run at once")
    add("--kv-blocks", type=int, nargs="+", metavar="N", help="blocks of the K/V pool (default: never short)")
    add("--max-step-rows", type=int, nargs="+", metavar="N", help="rows of a step (default: what serve takes)")
    add("--prefill-gap-seconds", type=float, default=default.prefill_gap_seconds, help="prompts may add to a gap")
    add("--block-size", type=int, default=default.block_size, help="tokens in a K/V block")
    text = "reuse what was computed for the same first tokens"
    add("--prefix-cache", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--max-model-len", type=int, help="tokens of prompt and answer together (default: the longest request's)")
    add("--max-queued", type=int, default=default.max_queued, help="waiting sequences before requests are refused")
    add("--max-queued-tokens", type=int, help="waiting prompt tokens before requests are refused (default: no limit)")
    add("--attention-read", choices=READS, help="of K/V (default: that of the costs; with --step-ms: paged)")
    add("--width-multiple", type=int, default=default.width_multiple, help="of the rectangle read's widths")
    add = parser.add_argument_group("a real engine on this machine").add_argument
    add("--calibrate", action="store_true", help="measure its step costs and write them to --costs")
    add("--calibrate-seconds", type=float, default=60.0, metavar="S", help="of timing steps")
    add("--validate", action="store_true", help="serve the load on it too, in real time, and compare")
    add("--model", default=default.model, help="folder, .gguf file, hub id or short name")
    add("--kernels", default=default.kernels, choices=get_args(Kernels), help="what computes")
    add("--threads", type=int, help="compute threads (default: one per core)")
    add = parser.add_argument_group("output").add_argument
    add("--csv", type=Path, metavar="DIR", help="write the tables there, one file each")
    add("--picture", type=Path, metavar="FILE.svg", help="draw the result")
    add("--save-trace", type=Path, metavar="FILE", help="write the synthetic requests as a trace")
    add("--save-warm-list", type=Path, metavar="FILE", help="write the shapes for `nanoserve serve --warm-list`")


def lengths(text: str) -> Lengths:
    """Raises ArgumentTypeError."""
    try:
        return Lengths.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no distribution of lengths; write {FORMS}") from None


def check_simulate_flags(args: argparse.Namespace) -> None:
    """What belongs together, and what does not. Raises ConfigError."""
    if args.calibrate:
        if args.costs is None:
            raise ConfigError("--calibrate writes a cost file; name it with --costs FILE")
        return
    if (args.costs is None) == (args.step_ms is None):
        said = "both --costs and --step-ms are given" if args.costs else "no step costs are given"
        raise ConfigError(
            f"{said}; measure them with nanoserve simulate --calibrate --costs FILE and pass --costs FILE, or write "
            "them by hand as --step-ms BASE,ROW,CONTEXT"
        )
    loads = [name for name in ("streams", "rate", "trace") if getattr(args, name) is not None]
    if len(loads) != 1:
        said = " and ".join(f"--{name}" for name in loads) if loads else "no load"
        raise ConfigError(f"{said} given; name one of --streams N, --rate R and --trace FILE")
    if not 0.0 <= args.prefix_share <= 1.0:
        raise ConfigError(f"--prefix-share is {args.prefix_share}; it must be from 0 to 1")
    if args.rate is not None and min(args.rate) <= 0:
        raise ConfigError(f"--rate is {min(args.rate)}; it must be above 0")
