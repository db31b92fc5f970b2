"""The grammar of one sequence: when it begins, and which tokens it allows where."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.engine.grammar.compiled import Mask, Matcher
from services.engine.sampling.params import GrammarUse

# A matcher at the start of an output that ends with one of the tokens.
MakeMatcher = Callable[[bytes, Sequence[int]], Matcher]


class GrammarState:
    """Follows the tokens of one sequence. One caller at a time.

    With `after_token_id` the output is free up to and including the first token with this id,
    wherever within a step it comes.
    """

    def __init__(self, use: GrammarUse, matcher: Matcher, outputs: Sequence[int] = ()) -> None:
        """`outputs`: what was generated already."""
        self._after = use.after_token_id
        self._matcher = matcher
        self._begun = self._after is None
        self.advance(outputs)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens of the output. Raises ValueError for one that the grammar forbids."""
        for token in tokens:
            if not self._begun:
                self._begun = token == self._after
            elif not self._matcher.ended and not self._matcher.accept(token):
                raise ValueError(f"token {token} does not fit the grammar")

    def masks(self, drafts: Sequence[int]) -> list[Mask | None]:
        """The mask of the next token, and of the one after each draft; None allows all.

        Behind a draft that the grammar forbids, and that can therefore not be accepted, nothing
        matters any more.
        """
        masks = [self._mask(self._begun)]
        begun, accepted = self._begun, 0
        for draft in drafts:
            if not begun:
                begun = draft == self._after
            elif self._matcher.ended or not self._matcher.accept(draft):
                break
            else:
                accepted += 1
            masks.append(self._mask(begun))
        self._matcher.rollback(accepted)
        return masks + [None] * (1 + len(drafts) - len(masks))

    def _mask(self, begun: bool) -> Mask | None:
        return self._matcher.mask() if begun and not self._matcher.ended else None


def allowed(mask: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """A mask as one flag a token, [vocab]."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)
