"""LLM: the offline API on a tiny model folder, weights, tokenizer and template included."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from nanoserve import LLM, SamplingParams, stepper
from nanoserve.errors import ContextLengthExceeded, InvalidRequest, ModelUnavailable
from nanoserve.sequence import StepPlan
from tests.tiny_engine import NATIVE, tiny_config
from tests.tiny_folder import write_served_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module", params=[{}, NATIVE], ids=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Steps that run in their caller, and steps that run beside it."""
    return cast(dict[str, Any], request.param)


@pytest.fixture(scope="module")
def llm(folder: Path, kernels: dict[str, Any]) -> LLM:
    return LLM(config=tiny_config(folder, blocks=5 if kernels else 10, **kernels))  # of bf16, twice as many fit


@pytest.fixture(autouse=True)
def nothing_is_left_running(llm: LLM) -> Any:
    yield
    gauges = llm.metrics.gauges
    assert (gauges.running, gauges.waiting, gauges.blocks_used) == (0, 0, 0)


def text_of(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> str:
    (output,) = llm.generate([prompt], params, progress=False)
    return output.text


def test_prompts_may_be_text_ids_one_or_many(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    by_text, by_ids = llm.generate("hello", GREEDY), llm.generate(ids, GREEDY)
    several = llm.generate(["hello", ids], GREEDY)
    assert {output.text for output in (*by_text, *by_ids, *several)} == {text_of(llm, "hello")}
    assert llm.generate([], GREEDY) == []


def test_results_are_whole_and_in_the_order_of_the_prompts_when_lengths_differ(llm: LLM) -> None:
    prompts = [chr(ord("a") + n) * (1 + 7 * (n % 5)) for n in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + n, ignore_eos=True, n=1 + n % 2) for n in range(20)]
    outputs = llm.generate(prompts, params, progress=False)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.text == text_of(llm, prompt, param)
        assert [choice.index for choice in output.outputs] == list(range(param.n))
        for choice in output.outputs:
            assert (len(choice.token_ids), choice.finish_reason) == (param.max_tokens, "length")
            assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert output.finished is not None
        assert output.finished.usage.prompt_tokens == len(prompt)
        assert output.finished.usage.completion_tokens == (param.max_tokens or 0) * param.n
    assert llm.metrics.counters.preempted > 0, "the pool holds less than the batch"


def test_chat_is_generate_on_the_rendered_conversation(llm: LLM) -> None:
    (rendered,) = llm.generate(llm.tokenizer.render_chat(HELLO), GREEDY)
    (single,) = llm.chat(HELLO, GREEDY)
    first, second = llm.chat([HELLO, [*HELLO, {"role": "assistant", "content": "x"}]], GREEDY, progress=False)
    assert single.text == rendered.text == first.text
    assert second.finished is not None
    assert second.finished.usage.prompt_tokens > 20


def test_text_ends_before_a_stop_string_when_the_model_says_it(llm: LLM) -> None:
    whole = text_of(llm, "hello")
    stop = next(character for character in whole[3:] if character != "\ufffd")
    (output,) = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop,)))
    assert output.text == whole[: whole.index(stop)]
    assert output.outputs[0].finish_reason == "stop"


def test_logprobs_are_there_for_each_token_when_asked_for(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2))
    choice = output.outputs[0]
    assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
    assert all(len(entry.top) == 2 and entry.top[0].token_id == entry.token_id for entry in choice.logprobs)


def test_defaults_come_from_the_model_when_no_params_are_given(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 7}')
    llm = LLM(config=tiny_config(folder))
    params = llm.default_params(max_tokens=3)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 7, 3)
    assert llm.max_model_len == 96


def test_stream_equals_generate_when_read_to_the_end(llm: LLM) -> None:
    (whole,) = llm.chat(HELLO, GREEDY)
    pieces = list(llm.stream_chat(HELLO, GREEDY))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1


def test_generation_ends_when_a_stream_is_left_early(llm: LLM) -> None:
    stream = cast(Any, llm.stream_chat(HELLO, GREEDY))
    next(stream)
    assert llm.metrics.gauges.running == 1
    stream.close()
    assert llm.metrics.gauges.running == 0


def test_streams_do_not_mix_when_two_are_read_in_turns_and_a_batch_runs_between(llm: LLM) -> None:
    other = [{"role": "user", "content": "something else"}]
    wanted = ["".join(llm.stream_chat(messages, GREEDY)) for messages in (HELLO, other)]
    streams = [llm.stream_chat(messages, GREEDY) for messages in (HELLO, other)]
    texts = ["", ""]
    for index in (0, 1, 1, 0, 0, 1):
        texts[index] += next(streams[index])
    batch = text_of(llm, "hello")
    for index in (1, 0):
        texts[index] += "".join(streams[index])
    assert texts == wanted
    assert batch == text_of(llm, "hello")


@pytest.mark.parametrize(
    ("prompts", "params", "error"),
    [
        (["fine", "x" * 200], GREEDY, ContextLengthExceeded),
        (["fine", [2**40]], GREEDY, InvalidRequest),
        (["fine", ""], GREEDY, InvalidRequest),
        (["fine"], SamplingParams(n=0), InvalidRequest),
        (["fine", "also"], [GREEDY], ValueError),
    ],
    ids=["too long", "no such token", "empty", "no choices", "params do not match"],
)
def test_nothing_runs_when_one_prompt_of_a_batch_is_refused(
    llm: LLM, prompts: list[Any], params: Any, error: type[Exception]
) -> None:
    before = llm.metrics.counters.generated_tokens
    with pytest.raises(error):
        llm.generate(prompts, params, progress=False)
    assert llm.metrics.counters.generated_tokens == before


class InterruptedRunner:
    """Stands before a runner and raises at the end of one step, as Ctrl-C may."""

    def __init__(self, runner: Any, at: int) -> None:
        self._runner = runner
        self._left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: StepPlan) -> Any:
        return self._end(self._runner.run(plan))

    def finish(self, step: Any) -> Any:
        return self._end(self._runner.finish(step))

    def _end(self, outcome: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return outcome


@pytest.mark.parametrize("at", [1, 2, 5])
def test_model_can_be_used_again_when_a_batch_was_interrupted(folder: Path, kernels: dict[str, Any], at: int) -> None:
    llm = LLM(config=tiny_config(folder, **kernels))
    wanted = text_of(llm, "hello")
    engine = llm._engine
    runner = engine.runner
    engine.runner = cast(Any, InterruptedRunner(runner, at))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "x" * 40, "something else"], GREEDY, progress=False)
    engine.runner = runner
    engine.check()
    assert llm.metrics.gauges.running == llm.metrics.gauges.waiting == 0
    assert text_of(llm, "hello") == wanted


def interrupt_at(line: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that raises before the `line`th line of the stepper is run, whatever calls it."""
    left = line

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return step

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return step if frame.f_code.co_filename == stepper.__file__ else None

    return call


def test_model_can_be_used_again_wherever_in_a_step_an_interrupt_fell(folder: Path, kernels: dict[str, Any]) -> None:
    llm = LLM(config=tiny_config(folder, **kernels))
    params = replace(GREEDY, max_tokens=4)
    wanted = text_of(llm, "hello", params)
    for line in range(1, 1000):
        sys.settrace(interrupt_at(line))
        try:
            llm.generate(["hello", "x" * 40], params, progress=False)
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        finally:
            sys.settrace(None)
        gauges = llm.metrics.gauges
        assert (gauges.running, gauges.waiting, gauges.blocks_used) == (0, 0, 0)
        llm._engine.check()
        assert text_of(llm, "hello", params) == wanted
        if not interrupted:
            break
    assert 30 < line < 999, "every line of some steps"


def test_nothing_of_a_model_is_left_when_it_is_dropped(folder: Path, kernels: dict[str, Any]) -> None:
    """Also where all of it is one cycle, whose parts are finalized in any order."""
    llm = LLM(config=tiny_config(folder, **kernels))
    stream = llm.stream_chat(HELLO, GREEDY)
    next(stream)
    graphs = llm._engine.runner.graphs
    pools = [cast(Any, graphs).backend._pool._end] if kernels else []
    llm.itself = llm  # type: ignore[attr-defined]
    dropped = weakref.ref(llm), weakref.ref(llm._stepper), weakref.ref(llm._engine)
    gc.unfreeze()  # what the boot froze would never be collected
    del llm, stream, graphs
    gc.collect()
    gc.collect()
    assert [each() for each in dropped] == [None, None, None]
    assert not any(threads.alive for threads in pools)


def test_model_argument_is_refused_in_one_line_when_there_is_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable):
        LLM(str(tmp_path / "nothing here"))


def test_only_the_shapes_of_a_batch_are_recorded_when_no_config_is_given(folder: Path) -> None:
    llm = LLM(str(folder), kernels="reference", max_model_len=96, width_multiple=32, threads=1)
    assert llm.metrics.snapshot()["graphs"]["captured"] == 0
    assert text_of(llm, "hello") != ""
    assert llm.metrics.snapshot()["graphs"]["captured"] == 1
