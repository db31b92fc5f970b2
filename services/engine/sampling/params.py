"""How the next token of a sequence is chosen; resolved values, no defaults left open."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GrammarUse:
    """A compiled grammar, and the token behind which it begins (None: from the first one on)."""

    compiled: bytes
    after_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The reasoning that the output begins with ends after `tokens` tokens: by `end_token_id`."""

    tokens: int
    end_token_id: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling settings of one sequence. Ranges are checked where a request enters.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. `seed` and the position of a token
    alone decide its random number, so batch composition never matters. `stop_token_ids` cannot be
    chosen as one of the first `min_tokens` output tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0  # 64 bits
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None  # length of the top list; None computes none
    logprob_token_ids: tuple[int, ...] = ()  # in place of the top list, where it is computed
    grammar: GrammarUse | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not occur
    thinking_budget: ThinkingBudget | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the tokens of the output so far decide about the next one."""
        return self.has_penalties or self.grammar is not None or self.has_rules

    @property
    def has_rules(self) -> bool:
        """Whether some tokens are forbidden or forced behind others."""
        return bool(self.bad_words) or self.thinking_budget is not None

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
