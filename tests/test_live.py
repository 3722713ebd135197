"""LiveFeed and EngineThread: nobody slows the loop down, and nothing is lost on the way between the two threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from nanoserve.engine_thread import EngineThread
from nanoserve.live import BACKLOG, LiveFeed


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 10))


def test_every_subscriber_gets_every_event_when_it_keeps_up() -> None:
    async def main() -> None:
        feed = LiveFeed()
        assert not feed.has_subscribers
        both = [feed.subscribe({"n": -1}), feed.subscribe()]
        assert await anext(both[0]) == {"n": -1}
        second = asyncio.ensure_future(anext(both[1]))
        await asyncio.sleep(0)
        assert feed.has_subscribers
        feed.publish({"n": 0})
        assert [await anext(both[0]), await second] == [{"n": 0}, {"n": 0}]
        for subscription in both:
            await subscription.aclose()
        assert not feed.has_subscribers

    run(main())


def test_slow_subscriber_loses_the_oldest_and_slows_nobody() -> None:
    async def main() -> None:
        feed = LiveFeed()
        slow = feed.subscribe({"n": "first"})
        await anext(slow)
        for number in range(BACKLOG + 10):
            feed.publish({"n": number})
        feed.close()
        seen = [event["n"] async for event in slow]
        assert seen == list(range(11, BACKLOG + 10)), "the end takes a place of the backlog too"

    run(main())


def test_subscription_ends_when_the_feed_is_closed() -> None:
    async def main() -> None:
        feed = LiveFeed()
        subscription = feed.subscribe({"n": 0})
        await anext(subscription)
        feed.close()
        assert [event async for event in subscription] == []
        assert not feed.has_subscribers

    run(main())


def test_jobs_run_in_order_on_one_daemon_thread_and_not_on_the_loops() -> None:
    async def main() -> None:
        thread = EngineThread()
        where = await asyncio.gather(*(thread.submit(lambda n: (n, threading.current_thread()), n) for n in range(20)))
        assert [n for n, _ in where] == list(range(20))
        (worker,) = {worker for _, worker in where}
        assert worker is not threading.current_thread()
        assert worker.daemon
        thread.stop()
        worker.join(5)
        assert not worker.is_alive()

    run(main())


def test_error_of_a_job_reaches_its_waiter_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise KeyError("lost")

    async def main() -> None:
        thread = EngineThread()
        with pytest.raises(KeyError, match="lost"):
            await thread.submit(fail)
        assert await thread.submit(lambda: 7) == 7
        thread.stop()

    run(main())


def test_nothing_is_raised_when_the_waiter_or_the_loop_is_gone() -> None:
    """A cancelled waiter, and a loop that ends during a job: as at shutdown."""
    done = threading.Event()

    def late(thread: EngineThread) -> None:
        time.sleep(0.1)
        thread.call_soon(print)
        done.set()

    async def main() -> None:
        thread = EngineThread()
        waiter = thread.submit(time.sleep, 0.02)
        waiter.cancel()
        assert await thread.submit(lambda: 1) == 1
        thread.submit(late, thread)
        thread.stop()

    run(main())
    assert done.wait(30)


def test_loop_keeps_turning_when_a_job_computes() -> None:
    async def main() -> None:
        thread = EngineThread()
        turned = threading.Event()
        job = thread.submit(turned.wait, 30)
        for _ in range(5):
            await asyncio.sleep(0.001)
        turned.set()
        assert await job, "the loop turned while the job waited for it"
        thread.stop()

    run(main())
