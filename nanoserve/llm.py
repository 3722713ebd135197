"""LLM: the offline API. The same engine, scheduler and text path as the server's, stepped by the caller's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from tqdm import tqdm

from nanoserve import __version__
from nanoserve.boot import BootProgress
from nanoserve.build import build_engine
from nanoserve.config import EngineConfig
from nanoserve.metrics import Metrics
from nanoserve.output import OutputProcessor
from nanoserve.request import (
    ChatPrompt,
    Delta,
    Finished,
    FinishReason,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)
from nanoserve.sequence import NewToken, StepPlan
from nanoserve.stepper import Stepper

Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class CompletionOutput:
    """One choice's answer. `token_ids` includes a stop token that prints nothing."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt's answers: `n` of them, and what they took."""

    outputs: list[CompletionOutput]
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text


class LLM:
    """A loaded model. `LLM("smollm2-135m").generate(["Once upon a time"])`.

    model   a folder, a .gguf file, a hub id or a short name
    config  an EngineConfig instead; other keyword arguments are its fields. Without one nothing is warmed
            (`warmup_seconds=0`): nobody waits at a door, so a batch records the shapes it meets and no others
    Raises StartupError if the model cannot be loaded.
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None, **fields: Any) -> None:
        base = config or EngineConfig(warmup_seconds=0.0)
        if model is not None:
            fields["model"] = model
        self._config = replace(base, **fields)
        self.metrics = Metrics(__version__)
        booted = build_engine(self._config, self.metrics, _ignore)
        self._booted = booted
        self._engine = booted.engine
        self._stepper = Stepper(booted.engine)
        self._outputs = OutputProcessor(booted.intake.tokenizer, booted.engine.finish, self.metrics)
        self._ids = count()
        self._undelivered: list[NewToken] = []

    @property
    def tokenizer(self) -> Any:
        return self._booted.intake.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._booted.intake.max_model_len

    def default_params(self, **fields: Any) -> SamplingParams:
        """The model's own sampling defaults, with `fields` on top."""
        return SamplingParams(**{**self._booted.sampling_defaults, **fields})

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids). Results are in the order of the prompts.

        `params` is one for all or one for each; None: the model's defaults. Raises ClientError before anything runs if
        a prompt cannot be served.
        """
        batch = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else prompts
        return self._run([_prompt(prompt) for prompt in batch], params, progress)  # type: ignore[arg-type]

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        batch: Any = [conversations] if single else conversations
        prompts = [ChatPrompt(tuple(dict(message) for message in messages)) for messages in batch]
        return self._run(prompts, params, progress)

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one conversation, text by text. Leaving the iteration early ends the generation."""
        deltas: list[Delta] = []
        prompt = ChatPrompt(tuple(dict(message) for message in messages))
        request = self._submit(prompt, params or self.default_params(), deltas.append)
        try:
            while request.request_id in self._outputs:
                self._step()
                for delta in deltas:
                    yield delta.text
                deltas.clear()
        finally:
            self._end([request])

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, progress: bool
    ) -> list[RequestOutput]:
        each = list(params) if isinstance(params, Sequence) else [params or self.default_params()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling params for {len(prompts)} prompts; pass one, or one for each")
        results = [RequestOutput([CompletionOutput(i) for i in range(p.n)]) for p in each]
        requests: list[Request] = []
        with tqdm(total=len(prompts), desc="generating", unit="prompt", disable=not progress) as bar:
            try:
                for prompt, param, result in zip(prompts, each, results, strict=True):
                    requests.append(self._submit(prompt, param, _Collector(result, bar)))
                unfinished = deque(requests)
                while unfinished:
                    if unfinished[0].request_id in self._outputs:
                        self._step()
                    else:
                        unfinished.popleft()
            finally:
                self._end(requests)
        return results

    def _step(self) -> None:
        """Run one step and deliver the one before meanwhile, in the server's order.

        An interrupt leaves an LLM that can be used again: the step it fell into is as if it had not been planned.
        """
        self._undelivered = self._stepper.step(self._deliver)

    def _deliver(self, plan: StepPlan | None) -> None:
        undelivered, self._undelivered = self._undelivered, []
        if plan is not None:
            self._outputs.scheduled(plan.chunk_sequences)
        self._outputs.deliver(undelivered)

    def _end(self, requests: Iterable[Request]) -> None:
        """End what is left of `requests`, and the step that was started for them."""
        for request in requests:
            self._outputs.end(request.request_id, "cancelled")
        self._deliver(None)
        self._undelivered = self._stepper.rest()

    def _submit(self, prompt: Prompt, params: SamplingParams, sink: Any) -> Request:
        request = Request(f"offline-{next(self._ids)}", prompt, params)
        sequences = self._booted.intake.sequences(request)
        self._outputs.open(request, sequences, sink, time.monotonic())
        for sequence in sequences:
            self._engine.add(sequence)
        return request


class _Collector:
    """Adds one request's deltas up."""

    def __init__(self, result: RequestOutput, bar: Any) -> None:
        self._result = result
        self._bar = bar

    def __call__(self, delta: Delta) -> None:
        output = self._result.outputs[delta.index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs
        output.finish_reason = delta.finish_reason or output.finish_reason
        if delta.finished is not None:
            self._result.finished = delta.finished
            self._bar.update()


def _prompt(prompt: str | Sequence[int]) -> Prompt:
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt))


def _ignore(progress: BootProgress) -> None:
    """Offline there is nobody to report to but the progress bar."""
