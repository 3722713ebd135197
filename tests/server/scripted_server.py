"""The real server over the scripted engine as a process, with answers made for the tests of process and page.

`python -m tests.server.scripted_server --port N [flags]`: the last user message, or the prompt, picks the answer; a
boot takes 13 stages of `--boot-seconds`.
"""

from __future__ import annotations

import argparse
import sys

from nanoserve.request import ChatPrompt, Request
from server.config import ServerConfig
from server.run import serve
from tests.server.fake_engine import Boot, Script, ScriptedEngine

STEP_SECONDS = 0.02
GRAPHS = 12
HOSTILE = (
    "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>\n\n"
    '**bold** and `code` and [a link](javascript:window.broken=3)\n\n```html\n<b onclick="x()">  kept </b>\n```\n'
)


def script(request: Request) -> Script:
    """What the page is answered. A piece is one token."""
    params, prompt = request.params, request.prompt
    messages = prompt.messages if isinstance(prompt, ChatPrompt) else ()
    question = messages[-1]["content"] if messages else str(prompt)
    pieces = ["The", " capital", " of", " France", " is", " Paris", "."]
    if "long" in question:
        pieces = [f"{number} " for number in range(1, 2001)]
    elif "hostile" in question:
        pieces = [HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)]
    elif "recall" in question:
        pieces = [" | ".join(f"{message['role']}: {message['content']}" for message in messages)]
    elif "settings" in question:
        pieces = [f"t={params.temperature} p={params.top_p} m={params.max_tokens} s={params.seed}"]
    elif "seed" in question:
        pieces = [f"My seed is {params.seed}.", *[" …"] * 40]
    return Script(tuple(pieces), delay=STEP_SECONDS, fail_after=3 if "fail" in question else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--boot-seconds", type=float, default=0.0)
    parser.add_argument("--boot-failure", help="message with which the boot ends, with code 5")
    parser.add_argument("--api-key", action="append", default=[])
    parser.add_argument("--drain-seconds", type=float, default=0.5)
    parser.add_argument("--flood", action="store_true", help="answer with large tokens, as fast as they are read")
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args()
    loading = ("loading", 70_000_000, 100_000_000, None)
    warming = [("warming", done, GRAPHS, (GRAPHS - done) * options.boot_seconds) for done in range(GRAPHS)]
    failure = (options.boot_failure, 5) if options.boot_failure else None
    engine = ScriptedEngine(script=script, boot=Boot([loading, *warming], options.boot_seconds, failure))
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
