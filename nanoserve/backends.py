"""How a program is recorded on a device: the graph backends. `graphs.GraphSet` uses one; nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


class EagerBackend:
    """Any device: the recording is the call itself, with the arguments it was made on; a replay calls again."""

    name = "eager"

    def record(self, program: Callable[[], T]) -> Callable[[], T]:
        program()
        return program

    def run(self, replays: Sequence[Callable[[], T]]) -> list[T]:
        return [replay() for replay in replays]

    def arena_bytes(self) -> int | None:
        return 0


class CudaBackend:
    """torch.cuda.graph on a side stream, every recording in the pool of the first one.

    Record the biggest shape first: the pool is then allocated once, at its final size. What `program` returns are the
    graph's own output tensors, overwritten by every replay.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, program: Callable[[], T]) -> Callable[[], T]:
        # Libraries choose and allocate their workspaces at the first call, which a capture must not contain.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            program()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = program()

        def replay() -> T:
            graph.replay()
            return output

        return replay

    def run(self, replays: Sequence[Callable[[], T]]) -> list[T]:
        return [replay() for replay in replays]

    def arena_bytes(self) -> int | None:
        """Bytes of the private pool's segments."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        pools = [s for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self._pool)]
        return sum(int(segment["total_size"]) for segment in pools)
