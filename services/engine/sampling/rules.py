# ruff: noqa: N803, N806 (shape suffixes)
"""Rules of an output that look at the tokens before: forbidden sequences, an end of reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.sampling.params import SamplingParams

# Legend: R rows, V vocabulary.


class OutputRules:
    """Follows the output of one sequence. One caller.

    Row i of `forbid` and `force` is the token behind `drafts[:i]`.
    """

    def __init__(self, params: SamplingParams, outputs: Sequence[int]) -> None:
        """`outputs`: what was generated already."""
        self._bad_words = params.bad_words
        self._thinking = params.thinking_budget
        self._reach = max((len(word) - 1 for word in self._bad_words), default=0)
        self._tail: tuple[int, ...] = ()  # the last `reach` tokens
        self._count = 0
        self._thinks = self._thinking is not None
        self.advance(outputs)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens of the output."""
        self._count += len(tokens)
        if self._thinking is not None and self._thinking.end_token_id in tokens:
            self._thinks = False
        if self._reach:
            self._tail = (*self._tail, *tokens)[-self._reach :]

    def forbid(self, logits_RV: torch.Tensor, drafts: Sequence[int]) -> torch.Tensor:
        """Without the tokens that would complete a bad word; a row keeps at least one token."""
        rows = []
        for index, row_V in enumerate(logits_RV):
            banned = self._banned((*self._tail, *drafts[:index]))
            if banned:
                ids = torch.tensor(banned, dtype=torch.int64, device=row_V.device)
                left_V = row_V.index_fill(0, ids, -torch.inf)
                row_V = torch.where(left_V.isneginf().all(), row_V, left_V)
            rows.append(row_V)
        return torch.stack(rows)

    def _banned(self, before: tuple[int, ...]) -> list[int]:
        return [
            word[-1]
            for word in self._bad_words
            if len(word) == 1 or before[len(before) - len(word) + 1 :] == word[:-1]
        ]

    def force(self, logits_RV: torch.Tensor, drafts: Sequence[int]) -> torch.Tensor:
        """Only the end of the reasoning, where its tokens are used up and it has not ended."""
        thinking = self._thinking
        if thinking is None or not self._thinks:
            return logits_RV
        rows = []
        for index, row_V in enumerate(logits_RV):
            ended = thinking.end_token_id in drafts[:index]
            if not ended and self._count + index >= thinking.tokens:
                row_V = torch.full_like(row_V, -torch.inf)
                row_V[thinking.end_token_id] = 0.0
            rows.append(row_V)
        return torch.stack(rows)
