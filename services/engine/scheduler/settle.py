"""Takes over the result of a step: new tokens, new units of the prefix index, ended choices."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.prefix_chain import UnitHash
from services.engine.cache.prefix import Unit
from services.engine.scheduler.builder import InFlight
from services.engine.scheduler.messages import ProgressOut, PromptDone, TokensOut
from services.engine.scheduler.plan import SequenceResult, StepResult
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.snapshots import keeps_snapshot
from services.engine.scheduler.state import SchedulerState
from services.engine.scheduler.views import table_of

OnKept = Callable[[Seq[UnitHash]], None]


class Settler:
    """Applies step results to the state. Only verified tokens enter the prefix index."""

    def __init__(self, state: SchedulerState, on_kept: OnKept) -> None:
        """`on_kept` is told the hashes of every prefix that can be restored for longer."""
        self._state = state
        self._cache = state.cache
        self._config = state.config
        self._on_kept = on_kept

    def settle(self, flights: Seq[InFlight], result: StepResult, now: float) -> None:
        """Apply one result. `now` is the clock reading for progress reports, seconds."""
        if flights:
            self._state.counters.step(sum(flight.end - flight.start for flight in flights))
        for flight, outcome in zip(flights, result.sequences, strict=True):
            if outcome.finite:
                self._advance(flight, outcome, now)
            else:
                self._fail(flight)

    def _advance(self, flight: InFlight, outcome: SequenceResult, now: float) -> None:
        s = flight.sequence
        if s.collects_prompt_logprobs:
            s.state.prompt_logprobs += outcome.prompt_logprobs
        accepted = max(0, len(outcome.token_ids) - 1)
        self._state.counters.verified(len(flight.drafts), accepted)
        tokens, stop = self._cut(s, outcome.token_ids)
        s.tokens += tokens
        s.computed = min(flight.known_end + accepted, len(s.tokens))
        if self._config.enable_prefix_caching:
            s.chain.extend(s.tokens)
            self._index(flight)
        self._move_states(flight)
        self._cache.trim(table_of(s), s.computed)
        self._report(flight, outcome, tokens, now)
        self._finish_if_done(s, stop)

    def _fail(self, flight: InFlight) -> None:
        """Nothing of a sequence with bad values may be used again without being cleared."""
        s = flight.sequence
        table = table_of(s)
        self._cache.condemn(table)
        for name, taken in flight.taken.items():
            self._cache.pools[name].condemn(taken)
            self._cache.pools[name].release(taken)
        self._cache.index.forget(s.chain.hashes[: s.indexed])
        self._state.finish(
            s,
            FinishReason.FINISH_REASON_ERROR,
            error=ErrorReason.ERROR_REASON_NUMERIC,
            message="the model produced values that are not numbers",
        )

    def _cut(self, s: Sequence, sampled: Seq[int]) -> tuple[list[int], int | None]:
        """The sampled tokens up to the end of the choice, and the stop token if one ends it."""
        stopping = s.state.request.stopping
        room = min(stopping.max_tokens - s.outputs, self._config.max_model_len - len(s.tokens))
        tokens: list[int] = []
        for token in sampled[:room]:
            tokens.append(token)
            if token in s.sampling.stop_token_ids and s.outputs + len(tokens) > stopping.min_tokens:
                return tokens, token
        return tokens, None

    def _index(self, flight: InFlight) -> None:
        """Offer the units that the step completed to the prefix index."""
        s, unit_tokens = flight.sequence, self._config.unit_tokens
        for number in range(s.indexed, s.computed // unit_tokens):
            self._add_pages(s, number)
            if (number + 1) * unit_tokens in flight.snapshots:
                self._add_snapshot(flight, number)
            elif not self._cache.has_snapshots:
                self._on_kept(s.chain.hashes[: number + 1])
        s.indexed = max(s.indexed, s.computed // unit_tokens)

    def _add_pages(self, s: Sequence, number: int) -> None:
        """Index a unit's pages, and those of units before it that were evicted meanwhile."""
        hashes, first = s.chain.hashes, number
        while first and self._cache.index.get(hashes[first - 1]) is None:
            first -= 1
        paged = [g.name for g in self._cache.page_groups if g.kind == "paged"]
        for k in range(first, number + 1):
            ids = {name: self._cache.unit_ids(table_of(s), name, k) for name in paged}
            self._cache.index.add(hashes[k], s.chain.parent(k), ids)

    def _add_snapshot(self, flight: InFlight, number: int) -> None:
        s = flight.sequence
        position = (number + 1) * self._config.unit_tokens
        states: dict[str, tuple[int, ...]] = {
            name: (slots[position],) for name, slots in flight.slots.items()
        }
        self._cache.index.add(s.chain.hashes[number], s.chain.parent(number), states)
        for name, k in self._window_units(number):
            ids = {name: self._cache.unit_ids(table_of(s), name, k)}
            self._cache.index.add(s.chain.hashes[k], s.chain.parent(k), ids)
        if keeps_snapshot(self._config, s, position):
            self._keep(s, number)
        else:
            self._drop_rolling(s, number)
            s.rolling = position

    def _window_units(self, number: int) -> list[tuple[str, int]]:
        """(group, unit) of the windows that a hit up to unit `number` needs."""
        return [
            (name, k)
            for name, count in self._cache.window_units.items()
            for k in range(max(0, number + 1 - count), number + 1)
        ]

    def _keep(self, s: Sequence, number: int) -> None:
        """The snapshot after unit `number` stays when the turn is over."""
        units: list[tuple[str, Unit | None]] = [
            (name, self._cache.index.get(s.chain.hashes[k]))
            for name, k in (
                *self._window_units(number),
                *((name, number) for name in self._cache.state_groups),
            )
        ]
        for name, unit in units:
            if unit is not None and name in unit.ids:
                unit.kept.add(name)
        self._on_kept(s.chain.hashes[: number + 1])

    def _drop_rolling(self, s: Sequence, number: int) -> None:
        """The snapshot after unit `number` replaces the last rolling one."""
        if not s.rolling:
            return
        old = s.rolling // self._config.unit_tokens - 1
        for name in self._cache.state_groups:
            self._cache.index.drop_snapshot(s.chain.hashes[old], name)
        for name, k in set(self._window_units(old)) - set(self._window_units(number)):
            self._cache.index.drop_snapshot(s.chain.hashes[k], name)

    def _move_states(self, flight: InFlight) -> None:
        """The state at the last verified position is where the next step starts from."""
        table = table_of(flight.sequence)
        for name, slots in flight.slots.items():
            source, pool = slots[flight.sequence.computed], self._cache.pools[name]
            old = table.states[name]
            if old is not None and old != source:
                pool.release([old])
            pool.release(slot for slot in flight.taken[name] if slot != source)
            table.states[name] = source

    def _report(
        self, flight: InFlight, outcome: SequenceResult, tokens: list[int], now: float
    ) -> None:
        s, state = flight.sequence, flight.sequence.state
        request_id = state.request.request_id
        if not state.prompt_done:
            if s.computed >= s.prompt_length:
                self._prompt_done(s, now)
            elif now - state.last_report >= self._config.progress_seconds:
                state.last_report = now
                self._state.events.append(ProgressOut(request_id, s.computed, s.prompt_length))
        if tokens:
            self._state.counters.generation_tokens += len(tokens)
            logprobs = outcome.logprobs[: len(tokens)]
            self._state.events.append(TokensOut(request_id, s.choice, tuple(tokens), logprobs))

    def _prompt_done(self, s: Sequence, now: float) -> None:
        state = s.state
        state.prompt_done = True
        self._state.counters.prompt_tokens += s.prompt_length
        self._state.events.append(
            PromptDone(
                state.request.request_id,
                state.cached,
                state.external_cached,
                tuple(state.prompt_logprobs),
                created=max(0, s.indexed * self._config.unit_tokens - state.cached),
                queue_seconds=state.started_at - state.arrived_at,
                prefill_seconds=now - state.started_at,
            )
        )
        state.prompt_logprobs.clear()
        self._state.release_followers(state)

    def _finish_if_done(self, s: Sequence, stop: int | None) -> None:
        stopping = s.state.request.stopping
        full = s.outputs >= stopping.max_tokens or len(s.tokens) >= self._config.max_model_len
        if stop is None and not (full and s.computed >= s.prompt_length):
            return
        if s.rolling:
            self._keep(s, s.rolling // self._config.unit_tokens - 1)
        reason = FinishReason.FINISH_REASON_LENGTH
        if stop is not None:
            reason = FinishReason.FINISH_REASON_STOP
        self._state.finish(s, reason, stop_token_id=stop)
