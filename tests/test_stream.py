"""RequestStream: nothing lost, merged per choice when the reader is slow, the finish last."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nanoserve.request import Delta, Finished, GraphUse, Timings, TokenLogprob, Usage
from nanoserve.stream import RequestStream, merge

FINISHED = Finished(("stop",), Usage(1, 1), GraphUse(0, 0, 0, 0.0), Timings(0, 0, 0, None))


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 10))


async def drain(stream: RequestStream) -> list[Delta]:
    return [delta async for delta in stream]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_text_is_whole_and_the_finish_is_last_when_the_reader_reads_at_any_pace(
    moves: list[tuple[int, bool]],
) -> None:
    """Each move pushes a delta of a choice and says whether the reader gets a turn."""

    async def main() -> None:
        stream = RequestStream("r", 1)
        reader = asyncio.create_task(drain(stream))
        said = dict.fromkeys(range(4), "")
        for number, (index, pause) in enumerate(moves):
            stream.push(Delta(index, f"{number},", (number,)))
            said[index] += f"{number},"
            if pause:
                await asyncio.sleep(0)
        for index in range(4):
            stream.push(Delta(index, "", finish_reason="stop", finished=FINISHED if index == 3 else None))
        deltas = await reader
        for index in range(4):
            mine = [delta for delta in deltas if delta.index == index]
            assert "".join(delta.text for delta in mine) == said[index]
            assert [t for delta in mine for t in delta.token_ids] == [n for n, (i, _) in enumerate(moves) if i == index]
            assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["stop"]
        assert [delta.finished is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]

    run(main())


def test_deltas_merge_per_choice_when_nobody_reads() -> None:
    async def main() -> None:
        stream = RequestStream("r", 1)
        for number in range(1000):
            stream.push(Delta(number % 2, "ab"[number % 2], (number,)))
        stream.push(Delta(0, "", finish_reason="length"))
        stream.push(Delta(1, "", finish_reason="stop", finished=FINISHED))
        first, second = await drain(stream)
        assert (first.text, len(first.token_ids), first.finish_reason) == ("a" * 500, 500, "length")
        assert (second.text, second.finish_reason, second.finished) == ("b" * 500, "stop", FINISHED)

    run(main())


def test_finish_comes_after_other_choices_when_its_choice_has_the_lowest_index() -> None:
    async def main() -> None:
        stream = RequestStream("r", 1)
        stream.push(Delta(1, "x", finish_reason="stop"))
        stream.push(Delta(0, "y", finish_reason="stop", finished=FINISHED))
        assert [delta.index for delta in await drain(stream)] == [1, 0]

    run(main())


def test_merge_keeps_every_part_in_order() -> None:
    entries = [TokenLogprob(n, "t", b"t", -0.5) for n in range(2)]
    merged = merge([Delta(2, "a", (1,), (entries[0],)), Delta(2, "b", (2, 3), (entries[1],), "stop", FINISHED)])
    assert merged == Delta(2, "ab", (1, 2, 3), tuple(entries), "stop", FINISHED)
