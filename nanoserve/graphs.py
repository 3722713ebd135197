"""GraphSet: the recorded programs, by GraphKey, and their counters. Sole owner of both.

A graph is a program bound to addresses: replaying it runs the whole forward on whatever the step buffers hold then. The
set knows how to record, replay and count; which keys exist, and when they are recorded, is decided above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from nanoserve.buckets import DecodePlan, GraphKey, PagedPlan
from nanoserve.errors import GateError
from nanoserve.gates import check_replay_rows

__all__ = ["GraphBackend", "GraphEntry", "GraphKey", "GraphSet", "Origin", "RecordingTime"]

Origin = Literal["warm", "cold", "background"]
T = TypeVar("T")


class GraphBackend(Protocol):
    """How programs are recorded on a device (`nanoserve.backends`)."""

    name: str

    def record(self, program: Callable[[], T]) -> Callable[[], T]:
        """Run `program` once and return what replays it; every replay returns its like."""

    def run(self, replays: Sequence[Callable[[], T]]) -> list[T]:
        """Replay several recordings, in order, as cheaply as the device can; what each returns."""

    def arena_bytes(self) -> int | None:
        """Bytes the recordings hold beside weights and pool; None where the backend does not know."""


@runtime_checkable
class StartingBackend(Protocol):
    """A backend whose replays run on threads of its own."""

    def start(self, replays: Sequence[Callable[[], T]], notify_fd: int) -> None:
        """Start them, in order, once what was started before is over, and return; 8 bytes are written to `notify_fd` at
        the end."""

    def outputs(self, replays: Sequence[Callable[[], T]]) -> list[T]:
        """Where each leaves its results."""

    def wait(self) -> None:
        """Return once nothing runs."""


@runtime_checkable
class NarrowingBackend(Protocol):
    """A backend whose recordings are alike but for how many rows they have."""

    def narrow(self, replay: Callable[[], T], rows: int) -> Callable[[], T]:
        """A recording of its own for the first `rows` rows of those of `replay`. It leaves its results where that one
        does, of which the first `rows` rows are its own."""


class RecordingTime(NamedTuple):
    """Seconds a recording takes, and a graph that is made from it by narrowing; None where each is recorded."""

    seconds: float
    narrowing_seconds: float | None = None


@dataclass(slots=True)
class GraphEntry(Generic[T]):
    """One recorded program. `recorded_rows` is the row set it froze: none when it was recorded on a warm plan."""

    key: GraphKey
    replay: Callable[[], T]
    origin: Origin
    recorded_rows: tuple[int, ...]
    record_seconds: float = 0.0
    replays: int = 0
    real_rows: int = 0
    pad_rows: int = 0
    seconds_total: float = 0.0


class GraphSet(Generic[T]):
    """The recorded graphs of one engine, all replayed on its one engine thread."""

    def __init__(self, backend: GraphBackend, *, read: str) -> None:
        self.backend = backend
        self._read = read
        self._entries: dict[GraphKey, GraphEntry[T]] = {}
        self.warmup_seconds: float | None = None
        self.predicted_seconds: float | None = None

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[GraphEntry[T]]:
        """A copy, which other threads may walk while the engine thread records."""
        return list(self._entries.values())

    def capture(
        self,
        key: GraphKey,
        program: Callable[[], T],
        *,
        origin: Origin,
        rows: tuple[int, ...],
        clock: Callable[[], float],
    ) -> GraphEntry[T]:
        """Record `program` for `key`, or narrow a graph of its kind for more rows, where the backend can. `rows` is the
        row set of the plan it is bound to.

        Raises GateError if the key has a graph: a second recording would leave two programs for one shape.
        """
        if key in self._entries:
            raise GateError(f"{key} is recorded already; a key has one graph")
        started = clock()
        replay = self._narrowed(key) or self.backend.record(program)
        entry = GraphEntry(key, replay, origin, rows, record_seconds=clock() - started)
        self._entries[key] = entry
        return entry

    def time_recording(self, key: GraphKey, program: Callable[[], T], *, clock: Callable[[], float]) -> RecordingTime:
        """What `capture` would take; the recording is thrown away."""
        started = clock()
        replay = self.backend.record(program)
        recorded = clock()
        if not isinstance(self.backend, NarrowingBackend):
            return RecordingTime(recorded - started)
        self.backend.narrow(replay, key.rows)
        return RecordingTime(recorded - started, clock() - recorded)

    def _narrowed(self, key: GraphKey) -> Callable[[], T] | None:
        if not isinstance(self.backend, NarrowingBackend):
            return None
        alike = (each for each in self._entries.values() if (each.key.kind, each.key.width) == (key.kind, key.width))
        wider = next((each for each in alike if each.key.rows > key.rows), None)
        return self.backend.narrow(wider.replay, key.rows) if wider else None

    def replay(self, key: GraphKey, plan: DecodePlan) -> T:
        """Run the graph of `key` for `plan`. Raises KeyError if none is recorded, GateError if it froze other rows."""
        entry = self._entries[key]
        check_replay_rows(entry.recorded_rows, plan)
        result = entry.replay()
        entry.replays += 1
        entry.real_rows += len(plan.rows)
        entry.pad_rows += plan.pad_rows
        return result

    def replay_step(self, keys: Sequence[GraphKey], plan: PagedPlan) -> list[T]:
        """Run the graphs of one paged step, its body and, where it chooses tokens, its head, in one launch. Raises
        KeyError if one is not recorded."""
        results = self.backend.run([self._entries[key].replay for key in keys])
        self._count_step(keys, plan)
        return results

    def start_step(
        self,
        keys: Sequence[GraphKey],
        notify_fd: int,
        *,
        before: Sequence[Callable[[], Any]] = (),
        after: Sequence[Callable[[], Any]] = (),
    ) -> None:
        """Start what `replay_step` runs, and recordings around it, and return; `notify_fd` is written to at the end."""
        assert isinstance(self.backend, StartingBackend), f"the backend {self.backend.name} runs in its caller"
        self.backend.start([*before, *(self._entries[key].replay for key in keys), *after], notify_fd)

    def finish_step(self, keys: Sequence[GraphKey], plan: PagedPlan) -> None:
        """A started step is over."""
        self._count_step(keys, plan)

    def output(self, key: GraphKey) -> T:
        """Where the graph of `key` leaves its results."""
        assert isinstance(self.backend, StartingBackend), f"the backend {self.backend.name} runs in its caller"
        return self.backend.outputs([self._entries[key].replay])[0]

    def settle(self) -> None:
        """Return once nothing that was started runs."""
        if isinstance(self.backend, StartingBackend):
            self.backend.wait()

    def _count_step(self, keys: Sequence[GraphKey], plan: PagedPlan) -> None:
        entries = [self._entries[key] for key in keys]
        reals = (plan.real_rows, plan.real_logit_rows)
        for entry, real in zip(entries, reals, strict=False):
            entry.replays += 1
            entry.real_rows += real
            entry.pad_rows += entry.key.rows - real

    def rehearse(self, *keys: GraphKey) -> list[T]:
        """Run graphs without counting them: the warm-up's own tests. Raises KeyError if one is not recorded."""
        return self.backend.run([self._entries[key].replay for key in keys])

    def add_seconds(self, key: GraphKey, seconds: float) -> None:
        """Account the duration of a replay that has just completed."""
        self._entries[key].seconds_total += seconds

    def count(self, origin: Origin) -> int:
        return sum(entry.origin == origin for entry in self.entries())

    def stats(self) -> dict[str, Any]:
        """The `graphs` object of `/metrics`, without what steps count."""
        return {
            "read": self._read,
            "backend": self.backend.name,
            "warmed": self.count("warm"),
            "captured": len(self._entries),
            "cold_captures": self.count("cold"),
            "background_captures": self.count("background"),
            "replays": sum(entry.replays for entry in self.entries()),
            "warmup_seconds": self.warmup_seconds,
            "predicted_seconds": self.predicted_seconds,
        }

    def shapes(self) -> list[dict[str, Any]]:
        """The `shapes` list of `/metrics`."""
        return [
            {
                "kind": entry.key.kind,
                "rows": entry.key.rows,
                "width": entry.key.width,
                "warmed": entry.origin == "warm",
                "replays": entry.replays,
                "real_rows": entry.real_rows,
                "pad_rows": entry.pad_rows,
                "seconds_total": entry.seconds_total,
            }
            for entry in self.entries()
        ]
