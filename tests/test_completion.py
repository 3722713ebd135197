"""The descriptor through which compute threads wake the event loop."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from nanoserve.completion import Completion


@pytest.mark.parametrize("eventfd", [True, False], ids=["eventfd", "pipe"])
def test_waiter_wakes_when_a_thread_writes(eventfd: bool) -> None:
    async def main() -> int:
        completion, woken = Completion(eventfd=eventfd), 0
        try:
            while woken < 20:
                writer = threading.Thread(target=os.write, args=(completion.write_fd, (1).to_bytes(8, "little")))
                writer.start()
                await asyncio.wait_for(completion.wait(), 5)
                writer.join()
                woken += 1
        finally:
            completion.close()
        return woken

    assert asyncio.run(main()) == 20


def test_waiter_sleeps_when_nothing_was_written_since() -> None:
    async def main() -> None:
        completion = Completion()
        try:
            os.write(completion.write_fd, (1).to_bytes(8, "little"))
            await completion.wait()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(completion.wait(), 0.05)
        finally:
            completion.close()

    asyncio.run(main())


@pytest.mark.parametrize("eventfd", [True, False], ids=["eventfd", "pipe"])
def test_every_end_is_waited_for_when_two_were_told_at_once(eventfd: bool) -> None:
    async def main() -> list[bool]:
        completion = Completion(eventfd=eventfd)
        try:
            for _ in range(2):
                os.write(completion.write_fd, (1).to_bytes(8, "little"))
            await asyncio.sleep(0.01)
            return [await completion.wait(), await completion.wait(0.01), await completion.wait(0.01)]
        finally:
            completion.close()

    assert asyncio.run(main()) == [True, True, False]


def test_waiter_gives_up_in_time_and_finds_the_end_later() -> None:
    async def main() -> list[bool]:
        completion = Completion()
        try:
            early = await completion.wait(0.01)
            os.write(completion.write_fd, (1).to_bytes(8, "little"))
            return [early, await completion.wait(0.0) or await completion.wait()]
        finally:
            completion.close()

    assert asyncio.run(main()) == [False, True]
