"""The serving loop without a device: the real Scheduler and BlockPool, and a clock that costs move. No torch.

The order of events is `AsyncEngine`'s. The tokens of a step are delivered while the next one runs, and what arrives
during a step is admitted to the line then and planned after it: what a client sends upon its last token misses the step
planned in between.

    plan N       host part       compute N                       plan N + 1
    |------------|---------------|-------------------------------|----------
                 tokens of N - 1 delivered                        arrivals since plan N are in line

The engine plans a native step that only goes on decoding while the one before it computes, and what arrives after that
misses it. The host part is then what that leaves of it (`Costs.plans_ahead`).

    plan N       host part       compute N       plan N + 1      host part       compute N + 1
    |------------|---------------|---------------:---------------|---------------|-------------
                 tokens of N - 1                 arrivals so far                 tokens of N
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from random import Random

from nanoserve import __version__
from nanoserve.admission import Admission, Limits
from nanoserve.async_engine import PLAN_AHEAD_AT, expect
from nanoserve.blocks import BlockPool, blocks_for
from nanoserve.budget import StepBudget
from nanoserve.config import choose_step_rows
from nanoserve.errors import ConfigError, QueueFull
from nanoserve.metrics import Metrics
from nanoserve.prefix import PrefixCache
from nanoserve.request import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, StepPlan
from nanoserve.simulate.costs import Costs, Work
from nanoserve.simulate.forms import Form, Former, PagedFormer, RectangleFormer, kind_of
from nanoserve.simulate.result import Result
from nanoserve.simulate.trace import Ask, Load

GREEDY = SamplingParams(temperature=0.0)
MOST_TOKEN_IDS = 1 << 31
SCATTER_SEED = 0
"""The same load on the same costs is the same simulation."""
FIRST = Ask(0.0, 8, 8)
"""A request that has been served, alone, when a load begins."""
Observer = Callable[[float, StepPlan], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """One deployment, in the flags of `nanoserve serve`. `kv_blocks` None is a pool in which no sequence gives way."""

    max_sequences: int = 32
    kv_blocks: int | None = None
    max_step_rows: int | None = None
    prefill_gap_seconds: float = 0.05
    prefix_cache: bool = True
    block_size: int = 16
    max_model_len: int | None = None
    max_queued: int = 1024
    max_queued_tokens: int | None = None
    width_multiple: int = 128

    @property
    def step_rows(self) -> int:
        """`max_step_rows`, or what a server takes. Raises ConfigError if the sequences could not all decode."""
        return choose_step_rows(self.max_step_rows, self.max_sequences)

    @property
    def limits(self) -> Limits:
        return Limits(self.max_queued, self.max_queued_tokens)

    def blocks(self, load: Load) -> int:
        """Blocks of the pool: with None, what every sequence needs at the longest request's length."""
        if self.kv_blocks is not None:
            return self.kv_blocks
        return self.max_sequences * blocks_for(self.longest(load) + 1, self.block_size)

    def longest(self, load: Load) -> int:
        """Most tokens of one sequence: what the flag says, or what the load asks for."""
        return self.max_model_len or max(ask.tokens for ask in load.asks)


def simulate(sizes: Sizes, costs: Costs, load: Load, *, observe: Observer | None = None) -> Result:
    """Serve `load` to its end. `observe` is told of every plan when it is made (seconds, plan).

    Raises ConfigError if no request of the load fits, or a step does not hold the sequences.
    """
    return _Simulation(sizes, costs, load, observe).run()


def experienced(budget: StepBudget, costs: Costs) -> StepBudget:
    """`budget`, once it has seen the steps of FIRST: what rows cost is nothing that it learns under load alone."""
    prompt = FIRST.prompt_tokens
    first = costs.compute_seconds(Work(prompt, 1, 0, prompt * (prompt + 1) // 2))
    budget.observe(0, prompt, costs.served_seconds(1, 1, first))
    for context in range(prompt + 1, FIRST.tokens):
        budget.observe(1, 0, costs.served_seconds(1, 0, costs.compute_seconds(Work(1, 1, context, 0))))
    return budget


class _Simulation:
    def __init__(self, sizes: Sizes, costs: Costs, load: Load, observe: Observer | None) -> None:
        blocks = sizes.blocks(load)
        self._load = load
        self._costs = costs
        self._observe = observe
        self._block_size = sizes.block_size
        self._limit = min(sizes.longest(load), blocks * sizes.block_size)
        if not any(ask.tokens <= self._limit for ask in load.asks):
            shortest = min(ask.tokens for ask in load.asks)
            raise ConfigError(
                f"the shortest request has {shortest:,} tokens; {self._limit:,} fit; raise --kv-blocks or "
                "--max-model-len, or shorten the requests"
            )
        self._pool = BlockPool(blocks, sizes.block_size)
        self._scheduler = Scheduler(
            self._pool,
            max_sequences=sizes.max_sequences,
            budget=experienced(StepBudget(sizes.step_rows, gap_seconds=sizes.prefill_gap_seconds), costs),
            prefix=PrefixCache(self._pool) if sizes.prefix_cache else None,
        )
        self._admission = Admission(sizes.limits, Metrics(__version__))
        self._former = _former(sizes, costs, self._limit)
        self._arrivals = load.opening()
        heapify(self._arrivals)
        self._chance = Random(SCATTER_SEED)
        self._index: dict[Sequence, int] = {}
        self._asked_at: dict[Sequence, float] = {}
        self._told_at: dict[Sequence, float] = {}
        self._computed: dict[Sequence, int] = {}
        self._prefixes: dict[str, list[int]] = {}
        self._next_id = 1
        self.result = Result(blocks=blocks, block_size=sizes.block_size)

    def run(self) -> Result:
        now = self._arrivals[0][0]
        self.result.started = now
        ready: list[Sequence] = []
        while True:
            plan = self._scheduler.plan()
            if plan is None:
                self._deliver(ready, now)
                ready = []
                if not self._arrivals:
                    break
                assert not self._scheduler.has_work, "sequences wait, and nothing runs that could make room for them"
                now = max(now, self._arrivals[0][0])
                self._arrive(now)
                continue
            ready, now = self._run_from(plan, ready, now)
        self.result.preemptions = self._scheduler.preemptions
        if (prefix := self._scheduler.prefix) is not None:
            self.result.cached_tokens = prefix.cached_tokens
        return self.result

    # --- steps ---------------------------------------------------------------------------------------------

    def _run_from(self, first: StepPlan, ready: list[Sequence], now: float) -> tuple[list[Sequence], float]:
        """Run a step, planned `now`, and those that are planned ahead of its end and theirs; (who got a token in the
        last one, its end). As in `AsyncEngine`, the first one's successor is planned at once, every other when most of
        the time has passed that its step is expected to take."""
        plan, expected = self._planned(first, now), 0.0
        while True:
            form = self._former.form(plan)
            chosen = _chosen(plan)
            tokens = len(chosen), len(chosen) - len(plan.decode)
            launched = now + self._costs.host_seconds(*tokens)
            self._deliver(ready, launched)
            # As the engine measures it: from the plan, or the end of the step before.
            should_take = self._costs.served_seconds(*tokens, self._costs.alone_seconds(form.works))
            seconds = self._costs.scattered(should_take, self._chance.random())
            ended = max(launched, now + seconds)
            following = self._plan_ahead(launched + PLAN_AHEAD_AT * expected, ended)
            self._account(plan, form, now, ended)
            self._arrive(ended)
            self._scheduler.budget.observe(len(plan.decode), plan.prefill_tokens, seconds)
            ready = self._scheduler.commit({sequence: self._index[sequence] for sequence in chosen})
            now = ended
            if following is None:
                return ready, now
            plan, expected = following, expect(expected, seconds)

    def _plan_ahead(self, at: float, ended: float) -> StepPlan | None:
        """The step after the one in flight, if it is planned, at second `at`, before that one has `ended`."""
        if not self._costs.plans_ahead or at >= ended:
            return None
        self._arrive(at)
        plan = self._scheduler.plan_ahead()
        return None if plan is None else self._planned(plan, at)

    def _planned(self, plan: StepPlan, now: float) -> StepPlan:
        if self._observe is not None:
            self._observe(now, plan)
        return plan

    def _account(self, plan: StepPlan, form: Form, now: float, ended: float) -> None:
        result = self.result
        result.busy_seconds += ended - now
        result.add_step(kind_of(plan), form.keys, form.rows, form.real_rows, ended - now)
        scheduler, start = self._scheduler, now - result.started
        result.timeline.add(start, ended - result.started, scheduler.running, scheduler.waiting, self._pool.used_blocks)
        for sequence, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True):
            stop = chunk.start + len(chunk.token_ids)
            # A sequence that has generated was computed up to its newest token; before that, as far as its chunks got.
            known = len(sequence.tokens) - 1 if sequence.generated else self._computed.get(sequence, 0)
            result.prefilled_tokens += len(chunk.token_ids)
            result.recomputed_tokens += max(0, min(stop, known) - chunk.start)
            self._computed[sequence] = max(known, stop)
            if chunk.last:
                del self._computed[sequence]
                result.prompt_tokens += 0 if sequence.generated else sequence.prompt_tokens

    # --- clients -------------------------------------------------------------------------------------------

    def _arrive(self, now: float) -> None:
        """Queue, or refuse, what has arrived by `now`."""
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] <= now:
            seconds, index = heappop(arrivals)
            ask = self._load.asks[index]
            if ask.tokens > self._limit:
                self.result.never_fit += 1
                self._follow(index, seconds)
                continue
            sequence = self._sequence(index, ask)
            try:
                self._admission.check(self._scheduler, [sequence])
            except QueueFull:
                self.result.refused += 1
                self._follow(index, seconds)
                continue
            self._index[sequence] = index
            self._asked_at[sequence] = seconds
            self._scheduler.add(sequence)

    def _follow(self, index: int, now: float) -> None:
        following = self._load.after(index, now)
        if following is not None:
            heappush(self._arrivals, following)

    def _sequence(self, index: int, ask: Ask) -> Sequence:
        """Prompts have ids of their own, except where they share a prefix: so only what is alike can be found alike."""
        own = ask.prompt_tokens
        prompt: list[int] = []
        if ask.prefix_id is not None:
            prefix = self._prefixes.get(ask.prefix_id, [])
            if len(prefix) < ask.prefix_tokens:
                prefix = self._prefixes[ask.prefix_id] = prefix + self._new_ids(ask.prefix_tokens - len(prefix))
            prompt, own = prefix[: ask.prefix_tokens], own - ask.prefix_tokens
        return Sequence(
            request_id=str(index),
            choice=0,
            prompt_ids=prompt + self._new_ids(own),
            params=GREEDY,
            seed=0,
            max_tokens=ask.output_tokens,
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(),
            block_size=self._block_size,
            priority=ask.priority,
        )

    def _new_ids(self, count: int) -> list[int]:
        first = self._next_id if self._next_id + count < MOST_TOKEN_IDS else 1
        self._next_id = first + count
        return list(range(first, first + count))

    def _deliver(self, taken: list[Sequence], now: float) -> None:
        """Tell the clients of `taken` their newest token."""
        told_at, gaps, previous, alike = self._told_at, self.result.gaps, None, 0
        for sequence in taken:
            last = told_at.get(sequence)
            if last is None:
                self.result.ttfts.append(now - self._asked_at.pop(sequence))
            elif last == previous:
                alike += 1
            else:
                if previous is not None:
                    gaps.add(now - previous, alike)
                previous, alike = last, 1
            told_at[sequence] = now
            if sequence.finish_reason is not None:
                del told_at[sequence]
                self.result.finished.append(self._index[sequence])
                self._follow(self._index.pop(sequence), now)
        if previous is not None:
            gaps.add(now - previous, alike)
        if taken:
            self.result.ended = now
            self.result.output_tokens += len(taken)


def _former(sizes: Sizes, costs: Costs, limit: int) -> Former:
    if costs.read == "paged":
        return PagedFormer(
            max_sequences=sizes.max_sequences, max_step_rows=sizes.step_rows, pads_compute=costs.pads_compute
        )
    return RectangleFormer(max_sequences=sizes.max_sequences, max_model_len=limit, width_multiple=sizes.width_multiple)


def _chosen(plan: StepPlan) -> list[Sequence]:
    """The sequences that get a token in this step."""
    chosen = list(plan.decode_sequences)
    if plan.chunks:
        chosen += [s for s, chunk in zip(plan.chunk_sequences, plan.chunks, strict=True) if chunk.last]
    return chosen
