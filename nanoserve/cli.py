"""The `nanoserve` command: argv to configs, the cheap checks, and then the thing itself. Imports no torch."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from nanoserve import __version__
from nanoserve.boot import Booted, Report, Timeline
from nanoserve.config import EngineConfig
from nanoserve.errors import ClientError, StartupError
from nanoserve.probe import share_cores

TIMEOUT_HELP = "for requests that name none, from arrival to the last token (default: no limit)"
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code. A StartupError is one line on stderr and its own code."""
    args = build_parser().parse_args(argv)
    share_cores()
    try:
        return int(args.run(args))
    except StartupError as error:
        print(f"nanoserve: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    from nanoserve.bench import add_bench_parser
    from nanoserve.simulate.flags import DESCRIPTION, add_flags

    parser = _Parser(prog="nanoserve", description="An LLM inference engine and streaming server.")
    parser.add_argument("--version", action="version", version=f"nanoserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    serve = commands.add_parser("serve", help="serve a model over HTTP and WebSocket", formatter_class=_Formatter)
    add_engine_flags(serve)
    add_server_flags(serve)
    serve.set_defaults(run=run_serve)
    chat = commands.add_parser("chat", help="chat with a model in the terminal", formatter_class=_Formatter)
    add_engine_flags(chat)
    chat.add_argument("--system", help="system prompt")
    chat.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
    chat.set_defaults(run=run_chat, max_sequences=1)  # one conversation: no other row is ever decoded
    add_bench_parser(commands, formatter_class=_Formatter)
    simulate = commands.add_parser(
        "simulate", help="size a deployment before buying it", description=DESCRIPTION, formatter_class=_Formatter
    )
    add_flags(simulate)
    simulate.set_defaults(run=run_simulate)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other mistake: the usage of forty flags would push it off the screen."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults in the help, except where the text already says what None means."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every field of EngineConfig."""
    group = parser.add_argument_group("engine")
    default = EngineConfig()
    add = group.add_argument
    add("--model", default=default.model, help="folder, .gguf file, hub id or short name")
    add("--dtype", default=default.dtype, choices=["auto", "float32", "bfloat16", "float16"], help="of the weights")
    formats = ["w8", "w4"]
    add("--quantize", default=default.quantize, choices=["none", *formats], help="what float matrices become at load")
    add(
        "--quantize-head",
        default=default.quantize_head,
        choices=["auto", *formats],
        help="what the output head becomes",
    )
    add("--device", default=default.device, help="auto, cpu, cuda, cuda:1")
    add("--threads", type=int, help="compute threads (default: one per core)")
    add("--max-model-len", type=int, help="tokens of prompt and answer together (default: the model's)")
    add("--max-sequences", type=int, help="sequences that run at once (default: 32; 8 where the read is a rectangle)")
    add("--max-queued", type=int, default=default.max_queued, help="waiting sequences before requests are refused")
    add("--max-queued-tokens", type=int, help="waiting prompt tokens before requests are refused (default: no limit)")
    add("--request-timeout", type=float, dest="request_timeout_seconds", metavar="SECONDS", help=TIMEOUT_HELP)
    add("--max-step-rows", type=int, help="rows of a step: decoding sequences and prompt tokens (default: 512)")
    add("--prefill-gap-seconds", type=float, default=default.prefill_gap_seconds, help="prompts may add to a gap")
    add("--block-size", type=int, default=default.block_size, help="tokens in a K/V block")
    add("--kv-memory", type=parse_bytes, dest="kv_memory_bytes", help="size of the K/V pool, such as 512M or 2G")
    add("--kv-memory-share", type=float, default=default.kv_memory_share, help="of free memory, without --kv-memory")
    add("--prefault", action="store_true", help="touch the whole K/V pool at boot")
    add("--kernels", default=default.kernels, choices=["auto", "reference", "native"], help="what computes")
    add("--attention-read", default=default.attention_read, choices=["auto", "rectangle", "paged"], help="of K/V")
    add("--width-multiple", type=int, default=default.width_multiple, help="widths are multiples of this")
    for name, text in (
        ("bucket-decode", "pad decode batches to a closed set of shapes"),
        ("persist-inputs", "keep step inputs at fixed addresses"),
        ("capture-decode", "record and replay decode graphs"),
        ("prefix-cache", "reuse what was computed for the same first tokens"),
    ):
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--graph-backend", default=default.graph_backend, choices=["auto", "eager", "cuda"], help="how to record")
    add("--warm-rows", type=int, help="warm shapes of at most this many rows (default: all)")
    add("--warm-width", type=int, help="warm shapes of at most this width (default: all)")
    add("--warmup-seconds", type=float, help="budget of the warm-up; the rest is recorded in idle gaps (default: none)")
    add("--self-test-seconds", type=float, default=default.self_test_seconds, help="for the padding self-test")
    add("--warm-list", metavar="FILE", help="shapes served last time: warmed first, saved at shutdown")
    add("--strict-shapes", action="store_true", help="a shape without a graph is an error")
    add("--paranoid", action="store_true", help="check every invariant after every step")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="require this key (repeatable); also NANOSERVE_API_KEY",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="browser origin to allow (repeatable), or *",
    )
    add("--served-model-name", help="the model's name on the wire (default: from --model)")
    add("--drain-seconds", type=float, default=30.0, help="how long generations may go on after SIGTERM")
    add("--dry-run", action="store_true", help="print the priced plan and exit")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="of log lines on stderr")


def parse_bytes(text: str) -> int:
    """`512M`, `2g`, `1.5G` or a plain number of bytes. Raises ArgumentTypeError."""
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = number[-1:] if number[-1:] in UNITS else ""
    try:
        value = int(float(number.removesuffix(unit)) * UNITS[unit])
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write a number with K, M or G, such as 512M")
    return value


def engine_config(args: argparse.Namespace) -> EngineConfig:
    fields: dict[str, Any] = {name: getattr(args, name) for name in EngineConfig.__slots__ if hasattr(args, name)}
    return EngineConfig(**fields)


def run_serve(args: argparse.Namespace) -> int:
    """Check what is cheap to check, bind, and serve; the engine boots behind the open port."""
    if args.dry_run:
        return run_dry(args)
    timeline = Timeline()
    # The imports to come make a hundred thousand objects that live for ever: looking for garbage among them again and
    # again is a tenth of the start.
    gc.disable()
    from nanoserve.admission import Limits
    from nanoserve.async_engine import AsyncEngine
    from nanoserve.metrics import Metrics
    from nanoserve.source import check_source, resolve
    from server.config import ServerConfig
    from server.run import bind, end_process, serve

    config = engine_config(args)
    keys = [*args.api_key, *filter(None, [os.environ.get("NANOSERVE_API_KEY")])]
    server_config = ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        allowed_origins=tuple(args.allow_origin),
        served_model_name=args.served_model_name,
        drain_seconds=args.drain_seconds,
        log_level=args.log_level,
    )
    sockets = bind(server_config)
    source = resolve(config.model)
    check_source(source)
    metrics = Metrics(__version__)

    def boot(report: Report) -> Booted:
        timeline.end("server")
        from nanoserve.build import build_engine

        # Nor is it looked for once: of their objects, three in a hundred are garbage.
        gc.freeze()
        timeline.end("imports")
        try:
            return build_engine(config, metrics, report, source=source, timeline=timeline)
        finally:
            gc.enable()

    name = server_config.served_model_name or source.name
    limits = Limits(config.max_queued, config.max_queued_tokens, config.request_timeout_seconds)
    engine = AsyncEngine(boot, metrics, model_names=(name,), version=__version__, limits=limits)
    end_process(serve(engine, server_config, sockets))


def run_dry(args: argparse.Namespace) -> int:
    """Load and price, print, exit."""
    from nanoserve.build import describe_plan
    from nanoserve.metrics import Metrics

    print("\n".join(describe_plan(engine_config(args), Metrics(__version__), lambda progress: None)))
    return 0


def run_simulate(args: argparse.Namespace) -> int:
    """Costs, a load, sizes in; tables out."""
    from nanoserve.bench import while_read
    from nanoserve.simulate.command import run

    return while_read(lambda: run(args))


def run_chat(args: argparse.Namespace) -> int:
    """Read lines, stream answers; an empty line or end of file ends it, Ctrl-C ends an answer."""
    from nanoserve.llm import LLM

    llm = LLM(config=engine_config(args))
    history: list[dict[str, str]] = [{"role": "system", "content": args.system}] if args.system else []
    params = llm.default_params(**({} if args.temperature is None else {"temperature": args.temperature}))
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return 0
        if not line:
            return 0
        history.append({"role": "user", "content": line})
        answer = ""
        try:
            for text in llm.stream_chat(history, params):
                print(text, end="", flush=True)
                answer += text
        except KeyboardInterrupt:
            pass
        except ClientError as error:  # such as a conversation that has outgrown the context
            print(f"nanoserve: {error}", file=sys.stderr)
            history.pop()
            continue
        print()
        history.append({"role": "assistant", "content": answer})
