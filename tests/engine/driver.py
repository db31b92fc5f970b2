"""Runs an engine core to its end and collects what every choice got."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.engine.cache.external import ExternalStore
from services.engine.config import CoreConfig
from services.engine.core import EngineCore, ExecutorFactory
from services.engine.runtime.executor import LocalExecutor
from services.engine.scheduler.drafts import DraftSource
from services.engine.scheduler.messages import (
    EngineEvent,
    FinishedOut,
    ProgressOut,
    PromptDone,
    Request,
    RequestSampling,
    RequestStopping,
    TokensOut,
)
from services.engine.scheduler.plan import Logprob
from tests.engine.toy_model import UNIT, ToyModel, toy_tables

MAX_STEPS = 20_000


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Outcome:
    """Everything that one choice got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finished: FinishedOut | None = None


@dataclass
class Log:
    """Events of a run, sorted by request and choice; order rules are checked on the way."""

    choices: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    prompts: dict[str, PromptDone] = field(default_factory=dict)
    progress: list[ProgressOut] = field(default_factory=list)

    def add(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            match event:
                case PromptDone():
                    assert event.request_id not in self.prompts
                    self.prompts[event.request_id] = event
                case TokensOut():
                    assert event.request_id in self.prompts and event.tokens
                    outcome = self._open(event.request_id, event.choice)
                    outcome.tokens += event.tokens
                    outcome.logprobs += event.logprobs
                case FinishedOut():
                    outcome = self._open(event.request_id, event.choice)
                    outcome.finished = event
                    assert event.completion_tokens == len(outcome.tokens)
                case ProgressOut():
                    assert event.request_id not in self.prompts
                    self.progress.append(event)

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return self.choices[(request_id, choice)].tokens

    def finished(self, request_id: str, choice: int = 0) -> FinishedOut:
        finished = self.choices[(request_id, choice)].finished
        assert finished is not None
        return finished

    def _open(self, request_id: str, choice: int) -> Outcome:
        outcome = self.choices.setdefault((request_id, choice), Outcome())
        assert outcome.finished is None, "an event after the last one"
        return outcome


def config(**changes: Any) -> CoreConfig:
    """A small core that checks itself after every step."""
    settings: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "unit_tokens": UNIT,
        "num_kv_tokens": 2048,
        "prefix_cache_retention_interval": 4 * UNIT,
        "debug_poison": True,
        "debug_checks": True,
    }
    return CoreConfig(**(settings | changes))


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    stopping: RequestStopping | None = None,
    sampling: RequestSampling | None = None,
    **changes: Any,
) -> Request:
    """A greedy request, unless told otherwise."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        stopping=replace(stopping or RequestStopping(0), max_tokens=max_tokens),
        sampling=sampling or RequestSampling(temperature=0.0),
        **changes,
    )


class Bench:
    """Makes cores and remembers them for the final check."""

    def __init__(self) -> None:
        self._cores: list[EngineCore] = []
        self.clock = Clock()

    def core(
        self,
        model: ToyModel | None = None,
        settings: CoreConfig | None = None,
        *,
        store: ExternalStore | None = None,
        drafts: DraftSource | None = None,
        make_executor: ExecutorFactory = LocalExecutor,
    ) -> EngineCore:
        core = EngineCore(
            model or ToyModel(),
            settings or config(),
            toy_tables(),
            store,
            drafts=drafts,
            clock=self.clock,
            make_executor=make_executor,
        )
        self._cores.append(core)
        return core

    def check(self) -> None:
        for core in self._cores:
            assert not core.has_work
            while core.idle():
                pass
            core.check_invariants()
            load = core.load()
            assert load.running == load.waiting == load.waiting_tokens == 0
            for group in load.groups:
                assert group.free + group.cached == group.total, group


def run(core: EngineCore, *requests: Request, log: Log | None = None) -> Log:
    """Submit and step until there is no work."""
    log = log or Log()
    for r in requests:
        core.submit(r)
    for _ in range(MAX_STEPS):
        if not core.has_work:
            return log
        log.add(core.step())
    raise AssertionError("the core does not come to an end")
