"""A real `serve.py` process for tests, on a free loopback port, ended by its own pid."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from tests.checkout import ROOT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Served:
    """A running server process. `log` is where its output goes."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> dict[str, Any]:
        return dict(requests.get(self.url + path, timeout=10).json())

    def post(self, path: str, body: dict[str, Any], **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120, **options)

    def wait_ready(self, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if requests.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"the server was not ready within {seconds} s:\n{self.text()}"
            time.sleep(0.1)

    def wait_idle(self, seconds: float) -> None:
        """Nothing runs, nothing waits, and every block is back."""
        deadline = time.monotonic() + seconds
        while True:
            metrics = self.get("/metrics")
            requests_, kv = metrics["requests"], metrics["kv"]
            if requests_["running"] == requests_["waiting"] == 0 and kv["blocks_free"] == kv["blocks_total"]:
                return
            assert time.monotonic() < deadline, f"not idle within {seconds} s: {requests_} {kv}"
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self, with_signal: int = signal.SIGTERM, seconds: float = 40.0) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        return self.process.wait(seconds)


@contextmanager
def served(log: Path, *flags: str, wait: bool = True) -> Iterator[Served]:
    """`python serve.py flags…`, ready if `wait`; killed at the end if it still runs."""
    port = free_port()
    with log.open("wb") as output:
        command = [sys.executable, "serve.py", "--port", str(port), *flags]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        server = Served(port, process, log)
        try:
            if wait:
                server.wait_ready()
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)
