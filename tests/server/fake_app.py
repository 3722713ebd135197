"""`python -m tests.server.fake_app --port N`: the real server and page over the scripted engine."""

from __future__ import annotations

import argparse
import sys

from nanoserve.request import Request
from server.config import ServerConfig
from server.run import serve
from tests.server.fake_engine import Boot, Script, ScriptedEngine

MARKDOWN = (
    "Here is **some** text with `code`, a list:\n\n- one\n- two\n\nand a block:\n\n```python\nprint('hi')\n```\n\n"
    "The capital of France is Paris. "
)


def script(request: Request) -> Script:
    """Long answers where the prompt says `long`, failures where it says `fail`, an answer about Paris otherwise."""
    text = str(request.prompt).lower()
    if "long" in text:
        return Script(tokens=tuple(f"word{i} " for i in range(2000)), delay=0.03)
    if "fail" in text:
        return Script(delay=0.05, fail_after=5)
    return Script(tokens=tuple(MARKDOWN.replace(" ", " \0").split("\0")), delay=0.04)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--boot-seconds", type=float, default=0.1, help="seconds each stage of the boot takes")
    parser.add_argument("--fail", type=int, help="fail the boot with this exit code")
    parser.add_argument("--drain-seconds", type=float, default=5.0)
    parser.add_argument("--delay", type=float, help="seconds between tokens, for every request")
    parser.add_argument("--flood", action="store_true", help="answer with large tokens, as fast as they are read")
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args(argv)
    warming = [("warming", done, 12, (12 - done) * options.boot_seconds) for done in range(12)]
    stages = [("loading", 40, 100, None), *warming]
    failure = None if options.fail is None else ("the scripted boot fails", options.fail)
    engine = ScriptedEngine(script=script, boot=Boot(stages, options.boot_seconds, failure))
    if options.delay is not None:
        engine.script = lambda request: Script(delay=options.delay)
    if options.flood:
        engine.script = lambda request: Script(tokens=("x" * 100_000,), delay=0.001)
    config = ServerConfig(
        port=options.port,
        api_keys=tuple(options.api_key),
        drain_seconds=options.drain_seconds,
        log_level=options.log_level,
    )
    return serve(engine, config)


if __name__ == "__main__":
    sys.exit(main())
