"""The generations of one client request, as one stream of deltas with one end.

Several prompts make several generations; their choices are numbered through, and what their terminal records say is
added up. Whoever opens a Submission closes it: closing aborts what has not ended, which is how a client that went away
gives its blocks back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import TracebackType

from nanoserve.request import Delta, Finished, GraphUse, Request, Timings, Usage
from server.seam import Engine, Generation


class Submission:
    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._generations: list[Generation] = []

    async def submit(self) -> None:
        """Hand all requests to the engine. Raises what `Engine.submit` raises; nothing is left behind then."""
        try:
            for request in self._requests:
                self._generations.append(await self._engine.submit(request))
        except BaseException:
            self.close()
            raise

    @property
    def prompt_tokens(self) -> int:
        return sum(generation.prompt_tokens for generation in self._generations)

    def close(self) -> None:
        """Abort what has not ended."""
        for request in self._requests:
            self._engine.abort(request.request_id)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Every delta, `index` counted over all prompts; only the very last one bears `finished`."""
        if len(self._generations) == 1:
            async for delta in self._generations[0]:
                yield delta
            return
        finished: dict[int, Finished] = {}
        merged: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(maxsize=1)
        pumps = [asyncio.create_task(_pump(i, generation, merged)) for i, generation in enumerate(self._generations)]
        try:
            while len(finished) < len(self._generations):
                position, item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                end = item.finished
                if end is not None:
                    finished[position] = end
                    complete = len(finished) == len(self._generations)
                    end = combine([finished[i] for i in range(len(finished))]) if complete else None
                index = position * self._requests[0].params.n + item.index
                yield replace(item, index=index, finished=end)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    async def __aenter__(self) -> Submission:
        await self.submit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _pump(position: int, generation: Generation, merged: asyncio.Queue[tuple[int, Delta | Exception]]) -> None:
    try:
        async for delta in generation:
            await merged.put((position, delta))
    except Exception as error:
        await merged.put((position, error))


def combine(parts: Sequence[Finished]) -> Finished:
    """One record for several prompts: sums of counts, the longest of times, pad rows averaged over steps."""
    steps = sum(part.graph.steps for part in parts)
    first_tokens = [part.timings.ttft_seconds for part in parts if part.timings.ttft_seconds is not None]
    return Finished(
        finish_reasons=tuple(reason for part in parts for reason in part.finish_reasons),
        usage=Usage(
            prompt_tokens=sum(part.usage.prompt_tokens for part in parts),
            completion_tokens=sum(part.usage.completion_tokens for part in parts),
            cached_tokens=sum(part.usage.cached_tokens for part in parts),
        ),
        graph=GraphUse(
            steps=steps,
            replays=sum(part.graph.replays for part in parts),
            eager_steps=sum(part.graph.eager_steps for part in parts),
            mean_pad_rows=sum(part.graph.mean_pad_rows * part.graph.steps for part in parts) / max(steps, 1),
        ),
        timings=Timings(
            queue_seconds=max(part.timings.queue_seconds for part in parts),
            prefill_seconds=max(part.timings.prefill_seconds for part in parts),
            decode_seconds=max(part.timings.decode_seconds for part in parts),
            ttft_seconds=min(first_tokens, default=None),
        ),
        error=next((part.error for part in parts if part.error is not None), None),
    )
