"""The real server over the scripted engine, as a process, with answers made for the page's tests.

`python -m tests.browser.scripted_server --port N [--boot-seconds S] [--api-key K]`: the last user message picks the
answer; a boot takes 13 stages of S seconds.
"""

from __future__ import annotations

import argparse
import sys

from nanoserve.request import ChatPrompt, Request
from server.config import ServerConfig
from server.run import serve
from tests.server.fake_engine import Boot, Script, ScriptedEngine

STEP_SECONDS = 0.02
DRAIN_SECONDS = 0.5
GRAPHS = 12
HOSTILE = (
    "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>\n\n"
    '**bold** and `code` and [a link](javascript:window.broken=3)\n\n```html\n<b onclick="x()">  kept </b>\n```\n'
)


def script(request: Request) -> Script:
    """What the page is answered. A piece is one token."""
    assert isinstance(request.prompt, ChatPrompt)
    messages, params = request.prompt.messages, request.params
    question = messages[-1]["content"]
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
    parser.add_argument("--boot-failure", help="message with which the boot ends")
    parser.add_argument("--api-key", action="append", default=[])
    options = parser.parse_args()
    loading = ("loading", 70_000_000, 100_000_000, None)
    warming = [("warming", done, GRAPHS, (GRAPHS - done) * options.boot_seconds) for done in range(GRAPHS)]
    failure = (options.boot_failure, 5) if options.boot_failure else None
    engine = ScriptedEngine(script=script, boot=Boot([loading, *warming], options.boot_seconds, failure))
    config = ServerConfig(port=options.port, api_keys=tuple(options.api_key), drain_seconds=DRAIN_SECONDS)
    return serve(engine, config)


if __name__ == "__main__":
    sys.exit(main())
