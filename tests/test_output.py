"""OutputProcessor: text deltas, stop strings, true reasons, and one Finished for each request whatever ends it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.metrics import Metrics
from nanoserve.output import OutputProcessor
from nanoserve.request import (
    ChatPrompt,
    FinishReason,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from nanoserve.sequence import NewToken, Sequence
from tests.engines import Sink, sequence_of
from tests.fakes import ByteTokenizer

EOS = ByteTokenizer.EOS
CHAT = ChatPrompt(({"role": "user", "content": "hi"},))


class Desk:
    """An OutputProcessor, a hand-driven commit, and a clock."""

    def __init__(self, tokenizer: ByteTokenizer | None = None) -> None:
        self.now = 10.0
        self.metrics = Metrics("test")
        self.finished: list[tuple[Sequence, FinishReason]] = []
        self.outputs = OutputProcessor(
            cast(Any, tokenizer or ByteTokenizer()), self._finish, self.metrics, clock=lambda: self.now
        )

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.finished.append((sequence, reason))
        if sequence.finish_reason is None:
            sequence.finish_reason = reason

    def open(
        self, request_id: str = "r", *, prompt: Prompt = CHAT, max_tokens: int = 100, **params: Any
    ) -> tuple[list[Sequence], Sink]:
        request = Request(request_id, prompt, SamplingParams(**params))
        sequences = [
            sequence_of([1, 2, 3], max_tokens=max_tokens, choice=c, eos=frozenset({EOS}), request_id=request_id)
            for c in range(request.params.n)
        ]
        sink = Sink()
        self.outputs.open(request, sequences, sink, submitted_at=self.now)
        return sequences, sink

    def say(self, sequence: Sequence, *tokens: int, logprob: float | None = None, top: Any = ()) -> None:
        """Commit and deliver tokens one step at a time, as the step loop does."""
        for token in tokens:
            if sequence.finish_reason is not None:
                return
            sequence.tokens.append(token)
            sequence.finish_reason = sequence.reason_after(token)
            self.outputs.deliver([NewToken(sequence, token, logprob, top)])


def test_each_step_is_a_delta_when_each_token_prints() -> None:
    desk = Desk()
    (sequence,), sink = desk.open()
    desk.say(sequence, *b"Hi!", EOS)
    assert [delta.text for delta in sink.deltas] == ["H", "i", "!", ""]
    assert [delta.token_ids for delta in sink.deltas] == [(72,), (105,), (33,), (EOS,)]
    assert [delta.finish_reason for delta in sink.deltas] == [None, None, None, "stop"]
    finished = sink.deltas[-1].finished
    assert finished is not None
    assert (finished.finish_reasons, finished.usage.prompt_tokens, finished.usage.completion_tokens) == (
        ("stop",),
        3,
        4,
    )


def test_tokens_of_a_half_character_go_out_with_the_delta_that_completes_it() -> None:
    desk = Desk()
    (sequence,), sink = desk.open()
    desk.say(sequence, *"😊".encode())
    assert [(delta.text, len(delta.token_ids)) for delta in sink.deltas] == [("😊", 4)]


def test_sequence_is_ended_and_text_cut_when_a_stop_string_completes() -> None:
    desk = Desk()
    (sequence,), sink = desk.open(stop=("STOP",))
    desk.say(sequence, *b"one STOP two")
    assert desk.finished == [(sequence, "stop")]
    assert sink.text() == "one "
    assert (sink.deltas[-1].finish_reason, len(sink.finishes)) == ("stop", 1)
    assert bytes(sink.token_ids()) == b"one STOP"


@pytest.mark.parametrize(
    ("text", "stops", "reason", "shown"),
    [
        (b"value = STO", ("STOP",), "length", "value = STO"),
        (b"abcd", ("cd", "abcdef"), "stop", "ab"),
        (b"abcd", ("d",), "stop", "abc"),
    ],
    ids=["stop half begun", "stop complete but held for an earlier one", "stop in the last token"],
)
def test_reason_is_what_the_text_shows_when_max_tokens_ends_it(
    text: bytes, stops: tuple[str, ...], reason: FinishReason, shown: str
) -> None:
    desk = Desk()
    (sequence,), sink = desk.open(stop=stops, max_tokens=len(text))
    desk.say(sequence, *text)
    assert (sink.text(), sink.deltas[-1].finish_reason) == (shown, reason)
    finished = sink.deltas[-1].finished
    assert finished is not None
    assert finished.finish_reasons == (reason,)


@pytest.mark.parametrize(
    ("text", "stops", "shown"), [(b"value = STO", ("STOP",), "value = STO"), (b"abcd", ("cd", "abcdef"), "ab")]
)
@pytest.mark.parametrize("reason", ["cancelled", "timeout", "draining", "error"])
def test_reason_is_the_outer_one_when_a_request_is_ended_with_text_held_back(
    reason: FinishReason, text: bytes, stops: tuple[str, ...], shown: str
) -> None:
    desk = Desk()
    (sequence,), sink = desk.open(stop=stops)
    desk.say(sequence, *text)
    desk.outputs.end("r", reason, "why" if reason == "error" else None)
    assert desk.finished == [(sequence, reason)]
    assert (sink.text(), sink.deltas[-1].finish_reason) == (shown, reason)
    finished = sink.deltas[-1].finished
    assert finished is not None
    assert finished.error == ("why" if reason == "error" else None)


@pytest.mark.parametrize(
    ("prompt", "kept"), [(CHAT, False), (TextPrompt("The capital of"), True), (TokenPrompt((1,)), True)]
)
def test_leading_space_is_dropped_only_when_the_answer_begins_a_message(prompt: Prompt, kept: bool) -> None:
    desk = Desk(ByteTokenizer(pieces=(b" Paris",), strips_leading_space=True))
    (sequence,), sink = desk.open(prompt=prompt)
    desk.say(sequence, 258, EOS)
    assert sink.text() == (" Paris" if kept else "Paris")


def test_stop_token_prints_nothing_when_its_bytes_are_text() -> None:
    desk = Desk()
    (sequence,), sink = desk.open()
    sequence.stop_token_ids = frozenset({ord("!")})
    desk.say(sequence, *b"no!")
    assert (sink.text(), sink.deltas[-1].finish_reason) == ("no", "stop")
    assert sink.token_ids() == list(b"no!")


def test_choices_end_one_by_one_and_the_request_with_the_last() -> None:
    desk = Desk()
    (first, second), sink = desk.open(n=2)
    desk.say(first, *b"a", EOS)
    assert sink.finishes == []
    desk.say(second, *b"bb", EOS)
    assert sink.text(0) == "a"
    assert sink.text(1) == "bb"
    (last,) = sink.finishes
    assert last is sink.deltas[-1]
    assert last.finished is not None
    assert last.finished.usage.completion_tokens == 5
    assert last.finished.finish_reasons == ("stop", "stop")
    assert "r" not in desk.outputs


def test_reasons_are_told_apart_when_one_choice_ended_before_the_abort() -> None:
    desk = Desk()
    (first, second), sink = desk.open(n=2)
    desk.say(first, EOS)
    desk.say(second, *b"b")
    desk.outputs.end("r", "cancelled")
    assert desk.finished == [(second, "cancelled")]
    (last,) = sink.finishes
    assert last.finished is not None
    assert last.finished.finish_reasons == ("stop", "cancelled")
    assert (desk.metrics.counters.aborted, desk.metrics.counters.finished) == (1, 0)


def test_second_end_and_late_tokens_are_ignored_when_a_request_is_over() -> None:
    desk = Desk()
    (sequence,), sink = desk.open()
    desk.outputs.end("r", "cancelled")
    desk.outputs.end("r", "timeout")
    desk.outputs.end("never seen", "cancelled")
    desk.outputs.deliver([NewToken(sequence, 65)])
    assert len(sink.deltas) == len(sink.finishes) == 1
    assert sink.deltas[0].finish_reason == "cancelled"
    assert desk.metrics.counters.aborted == 1


def test_late_token_of_an_ended_choice_is_ignored_when_its_sibling_still_runs() -> None:
    desk = Desk()
    (first, second), sink = desk.open(n=2, stop=("!",))
    desk.say(first, *b"a!")
    desk.outputs.deliver([NewToken(first, ord("z"))])
    desk.say(second, *b"b", EOS)
    assert (sink.text(0), sink.text(1)) == ("a", "b")
    assert [delta.finish_reason for delta in sink.deltas if delta.index == 0 and delta.finish_reason] == ["stop"]


def test_everyone_is_told_when_all_are_ended() -> None:
    desk = Desk()
    sinks = [desk.open(str(number), n=2)[1] for number in range(3)]
    desk.outputs.end_all("error", "the device is on fire")
    for sink in sinks:
        (last,) = sink.finishes
        assert last.finished is not None
        assert last.finished.error == "the device is on fire"
    assert desk.outputs.open_requests == 0
    assert desk.metrics.counters.finished == 3


def test_timings_add_up_when_the_clock_moves_between_stages() -> None:
    desk = Desk()
    (sequence,), sink = desk.open()
    desk.now += 2.0
    desk.outputs.scheduled([sequence])
    desk.now += 3.0
    desk.outputs.scheduled([sequence])
    desk.say(sequence, *b"a")
    desk.now += 0.5
    desk.say(sequence, *b"b")
    desk.now += 0.25
    desk.say(sequence, EOS)
    finished = sink.deltas[-1].finished
    assert finished is not None
    timings = finished.timings
    assert (timings.queue_seconds, timings.prefill_seconds, timings.decode_seconds) == (2.0, 3.0, 0.75)
    assert timings.ttft_seconds == 5.0
    latency = desk.metrics.latency
    assert latency.queue_seconds.percentiles()["count"] == 1
    assert latency.ttft_seconds.percentiles()["p50"] == 5.0
    assert latency.inter_token_seconds.percentiles() == {"p50": 0.25, "p90": 0.5, "p99": 0.5, "count": 2}


def test_timings_are_true_when_a_request_ends_in_the_queue() -> None:
    desk = Desk()
    _, sink = desk.open()
    desk.now += 7.0
    desk.outputs.end("r", "timeout")
    finished = sink.deltas[-1].finished
    assert finished is not None
    assert finished.timings.queue_seconds == 7.0
    assert (finished.timings.prefill_seconds, finished.timings.decode_seconds) == (0.0, 0.0)
    assert finished.timings.ttft_seconds is None
    assert (finished.usage.completion_tokens, finished.graph.steps, finished.graph.mean_pad_rows) == (0, 0, 0.0)


def test_graph_use_is_the_sum_over_choices() -> None:
    desk = Desk()
    (first, second), sink = desk.open(n=2)
    first.steps, first.replays, first.eager_steps, first.pad_rows = 5, 4, 1, 3
    second.steps, second.replays, second.eager_steps, second.pad_rows = 3, 1, 2, 1
    desk.outputs.end("r", "cancelled")
    finished = sink.deltas[-1].finished
    assert finished is not None
    graph = finished.graph
    assert (graph.steps, graph.replays, graph.eager_steps, graph.mean_pad_rows) == (8, 5, 3, 0.5)


def test_logprobs_carry_bytes_and_alternatives_when_asked_for() -> None:
    desk = Desk()
    (sequence,), sink = desk.open(logprobs=2)
    desk.say(sequence, 0xC3, logprob=-0.5, top=((0xC3, -0.5), (65, -1.0)))
    desk.say(sequence, 0xA9, logprob=-0.25)
    (delta,) = sink.deltas
    assert delta.text == "é"
    first, second = delta.logprobs
    assert (first.token_id, first.raw, first.text, first.logprob) == (0xC3, b"\xc3", "\ufffd", -0.5)
    assert [(entry.token_id, entry.text, entry.logprob) for entry in first.top] == [
        (0xC3, "\ufffd", -0.5),
        (65, "A", -1.0),
    ]
    assert (second.raw, second.top) == (b"\xa9", ())


@given(
    st.binary(max_size=30),
    st.lists(st.sampled_from(["a", "ab", "bca", "é", "\n\n"]), max_size=2).map(tuple),
    st.sampled_from(["eos", "length", "cancelled"]),
)
def test_deltas_join_to_text_tokens_and_one_finish_whatever_ends_a_request(
    raw: bytes, stops: tuple[str, ...], end: str
) -> None:
    desk = Desk()
    (sequence,), sink = desk.open(stop=stops, max_tokens=len(raw) if end == "length" and raw else 100)
    desk.say(sequence, *raw)
    if end == "eos":
        desk.say(sequence, EOS)
    desk.outputs.end("r", "cancelled")
    text = raw.decode("utf-8", "replace")
    cuts = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    assert sink.text() == (text[: min(cuts)] if cuts else text)
    assert sink.token_ids() == sequence.output_ids
    assert len(sink.finishes) == 1
    assert sink.deltas[-1].finished is not None
    reason = sink.deltas[-1].finish_reason
    if end == "length" and raw:
        assert reason == ("stop" if cuts else "length")
    elif end == "eos":
        assert reason == "stop"
    else:
        assert reason in (("stop", "cancelled") if cuts else ("cancelled",))
