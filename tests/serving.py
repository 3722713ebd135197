"""A server as a process of its own, on a free loopback port, ended by its own pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import requests

from tests.checkout import ROOT

SERVE = (sys.executable, "serve.py")
SCRIPTED = (sys.executable, "-m", "tests.server.scripted_server")
END_SECONDS = 40.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Served:
    """A server process and what it has printed so far."""

    port: int
    process: subprocess.Popen[bytes]
    _output: IO[bytes]
    _errors: IO[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return _written(self._output)

    @property
    def errors(self) -> str:
        return _written(self._errors)

    @property
    def said(self) -> str:
        return f"--- stdout\n{self.output}\n--- stderr\n{self.errors}"

    def get(self, path: str) -> dict[str, Any]:
        return dict(requests.get(self.url + path, timeout=10).json())

    def post(self, path: str, body: dict[str, Any], **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120, **options)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float) -> None:
        """Ask until `condition` is true. A port that is not open yet is no error; a process that ended is one."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except requests.RequestException:
                pass
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}\n{self.said}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.said}"
            time.sleep(0.05)

    def wait_for(self, path: str, seconds: float = 120.0) -> None:
        self.wait(lambda: requests.get(self.url + path, timeout=5).status_code == 200, f"{path} is 200", seconds)

    def wait_idle(self, seconds: float) -> None:
        """Nothing runs, nothing waits, and every block is back."""

        def idle() -> bool:
            metrics = self.get("/metrics")
            counts, kv = metrics["requests"], metrics["kv"]
            return bool(counts["running"] == counts["waiting"] == 0 and kv["blocks_free"] == kv["blocks_total"])

        self.wait(idle, "nothing runs and all blocks are free", seconds)

    def end(self, seconds: float = END_SECONDS) -> int:
        """Wait for the exit code."""
        return self.process.wait(seconds)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self, seconds: float = END_SECONDS) -> int:
        """SIGTERM, and the exit code."""
        self.signal(signal.SIGTERM)
        return self.end(seconds)

    def kill(self) -> None:
        """End it without a word to its clients."""
        self.process.kill()
        self.process.wait(10)


def _written(file: IO[bytes]) -> str:
    # Read at an offset of our own: the process writes at the one that a shared file description keeps.
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")


@contextmanager
def served(
    *flags: str,
    command: Sequence[str | Path] = SERVE,
    port: int | None = None,
    ready: str | None = "/health",
    cwd: Path = ROOT,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """`command --port N flags…`, once the path `ready` answers 200, if one is given; killed at the end if it runs.
    `environ` is set on top of this process's environment."""
    port = port or free_port()
    with TemporaryFile() as output, TemporaryFile() as errors:
        arguments = [*map(str, command), "--port", str(port), *flags]
        process = subprocess.Popen(
            arguments, cwd=cwd, stdout=output, stderr=errors, env={**os.environ, **(environ or {})}
        )
        server = Served(port, process, output, errors)
        try:
            if ready is not None:
                server.wait_for(ready)
            yield server
        finally:
            server.kill()
