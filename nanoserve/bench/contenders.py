"""What `bench peer` compares: this engine in this process, and others behind `peer_worker.py`, all driven alike.

One of them works at a time. The others wait in a read or asleep; `idle_seconds` is the processor time they took then.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol

from nanoserve import __version__
from nanoserve.bench.client import NO_GAP_BOUND, Session, new_sequence, steps_ahead
from nanoserve.bench.peer_worker import prompt_ids
from nanoserve.bench.subject import kv_token_bytes
from nanoserve.blocks import blocks_for
from nanoserve.build import Prepared, prepare
from nanoserve.config import EngineConfig, choose_step_rows
from nanoserve.errors import ConfigError
from nanoserve.gguf_file import read_gguf
from nanoserve.metrics import Metrics
from nanoserve.source import ModelSource, read_safetensors_header, resolve, weight_files

WORKER = Path(__file__).with_name("peer_worker.py")
REMEDY = {
    "openvino-genai": "pip install openvino-genai",
    "llama-cpp-python": "pip install llama-cpp-python",
}
"""The peers there are, and how to get each."""


class Missing(Exception):
    """A peer that is not there or does not work here; the message says so in a line and what mends it."""


class Contender(Protocol):
    """An engine under comparison. `model` is the file or folder it computes with, `format` how weights are stored."""

    name: str
    version: str
    model: Path
    format: str
    idle_seconds: float

    def open(self, *, rows: int, prompt_tokens: int, steps: int) -> None:
        """Compute `rows` prompts, to be followed by `steps` decode steps at most; back when each has a first token."""

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of the next steps, of all rows together."""

    def close(self) -> None:
        """Forget the rows."""

    def prefill(self, tokens: int) -> float:
        """Seconds from a new prompt to its first token."""


class Ours:
    """The engine that would serve, stepped here: scheduler, runner and all."""

    name = "nanoserve"
    version = __version__

    def __init__(self, config: EngineConfig) -> None:
        self._prepared: Prepared = prepare(config, Metrics(__version__), lambda progress: None)
        self.model = resolve(config.model).path
        self.format = weight_format(self.model)
        if config.quantize_head != "auto":
            self.format = f"{self.format.partition(', head')[0]}, head {config.quantize_head}"
        self.kernels = self._prepared.choices.kernels
        self.idle_seconds = 0.0
        self._rested = process_time()
        self._salt = 0
        self._session: Session | None = None

    def open(self, *, rows: int, prompt_tokens: int, steps: int) -> None:
        self._begin()
        ahead = steps_ahead(rows, prompt_tokens, self._prepared.choices.config.step_rows)
        sequences = [self._sequence(prompt_tokens, row, steps + 1 + ahead) for row in range(rows)]
        self._session = Session(self._prepared.engine, sequences)
        self._end()

    def decode(self, steps: int) -> list[float]:
        assert self._session is not None, "decode before open"
        self._begin()
        seconds = self._session.decode(steps)
        self._end()
        return seconds

    def close(self) -> None:
        assert self._session is not None, "close before open"
        self._begin()
        self._session.close()
        self._end()

    def prefill(self, tokens: int) -> float:
        self._begin()
        sequence = self._sequence(tokens, 0, 1)
        started = perf_counter()
        self._prepared.engine.add(sequence)
        while not sequence.generated:
            self._prepared.engine.step()
        seconds = perf_counter() - started
        self._end()
        return seconds

    def _sequence(self, tokens: int, row: int, generated: int) -> Any:
        self._salt += 1
        ids = [token % self._prepared.model.vocab_size for token in prompt_ids(tokens, self._salt)]
        return new_sequence(ids, row=row, max_tokens=generated, block_size=self._prepared.pool.block_size)

    def _begin(self) -> None:
        self.idle_seconds += process_time() - self._rested

    def _end(self) -> None:
        self._rested = process_time()


class Peer:
    """Another engine in a process of another interpreter."""

    def __init__(self, name: str, python: str, *, model: Path, threads: int, sequences: int, tokens: int) -> None:
        """Starts the process and loads the model. Raises Missing."""
        self.name = name
        self.model = model
        self.format = weight_format(model)
        self.idle_seconds = 0.0
        # Ours sleep between operations; a peer waits the way it was made to, which is its best.
        environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [python, "-I", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._errors.close()
            raise Missing(
                f"{name}: --peer-python {python} does not start: {error.strerror}; name a Python interpreter"
            ) from error
        load = {"engine": name, "model": str(model), "threads": threads, "sequences": sequences, "tokens": tokens}
        try:
            reply = self._call("load", **load)
        except ConfigError as error:
            self.stop()
            raise Missing(f"{error}; name another file with {MODEL_FLAG[name]}") from error
        if "missing" in reply:
            self.stop()
            raise Missing(
                f"{name}: {python} has no {reply['missing']}; {REMEDY[name]} there, or name another with --peer-python"
            )
        self.version = str(reply["version"])

    def open(self, *, rows: int, prompt_tokens: int, steps: int) -> None:
        self._call("open", rows=rows, prompt_tokens=prompt_tokens, steps=steps)

    def decode(self, steps: int) -> list[float]:
        return [float(each) for each in self._call("decode", steps=steps)["seconds"]]

    def close(self) -> None:
        self._call("close")

    def prefill(self, tokens: int) -> float:
        return float(self._call("prefill", tokens=tokens)["seconds"])

    def stop(self) -> None:
        """End the process: its input ends, and after that it is given a moment."""
        with self._process as process:
            assert process.stdin is not None
            try:
                process.stdin.close()
                process.wait(timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                process.kill()
        self._errors.close()

    def _call(self, call: str, **fields: Any) -> dict[str, Any]:
        """Raises ConfigError if the other side fails or dies."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"call": call, **fields}) + "\n")
            self._process.stdin.flush()
            reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.name} gave no answer to {call!r}: {self._last_line()}") from error
        self.idle_seconds += reply["idle_seconds"]
        if "error" in reply:
            raise ConfigError(f"{self.name} failed at {call!r}: {reply['error']}")
        return reply

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


MODEL_FLAG = {"openvino-genai": "--openvino-model", "llama-cpp-python": "--llama-model"}


def weight_format(model: Path) -> str:
    """How the weights in a file or folder are stored, for the table: the layers' tensors, and the head's if other."""
    if model.suffix.lower() == ".gguf":
        tensors = read_gguf(model).tensors
        size: Counter[str] = Counter()
        for name, tensor in tensors.items():
            size[tensor.type_name] += tensor.nbytes if name.startswith("blk.") else 0
        layers = size.most_common(1)[0][0] if size else "no layers"
        head = tensors.get("output.weight") or tensors.get("token_embd.weight")
        return layers if head is None or head.type_name == layers else f"{layers}, head {head.type_name}"
    if list(model.glob("*.xml")):
        return f"OpenVINO IR {model.name}"
    dtypes = {entry.dtype for entry in read_safetensors_header(weight_files(model)[0]).values()}
    return f"safetensors {'/'.join(sorted(dtypes))}"


def gguf_of(source: ModelSource, flag: str) -> Path:
    """The model's own file, where a peer can read it. Raises Missing."""
    if source.kind != "gguf":
        raise Missing(f"{source.name} is no GGUF file, which this peer would read; name one with {flag}")
    return source.path


def q4_0_file(python: str, model: Path, folder: Path) -> Path:
    """A GGUF file in the format that llama.cpp has its fastest kernels for: itself if it is, else what llama.cpp makes
    of it in `folder`. Raises Missing."""
    if weight_format(model) in ("Q4_0", "Q4_0, head Q8_0"):
        return model
    target = folder / f"{model.stem}-Q4_0.gguf"
    command = [python, "-I", str(WORKER), str(model), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        problem = str(error.strerror)
    else:
        if not done.returncode:
            return target
        problem = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    raise Missing(f"peers read {model.name} as it is, since {python} makes no Q4_0 file of it: {problem}")


def engine_config(model: str, kernels: Any, threads: int | None, *, sequences: int, tokens: int) -> EngineConfig:
    """An engine with room for `sequences` of `tokens` each, and what they decode beside each other's prompts, that
    records what it meets."""
    step_rows = choose_step_rows(None, sequences)
    tokens += steps_ahead(sequences, tokens, step_rows)
    config = EngineConfig(
        model=model,
        kernels=kernels,
        threads=threads,
        max_model_len=tokens,
        max_sequences=sequences,
        max_step_rows=step_rows,
        prefill_gap_seconds=NO_GAP_BOUND,
        warmup_seconds=0.0,
    )
    blocks = sequences * blocks_for(tokens, config.block_size) + 1
    return replace(config, kv_memory_bytes=blocks * config.block_size * kv_token_bytes(config))
