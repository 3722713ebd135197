"""OutputProcessor: new tokens in, text deltas out. One StreamDecoder per sequence; stop strings; logprobs; timings.

Sole owner of what a request has been told so far. It asks the engine to end a sequence whose text has reached a stop
string, and sees to it that every request's last delta, whatever ended it, bears its one `Finished`. Knows no asyncio: a
request's deltas go to the `sink` it was opened with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from nanoserve.metrics import Metrics
from nanoserve.request import ChatPrompt, Delta, Finished, FinishReason, GraphUse, Request, Timings, TokenLogprob, Usage
from nanoserve.sequence import NewToken, Sequence
from nanoserve.tokens import StreamDecoder, Tokenizer

Sink = Callable[[Delta], None]
FinishSequence = Callable[[Sequence, FinishReason], None]


@dataclass(slots=True)
class Choice:
    """What one choice has been told, and what is still held back."""

    sequence: Sequence
    decoder: StreamDecoder
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    last_token_at: float | None = None


@dataclass(slots=True)
class OpenRequest:
    request: Request
    choices: list[Choice]
    sink: Sink
    submitted_at: float
    scheduled_at: float | None = None
    first_token_at: float | None = None
    error: str | None = None


class OutputProcessor:
    """The open requests of one engine. All calls come from the thread that commits steps."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        finish_sequence: FinishSequence,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._finish_sequence = finish_sequence
        self._metrics = metrics
        self._clock = clock
        self._open: dict[str, OpenRequest] = {}

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, request: Request, sequences: SequenceOf[Sequence], sink: Sink, submitted_at: float) -> None:
        """Begin to follow a request; `submitted_at` is when it arrived, by this processor's clock."""
        stops, continues = request.params.stop, not isinstance(request.prompt, ChatPrompt)
        choices = [
            Choice(sequence, StreamDecoder(self._tokenizer, stops, continues_text=continues)) for sequence in sequences
        ]
        self._open[request.request_id] = OpenRequest(request, choices, sink, submitted_at)

    def scheduled(self, sequences: Iterable[Sequence]) -> None:
        """These sequences are in the step about to run; the first time ends their request's wait in the queue."""
        now = self._clock()
        for sequence in sequences:
            state = self._open.get(sequence.request_id)
            if state is not None and state.scheduled_at is None:
                state.scheduled_at = now
                self._metrics.latency.queue_seconds.add(now - state.submitted_at)

    def deliver(self, tokens: Iterable[NewToken]) -> None:
        """Turn one step's tokens into deltas, one for each choice that has something to say."""
        now = self._clock()
        for new in tokens:
            state = self._open.get(new.sequence.request_id)
            if state is None:
                continue
            choice = state.choices[new.sequence.choice]
            if choice.reason is None:
                self._time_token(state, choice, now)
                self._take(state, choice, new)

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End what is left of a request; unknown and finished ids are ignored."""
        state = self._open.get(request_id)
        if state is None:
            return
        state.error = error
        for choice in state.choices:
            if choice.reason is None:
                self._finish_sequence(choice.sequence, reason)
                self._close_choice(state, choice, reason, choice.decoder.finish())

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        for request_id in list(self._open):
            self.end(request_id, reason, error)

    # --- one token -----------------------------------------------------------------------------------------

    def _take(self, state: OpenRequest, choice: Choice, new: NewToken) -> None:
        sequence = new.sequence
        choice.token_ids.append(new.token)
        if new.logprob is not None:
            choice.logprobs.append(self._logprob(new.token, new.logprob, new.top))
        stopped_by_token = sequence.finish_reason == "stop"
        text = "" if stopped_by_token else choice.decoder.push(new.token)
        if choice.decoder.stopped:
            self._finish_sequence(sequence, "stop")
            self._close_choice(state, choice, "stop", text)
        elif sequence.finish_reason is not None:
            text += choice.decoder.finish()
            # A complete stop string may have waited for one that began before it: it counts once nothing can follow.
            self._close_choice(state, choice, "stop" if choice.decoder.stopped else sequence.finish_reason, text)
        elif text:
            state.sink(self._delta(choice, text))

    def _logprob(self, token: int, logprob: float, top: tuple[tuple[int, float], ...] = ()) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token)
        alternatives = tuple(self._logprob(other, value) for other, value in top)
        return TokenLogprob(token, raw.decode("utf-8", "replace"), raw, logprob, alternatives)

    def _delta(self, choice: Choice, text: str, finished: Finished | None = None) -> Delta:
        delta = Delta(
            index=choice.sequence.choice,
            text=text,
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(choice.logprobs),
            finish_reason=choice.reason,
            finished=finished,
        )
        choice.token_ids.clear()
        choice.logprobs.clear()
        return delta

    def _time_token(self, state: OpenRequest, choice: Choice, now: float) -> None:
        latency = self._metrics.latency
        if state.first_token_at is None:
            state.first_token_at = now
            latency.ttft_seconds.add(now - state.submitted_at)
        if choice.last_token_at is not None:
            latency.inter_token_seconds.add(now - choice.last_token_at)
        choice.last_token_at = now

    # --- the end -------------------------------------------------------------------------------------------

    def _close_choice(self, state: OpenRequest, choice: Choice, reason: FinishReason, text: str) -> None:
        choice.reason = reason
        finished = self._close_request(state) if all(c.reason is not None for c in state.choices) else None
        state.sink(self._delta(choice, text, finished))

    def _close_request(self, state: OpenRequest) -> Finished:
        now = self._clock()
        del self._open[state.request.request_id]
        reasons = tuple(choice.reason for choice in state.choices if choice.reason is not None)
        if "cancelled" in reasons:
            self._metrics.counters.aborted += 1
        else:
            self._metrics.counters.finished += 1
        sequences = [choice.sequence for choice in state.choices]
        steps = sum(sequence.steps for sequence in sequences)
        scheduled_at = state.scheduled_at if state.scheduled_at is not None else now
        first_at = state.first_token_at
        return Finished(
            finish_reasons=reasons,
            usage=Usage(
                prompt_tokens=sequences[0].prompt_tokens,
                completion_tokens=sum(sequence.generated for sequence in sequences),
                # The first choice's: the others reuse what this request computed itself.
                cached_tokens=sequences[0].cached_tokens or 0,
            ),
            graph=GraphUse(
                steps=steps,
                replays=sum(sequence.replays for sequence in sequences),
                eager_steps=sum(sequence.eager_steps for sequence in sequences),
                mean_pad_rows=sum(sequence.pad_rows for sequence in sequences) / steps if steps else 0.0,
            ),
            timings=Timings(
                queue_seconds=scheduled_at - state.submitted_at,
                prefill_seconds=(first_at if first_at is not None else now) - scheduled_at,
                decode_seconds=now - first_at if first_at is not None else 0.0,
                ttft_seconds=first_at - state.submitted_at if first_at is not None else None,
            ),
            error=state.error,
        )
