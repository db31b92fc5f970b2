"""One choice of a request on its way through a scripted answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.stage_pb2 import RequestUpdate
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.engine.script import ScriptLine


class Replay:
    """Emits the tokens of a line, cut like a model's output.

    The choice ends at the first stop token (sent as its last token), at max_tokens with reason
    LENGTH, or at the end of the line with the line's reason.
    """

    def __init__(
        self, handle: int, choice: int, line: ScriptLine, request: pb.GenerateRequest
    ) -> None:
        self.handle = handle
        self.choice = choice
        self.chunk = line.chunk
        self.delay_seconds = line.delay_seconds
        self._aligned = line.aligned
        self.abandoned = False
        self.is_done = False
        self._sent = 0
        self._stop_token: int | None = None
        self._reason = line.finish_reason
        self._tokens = self._cut(line, request.stopping)
        output = request.output
        self._top = output.logprobs if output.HasField("logprobs") else None
        self._listed = tuple(output.logprob_token_ids)

    def _cut(self, line: ScriptLine, stopping: pb.StoppingParams) -> tuple[int, ...]:
        stops = set(stopping.stop_token_ids)
        if not stopping.ignore_eos:
            stops.update(stopping.eos_token_ids)
        tokens = line.token_ids[: stopping.max_tokens]
        for index, token in enumerate(tokens):
            if token in stops and index >= stopping.min_tokens:
                self._reason, self._stop_token = FinishReason.FINISH_REASON_STOP, token
                return tokens[: index + 1]
        if len(tokens) < len(line.token_ids):
            self._reason = FinishReason.FINISH_REASON_LENGTH
        return tokens

    def due_after(self, moment: float) -> float:
        """When the chunk after the one of `moment` comes, seconds of the monotonic clock."""
        if self._aligned:  # half a delay of tolerance: a step that was early is not given twice
            return (round(moment / self.delay_seconds) + 1) * self.delay_seconds
        return moment + self.delay_seconds

    def emit(self, update: RequestUpdate, chunks: int) -> int:
        """Add up to `chunks` chunks and, after the last, the end; returns the tokens added."""
        start = self._sent
        for _ in range(chunks):
            tokens = self._tokens[self._sent : self._sent + self.chunk]
            if not tokens:
                break
            chunk = update.events.add().chunk
            chunk.choice = self.choice
            chunk.token_ids.extend(tokens)
            if self._top is not None:
                chunk.logprobs.extend(certain(tokens, self._top, self._listed))
            self._sent += len(tokens)
        if self._sent == len(self._tokens):
            self._finish(update)
        return self._sent - start

    def _finish(self, update: RequestUpdate) -> None:
        self.is_done = True
        update.events.add().finished.CopyFrom(
            pb.Finished(
                choice=self.choice,
                reason=self._reason,
                stop_token_id=self._stop_token,
                completion_tokens=self._sent,
            )
        )


def certain(
    tokens: Iterable[int], top: int, listed: Sequence[int] = ()
) -> Iterable[pb.TokenLogprob]:
    """Log-probabilities of tokens that were certain: 0, rank 1, alone in their top list.

    `listed` tokens take the place of that list; all others were impossible.
    """
    for token in tokens:
        entry = pb.TokenLogprob(token_id=token, logprob=0.0, rank=1)
        for other in listed or (token,) * (top > 0):
            entry.top.add(token_id=other, logprob=0.0 if other == token else -math.inf)
        yield entry
