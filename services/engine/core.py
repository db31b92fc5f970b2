"""The engine core: requests in, token events out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.prefix_chain import UnitHash
from services.engine.cache.external import ExternalStore
from services.engine.cache.manager import CacheManager
from services.engine.cache.mover import PageMover
from services.engine.cache.sizing import check_groups, pool_sizes
from services.engine.cache.spec import CachePools, allocate_pools
from services.engine.config import CoreConfig
from services.engine.images import ImageSource, ImageStore, Pixels
from services.engine.models.base import StageModel
from services.engine.runtime.executor import LocalExecutor
from services.engine.runtime.tables_api import TableSource
from services.engine.scheduler.admission import Admission
from services.engine.scheduler.builder import Planner
from services.engine.scheduler.drafts import DraftSource
from services.engine.scheduler.messages import CoreLoad, EngineEvent, GroupLoad, Request
from services.engine.scheduler.plan import Executor
from services.engine.scheduler.sequence import Phase
from services.engine.scheduler.settle import Settler
from services.engine.scheduler.state import SchedulerState
from services.engine.scheduler.transfers import Transfers

ExecutorFactory = Callable[
    [StageModel, CachePools, TableSource | None, torch.device, ImageSource], Executor
]


class EngineCore:
    """Schedules and runs the requests of one model replica. One thread calls everything.

    Loop of the owner: `submit`/`abort` what came in, then `step()` while `has_work`; when there is
    none, `idle()` and wait for the next message. While `blocked`, a step only polls the store, so
    the owner may pause a millisecond between steps.
    """

    def __init__(
        self,
        model: StageModel,
        config: CoreConfig,
        tables: TableSource | None = None,
        store: ExternalStore | None = None,
        *,
        drafts: DraftSource | None = None,
        make_executor: ExecutorFactory = LocalExecutor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates the pools. Raises ValueError where a group or the sizes do not fit.

        `max_model_len` beyond the model's positions is refused too. `make_executor` is where ranks
        and stages come in: whatever it returns gets every plan, in order.
        """
        _check_model(model, config, tables)
        sizes = pool_sizes(model.groups, config)
        device = torch.device(config.device)
        pools = allocate_pools(model.groups, sizes, device)
        self.mover = PageMover(pools, model.groups, config.unit_tokens)
        cache = CacheManager(self.mover, sizes, poison=config.debug_poison)
        self._config = config
        self._clock = clock
        self._state = SchedulerState(config, cache)
        self._images = ImageStore()
        self._admission = Admission(self._state, model.vocab_size, model.vision)
        context = max((n.context_tokens for n in model.ngrams), default=0)
        self._planner = Planner(self._state, context, drafts)
        self._executor = make_executor(model, pools, tables, device, self._images)
        self._transfers = Transfers(self._state, store)
        self._settler = Settler(self._state, self._transfers.keep)
        self._stalled = False
        self._unchecked = False  # a step was made since the last check
        if store is not None:
            store.bind(self.mover)

    def submit(self, request: Request, pixels: Mapping[bytes, Pixels] | None = None) -> None:
        """Take a request. Raises RequestRefused; then nothing of it is kept.

        `pixels` are those of its images by digest, which the caller has verified.
        """
        now = self._clock()
        state = self._admission.submit(request, now)
        self._images.hold(request.request_id, pixels or {})
        self._transfers.look_up(state.leader, now)
        self._stalled = False

    def abort(self, request_id: str) -> bool:
        """End every choice of a request now; its last events come with the next step.

        False when no such request is running or waiting.
        """
        state = self._state.requests.get(request_id)
        if state is None:
            return False
        for s in state.sequences:
            if s.phase is not Phase.DONE:
                self._state.finish(s, FinishReason.FINISH_REASON_ABORT)
        return True

    def step(self) -> list[EngineEvent]:
        """Admit, plan, execute, settle. Returns what happened, in order per request."""
        self._admit()
        plan, flights = self._planner.plan()
        if not plan.is_empty:
            result = self._executor.execute(plan)
            self._settler.settle(flights, result, self._clock())
        self._unchecked = True
        if self._config.debug_checks:
            self.check_invariants()
        self._images.retain(self._state.requests)
        events, self._state.events = self._state.events, []
        self._stalled = not plan.sequences and not events
        return events

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._state.requests or self._state.events)

    @property
    def blocked(self) -> bool:
        """Whether the last step could do nothing: all work waits for answers of the store."""
        return self._stalled

    def idle(self) -> bool:
        """Housekeeping without work: polls the store, clears what was freed.

        Checks the invariants once after the last step. Returns whether store jobs are still in
        flight: call again soon.
        """
        if not self.has_work:
            self._transfers.poll(self._clock())
            plan, _ = self._planner.plan()
            if not plan.is_empty:
                self._executor.execute(plan)
            if self._unchecked:
                self.check_invariants()
        return self._transfers.in_flight > 0

    def load(self) -> CoreLoad:
        """Present load and counters."""
        counters, cache = self._state.counters, self._state.cache
        groups = tuple(
            GroupLoad(g.name, g.kind, g.page_tokens, g.page_bytes, p.total, p.free, p.cached)
            for g, p in ((g, cache.pools[g.name]) for g in cache.groups)
        )
        return CoreLoad(
            running=len(self._state.running),
            waiting=len(self._state.waiting),
            waiting_tokens=self._state.waiting_tokens,
            kv_usage=max(p.used / p.total for p in cache.pools.values()),
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries_tokens=counters.prefix_queries_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            external_query_tokens=counters.external_query_tokens,
            external_hit_tokens=counters.external_hit_tokens,
            draft_tokens=counters.draft_tokens,
            accepted_draft_tokens=counters.accepted_draft_tokens,
            steps=counters.steps,
            groups=groups,
            store_connected=self._transfers.connected,
            drafts=counters.drafts,
            step_tokens=counters.step_tokens,
            steps_by_tokens=tuple(counters.steps_by_tokens),
            store_jobs=self._transfers.in_flight,
            accepted_by_position=tuple(counters.accepted_by_position),
        )

    def prefix_news(self) -> dict[UnitHash, bool]:
        """Units that a hit may end with which came (True) or went (False) since the last time."""
        return self._state.cache.index.take_news()

    def reset_prefix_cache(self) -> int:
        """Drop the cached units that no request uses; returns the pages and slots freed."""
        pools = self._state.cache.pools.values()
        before = sum(p.cached for p in pools)
        self._state.cache.index.clear()
        return before - sum(p.cached for p in pools)

    def check_invariants(self) -> None:
        """Raise InvariantError where pools, tables and index disagree. Between steps only."""
        tables = [s.table for s in self._state.running.values() if s.table is not None]
        self._state.cache.check(tables, self._transfers.pins())
        self._unchecked = False

    def _admit(self) -> None:
        """Take the store's answers and drop requests that waited too long for their first step."""
        now = self._state.now = self._clock()
        self._transfers.poll(now)
        for state in tuple(self._state.requests.values()):
            if state.deadline is None or state.started or now < state.deadline:
                continue
            for s in state.sequences:
                if s.phase is not Phase.DONE:
                    self._state.finish(
                        s,
                        FinishReason.FINISH_REASON_ERROR,
                        error=ErrorReason.ERROR_REASON_DEADLINE,
                        message=f"not started within {state.request.queue_timeout} seconds",
                    )


def _check_model(model: StageModel, config: CoreConfig, tables: TableSource | None) -> None:
    check_groups(model.groups, config.unit_tokens)
    if config.max_model_len > model.max_positions:
        raise ValueError(
            f"max_model_len is {config.max_model_len} and the model has {model.max_positions} "
            "positions"
        )
    given = {} if tables is None else tables.tables
    for ngram in model.ngrams:
        if ngram.table not in given:
            raise ValueError(f"the model reads the n-gram table {ngram.table} and it is not given")
