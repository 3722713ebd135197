"""The far side of `nanoserve bench peer`: another engine, driven step by step over JSON lines.

Runs as a script in whichever interpreter has that engine (`python -I peer_worker.py`), so it imports nothing of
nanoserve. One request a line on stdin, one reply a line on stdout:

    load     engine, model, threads, sequences, tokens                -> version | missing
    open     rows, prompt_tokens, steps                               -> once each has its first token
    decode   steps                                                    -> seconds, one for each step of all rows
    close                                                             ->
    prefill  tokens                                                   -> seconds, from a prompt to its first token

`load` says how many sequences of how many tokens at most there will be; `steps` of `open` are the most that are decoded
before `close`. A reply bears `idle_seconds`: processor time taken since the reply before, while another engine was
measured. A failure is a reply with `error`. Decoding is greedy and does not end at an end of text.

`python -I peer_worker.py SOURCE.gguf TARGET.gguf` only makes a Q4_0 file.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from importlib.metadata import version
from time import perf_counter, process_time
from typing import Any

BATCH = 2048
MICRO_BATCH = 512
"""llama.cpp's own defaults: tokens of one call, and of one forward within it."""


def prompt_ids(tokens: int, salt: int) -> list[int]:
    """A prompt that no cache of earlier prompts holds: they differ from their first token on."""
    return [100 + (7919 * salt + 31 * position) % 4000 for position in range(tokens)]


class OpenVINO:
    """OpenVINO GenAI: its plain pipeline for one sequence, continuous batching for more."""

    def __init__(self, *, model: str, threads: int, sequences: int, tokens: int) -> None:
        self._genai: Any = import_module("openvino_genai")
        self._openvino: Any = import_module("openvino")
        self._numpy: Any = import_module("numpy")
        options = {"INFERENCE_NUM_THREADS": threads}
        self._plain = self._genai.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **options)
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs = sequences
        scheduler.num_kv_blocks = sequences * (tokens // 32 + 2)
        scheduler.enable_prefix_caching = False
        # All prompts in one step: with less, the first rows would be far ahead when the last one has its first token.
        scheduler.max_num_batched_tokens = sequences * tokens
        self._batching = self._genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", properties=options, tokenizer_properties={}, vision_encoder_properties={}
        )
        self._salt = 0
        self._context = 0
        self._handles: list[Any] = []
        self.about = {"version": version("openvino-genai")}

    def open(self, *, rows: int, prompt_tokens: int, steps: int) -> None:
        self._context = prompt_tokens
        if rows == 1:
            return
        limit = self._limit(steps + 1)
        self._handles = [self._batching.add_request(row, self._tensor(prompt_tokens), limit) for row in range(rows)]
        waiting = list(self._handles)
        while waiting:
            self._batching.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        self._taken()

    def decode(self, *, steps: int) -> list[float]:
        if not self._handles:
            return self._decode_one(steps)
        seconds = []
        for _ in range(steps):
            started = perf_counter()
            self._batching.step()
            seconds.append(perf_counter() - started)
        taken = self._taken()
        if taken != [steps] * len(self._handles):
            raise RuntimeError(f"{steps} steps chose {min(taken)} to {max(taken)} tokens a row; each must choose one")
        return seconds

    def _decode_one(self, steps: int) -> list[float]:
        """The plain pipeline cannot be paused: its prompt is computed again, and its first token not counted."""
        times = self._generate(self._context, steps + 1)
        self._context += steps
        return [after - before for before, after in zip(times, times[1:])]  # noqa: B905, RUF007 - Python 3.9 has neither

    def close(self) -> None:
        for handle in self._handles:
            handle.cancel()
        while self._handles and self._batching.has_non_finished_requests():
            self._batching.step()
        self._handles = []

    def prefill(self, *, tokens: int) -> float:
        started = perf_counter()
        return self._generate(tokens, 1)[0] - started

    def _generate(self, prompt_tokens: int, generated: int) -> list[float]:
        """When each token came."""
        times: list[float] = []
        running = self._genai.StreamingStatus.RUNNING

        class Streamer(self._genai.StreamerBase):  # type: ignore[name-defined, misc]
            def write(self, token: Any) -> Any:
                times.append(perf_counter())
                return running

            def end(self) -> None:
                """Nothing is held back."""

        self._plain.generate(self._tensor(prompt_tokens), self._limit(generated), Streamer())
        if len(times) != generated:
            raise RuntimeError(f"the pipeline streamed {len(times)} tokens of {generated}")
        return times

    def _limit(self, tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return config

    def _tensor(self, tokens: int) -> Any:
        self._salt += 1
        return self._openvino.Tensor(self._numpy.array([prompt_ids(tokens, self._salt)], dtype=self._numpy.int64))

    def _taken(self) -> list[int]:
        """Tokens that each row has got since the last call."""
        taken = []
        for handle in self._handles:
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            taken.append(count)
        return taken


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level calls: one batch a step, K/V of its own for each sequence, the
    largest logit taken with numpy."""

    def __init__(self, *, model: str, threads: int, sequences: int, tokens: int) -> None:
        self._llama: Any = import_module("llama_cpp")
        self._numpy: Any = import_module("numpy")
        self._threads = threads
        self._salt = 0
        self._context: Any = None
        self._positions: list[int] = []
        self._tokens: list[int] = []
        self._log = self._llama.llama_log_callback(lambda level, text, data: None)
        self._llama.llama_log_set(self._log, None)
        self._llama.llama_backend_init()
        self._model = self._llama.llama_model_load_from_file(model.encode(), self._llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocab_size = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self._model))
        self._batch = self._llama.llama_batch_init(BATCH, 0, 1)
        self.about = {"version": version("llama-cpp-python")}

    def open(self, *, rows: int, prompt_tokens: int, steps: int) -> None:
        self._context = self._new_context(rows, prompt_tokens + steps)
        self._tokens = [self._compute(prompt_tokens, row) for row in range(rows)]
        self._positions = [prompt_tokens] * rows

    def decode(self, *, steps: int) -> list[float]:
        seconds = []
        rows = range(len(self._tokens))
        for _ in range(steps):
            started = perf_counter()
            self._run([(self._tokens[row], self._positions[row], row, True) for row in rows])
            logits = self._llama.llama_get_logits(self._context)
            table = self._numpy.ctypeslib.as_array(logits, shape=(len(rows), self._vocab_size))
            self._tokens = table.argmax(axis=1).tolist()
            seconds.append(perf_counter() - started)
            self._positions = [position + 1 for position in self._positions]
        return seconds

    def close(self) -> None:
        self._llama.llama_free(self._context)

    def prefill(self, *, tokens: int) -> float:
        self._context = self._new_context(1, tokens)
        started = perf_counter()
        self._compute(tokens, 0)
        seconds = perf_counter() - started
        self.close()
        return seconds

    def _new_context(self, sequences: int, tokens: int) -> Any:
        params = self._llama.llama_context_default_params()
        params.n_ctx = sequences * (tokens // 256 + 1) * 256
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH, MICRO_BATCH, sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        context = self._llama.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp has no room for {sequences} sequences of {tokens:,} tokens")
        return context

    def _compute(self, tokens: int, row: int) -> int:
        """The token that follows a new prompt of sequence `row`."""
        self._salt += 1
        ids = prompt_ids(tokens, self._salt)
        for start in range(0, tokens, BATCH):
            part = range(start, min(start + BATCH, tokens))
            self._run([(ids[position], position, row, position == tokens - 1) for position in part])
        logits = self._llama.llama_get_logits_ith(self._context, -1)
        return int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One forward over (token, position, sequence, are its logits wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        code = self._llama.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode answered {code} to {len(rows)} rows")


def make_q4_0(source: str, target: str) -> None:
    """Write a GGUF file as llama.cpp quantises it to Q4_0, its head to Q8_0 where rows are no multiple of 256."""
    llama: Any = import_module("llama_cpp")
    params = llama.llama_model_quantize_default_params()
    params.ftype = llama.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    if llama.llama_model_quantize(source.encode(), target.encode(), params):
        sys.exit("llama_model_quantize failed")


ENGINES: dict[str, Any] = {"openvino-genai": OpenVINO, "llama-cpp-python": LlamaCpp}


class Worker:
    """Answers requests, one after the other, with the engine that the first one names."""

    def __init__(self) -> None:
        self._engine: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        call = request.pop("call")
        if call == "load":
            try:
                self._engine = ENGINES[request.pop("engine")](**request)
            except ModuleNotFoundError as error:
                return {"missing": str(error.name)}
            return dict(self._engine.about)
        seconds = getattr(self._engine, call)(**request)
        return {} if seconds is None else {"seconds": seconds}


def main() -> None:
    """Serve until stdin ends. Whatever the engines print goes to stderr, so that stdout holds nothing but replies."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    rested = process_time()
    for line in sys.stdin:
        idle = process_time() - rested
        try:
            reply = worker.answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        replies.write(json.dumps({**reply, "idle_seconds": idle}) + "\n")
        replies.flush()
        rested = process_time()


if __name__ == "__main__":
    if sys.argv[1:]:
        make_q4_0(*sys.argv[1:])
    else:
        main()
