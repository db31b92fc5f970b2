# ruff: noqa: N803, N806, N815 (shape suffixes)
"""Samples the rows of a step for many sequences with different settings."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from kernels.sampling import apply_penalties, greedy, philox_uniform, sample, token_logprobs
from services.engine.grammar.compiled import Mask
from services.engine.sampling.grammar import GrammarState, MakeMatcher, allowed
from services.engine.sampling.params import SamplingParams
from services.engine.sampling.rules import OutputRules
from services.engine.scheduler.plan import Logprob, SequenceBegin, SequenceId

# Legend: R rows, V vocabulary, N tokens.


Drawn = tuple[tuple[int, ...], tuple[Logprob, ...]]  # tokens and, if asked for, their scores


@dataclass(slots=True)
class _Seen:
    """Tokens that penalties count."""

    prompt_V: torch.Tensor  # bool
    counts_V: torch.Tensor  # int32, occurrences in the output


@dataclass(slots=True)
class _Kept:
    """What the sampler keeps of a sequence."""

    params: SamplingParams
    outputs: int
    seen: _Seen | None
    bias: tuple[torch.Tensor, torch.Tensor] | None  # ids int64, values float32
    allowed_V: torch.Tensor | None  # bool
    stops: torch.Tensor  # ids int64
    grammar: Future[GrammarState] | None  # loaded beside the steps
    rules: OutputRules | None
    masks: Future[list[Mask | None]] | None = None  # of the rows of the present step


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive rows of one sequence: the first row's next token, then those after each draft.

    `position` is that of the first sampled token. `drafts` has one token less than there are rows.
    """

    sequence: SequenceId
    position: int
    drafts: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return 1 + len(self.drafts)


class Sampler:
    """Keeps settings and token counts per sequence. One caller.

    A sequence's tokens depend on its logits, settings and history only. With drafts, every row is
    sampled as if the drafts in front of it were accepted, with the random number of its own
    position; a draft is accepted where it equals the sampled token. The output is therefore exactly
    what it would be without drafts.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, make_matcher: MakeMatcher | None = None
    ) -> None:
        """`make_matcher`: for sequences with a grammar."""
        self._vocab_size = vocab_size
        self._device = device
        self._make_matcher = make_matcher
        # First in, first out: what waits for a grammar comes behind the thread that loads it.
        self._grammar_threads = ThreadPoolExecutor(4, thread_name_prefix="grammars")
        self._kept: dict[SequenceId, _Kept] = {}

    def begin(self, sequence: SequenceId, begin: SequenceBegin) -> None:
        """Start, or start again, with a sequence."""
        params = begin.sampling
        bias = None
        if params.logit_bias:
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
            bias = (self._ids(tuple(params.logit_bias)), values.to(self._device))
        self._kept[sequence] = _Kept(
            params=params,
            outputs=begin.output_tokens,
            seen=self._seen(begin) if params.has_penalties else None,
            bias=bias,
            allowed_V=self._mask(params.allowed_token_ids) if params.allowed_token_ids else None,
            stops=self._ids(params.stop_token_ids),
            grammar=self._grammar(params, begin.output_token_ids),
            rules=OutputRules(params, begin.output_token_ids) if params.has_rules else None,
        )

    def end(self, sequence: SequenceId) -> None:
        """Forget a sequence."""
        del self._kept[sequence]

    def start_masks(self, sequence: SequenceId, drafts: Sequence[int]) -> None:
        """Begin to make the masks of a sequence's next rows, beside the forward pass."""
        kept = self._kept[sequence]
        if kept.grammar is not None:
            kept.masks = self._grammar_threads.submit(_masks, kept.grammar, tuple(drafts))

    def sample(self, logits_RV: torch.Tensor, groups: Sequence[RowGroup]) -> list[Drawn]:
        """What each group gets; `logits_RV` fp32 has the rows of all groups.

        The number of tokens of a group is that of its accepted drafts plus one.
        """
        if not groups:
            return []
        parts = torch.split(logits_RV, [g.rows for g in groups])
        adjusted = [self._adjusted(rows, g) for g, rows in zip(groups, parts, strict=True)]
        chosen = self._choose(torch.cat(adjusted), groups).tolist()
        results = []
        start = 0
        for group, rows_RV in zip(groups, parts, strict=True):
            tokens = _accepted(chosen[start : start + group.rows], group.drafts)
            start += group.rows
            self._count(self._kept[group.sequence], tokens)
            scored = _scored(rows_RV[: len(tokens)], tokens, self._kept[group.sequence].params)
            results.append((tokens, scored))
        return results

    def _choose(self, logits_RV: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """One token per row, int64 [R]."""
        row_params = [self._kept[g.sequence].params for g in groups for _ in range(g.rows)]
        positions = [g.position + i for g in groups for i in range(g.rows)]
        chosen_R = greedy(logits_RV)
        drawn = [r for r, p in enumerate(row_params) if p.temperature > 0]
        if not drawn:
            return chosen_R
        uniform_R = philox_uniform(
            self._ids([_signed(row_params[r].seed) for r in drawn]),
            self._ids([positions[r] for r in drawn]),
        )
        for top_k in {row_params[r].top_k for r in drawn}:
            where = [i for i, r in enumerate(drawn) if row_params[r].top_k == top_k]
            rows = [drawn[i] for i in where]
            params = [row_params[r] for r in rows]
            chosen_R[rows] = sample(
                logits_RV[rows],
                top_k,
                self._floats([p.temperature for p in params]),
                self._floats([p.top_p for p in params]),
                self._floats([p.min_p for p in params]),
                uniform_R[where],
            )
        return chosen_R

    def _adjusted(self, logits_RV: torch.Tensor, group: RowGroup) -> torch.Tensor:
        """Logits with all that a sequence's settings say about its tokens; rows of one sequence."""
        kept = self._kept[group.sequence]
        params = kept.params
        logits_RV = logits_RV.float()
        if kept.bias is not None:
            ids, values = kept.bias
            logits_RV = logits_RV.index_add(1, ids, values.expand(len(logits_RV), -1))
        if kept.allowed_V is not None:
            logits_RV = logits_RV.masked_fill(~kept.allowed_V, -torch.inf)
        short = min(group.rows, max(0, params.min_tokens - kept.outputs))
        if short and len(params.stop_token_ids):
            logits_RV = logits_RV.clone()
            logits_RV[:short, kept.stops] = -torch.inf
        if kept.seen is not None:
            logits_RV = self._penalised(logits_RV, group, params, kept.seen)
        if params.bad_words and kept.rules is not None:
            logits_RV = kept.rules.forbid(logits_RV, group.drafts)
        if kept.grammar is not None:
            logits_RV = self._masked(logits_RV, kept, group)
        if kept.rules is not None:
            logits_RV = kept.rules.force(logits_RV, group.drafts)
        return logits_RV

    def _masked(self, logits_RV: torch.Tensor, kept: _Kept, group: RowGroup) -> torch.Tensor:
        """Only what the grammar allows. Where nothing of it is left, it overrules the rest."""
        if kept.masks is None:
            self.start_masks(group.sequence, group.drafts)
        assert kept.masks is not None
        rows = []
        for row_V, mask in zip(logits_RV, kept.masks.result(), strict=True):
            if mask is None:
                rows.append(row_V)
                continue
            allowed_V = torch.from_numpy(allowed(mask, self._vocab_size)).to(self._device)
            row_V = row_V.masked_fill(~allowed_V, -torch.inf)
            rows.append(torch.where(row_V.isneginf().all() & allowed_V, 0.0, row_V))
        kept.masks = None
        return torch.stack(rows)

    def _grammar(
        self, params: SamplingParams, outputs: Sequence[int]
    ) -> Future[GrammarState] | None:
        if params.grammar is None:
            return None
        if self._make_matcher is None:
            raise ValueError("a sequence has a grammar, and this sampler cannot follow one")
        return self._grammar_threads.submit(_state, self._make_matcher, params, tuple(outputs))

    def _penalised(
        self, logits_RV: torch.Tensor, group: RowGroup, params: SamplingParams, seen: _Seen
    ) -> torch.Tensor:
        counts_RV = seen.counts_V.repeat(group.rows, 1)
        for index, draft in enumerate(group.drafts):
            counts_RV[index + 1 :, draft] += 1
        return apply_penalties(
            logits_RV,
            seen.prompt_V | (counts_RV > 0),
            counts_RV,
            self._floats([params.presence_penalty] * group.rows),
            self._floats([params.frequency_penalty] * group.rows),
            self._floats([params.repetition_penalty] * group.rows),
        )

    def _count(self, kept: _Kept, tokens: tuple[int, ...]) -> None:
        kept.outputs += len(tokens)
        if kept.grammar is not None:
            kept.grammar.result().advance(tokens)
        if kept.rules is not None:
            kept.rules.advance(tokens)
        if kept.seen is not None:
            ids = self._ids(tokens)
            kept.seen.counts_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _seen(self, begin: SequenceBegin) -> _Seen:
        ids = self._ids(begin.output_token_ids)
        counts_V = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        counts_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return _Seen(self._mask(begin.prompt_token_ids), counts_V)

    def _mask(self, ids: Sequence[int]) -> torch.Tensor:
        mask_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        mask_V[self._ids(ids)] = True
        return mask_V

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def _state(
    make_matcher: MakeMatcher, params: SamplingParams, outputs: Sequence[int]
) -> GrammarState:
    assert params.grammar is not None
    matcher = make_matcher(params.grammar.compiled, params.stop_token_ids)
    return GrammarState(params.grammar, matcher, outputs)


def _masks(grammar: Future[GrammarState], drafts: Sequence[int]) -> list[Mask | None]:
    return grammar.result().masks(drafts)


def _scored(
    logits_NV: torch.Tensor, tokens: Sequence[int], params: SamplingParams
) -> tuple[Logprob, ...]:
    if params.logprobs is None:
        return ()
    if params.logprob_token_ids:
        return score_listed(logits_NV, tokens, params.logprob_token_ids)
    return score(logits_NV, tokens, params.logprobs)


def score_listed(
    logits_NV: torch.Tensor, tokens: Sequence[int], listed: Sequence[int]
) -> tuple[Logprob, ...]:
    """As `score`, with the tokens `listed` in place of the most likely ones."""
    scored = score(logits_NV, tokens, 0)
    ids_K = torch.tensor(listed, dtype=torch.int64, device=logits_NV.device)
    ids_N = torch.tensor(tokens, dtype=torch.int64, device=logits_NV.device)
    logits_NV = logits_NV.double()
    behind_NK = logits_NV[:, ids_K] - logits_NV.gather(1, ids_N[:, None])
    return tuple(
        replace(one, top=tuple((t, one.logprob + d) for t, d in zip(listed, behind, strict=True)))
        for one, behind in zip(scored, behind_NK.tolist(), strict=True)
    )


def score(logits_NV: torch.Tensor, tokens: Sequence[int], top: int) -> tuple[Logprob, ...]:
    """Log-probabilities of one token per row under the model's own distribution.

    Temperature, penalties and masks do not enter: these are the numbers of the model.
    """
    if not tokens:
        return ()
    ids_N = torch.tensor(tokens, dtype=torch.int64, device=logits_NV.device)
    logprob_N, rank_N, top_ids_NK, top_NK = token_logprobs(logits_NV, ids_N, top)
    columns = (logprob_N.tolist(), rank_N.tolist(), top_ids_NK.tolist(), top_NK.tolist())
    return tuple(
        Logprob(token, logprob, rank, tuple(zip(top_ids, tops, strict=True)))
        for token, logprob, rank, top_ids, tops in zip(tokens, *columns, strict=True)
    )


def _accepted(sampled: Sequence[int], drafts: tuple[int, ...]) -> tuple[int, ...]:
    """Sampled tokens up to and including the first that differs from its draft."""
    count = 1
    while count <= len(drafts) and sampled[count - 1] == drafts[count - 1]:
        count += 1
    return tuple(sampled[:count])


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
