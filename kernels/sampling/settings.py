"""How the token of each row is chosen, on the device of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Legend: R rows, V vocabulary, S slots of sequences, M masks, W words of 32 bits, D drafts,
# N banned tokens.

IN_PROMPT, OCCURRENCE = 1, 2  # what a token of the prompt, or of the output, adds to `history_SV`


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of every row; the tensors of a captured graph keep their addresses.

    `temperature_R`, `top_p_R`, `min_p_R` fp32 and `top_k_R` int32: temperature 0 is greedy, top_k
    0, top_p 1 and min_p 0 are off. The random number is `philox_uniform(seed_R, position_R)`,
    both int64.

    `slot_R` int32: the row of `bias_SV` (fp32, added to the logits) and of `history_SV` (int32: 2
    for every occurrence in the output, and 1 where the token is in the prompt). Penalties fp32
    [R] go with the history, as in `apply_penalties`. `drafts_RD` int32: tokens before the row that
    the history lacks. `banned_RN` int32: tokens that the row cannot get. `masks_MW` int32, W =
    ceil(V / 32): bit t % 32 of word t // 32 allows token t; `mask_R` int32 is the row of it.

    A slot, mask, draft or banned token out of range (such as -1) is none.
    """

    temperature_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    seed_R: torch.Tensor
    position_R: torch.Tensor
    slot_R: torch.Tensor | None = None
    bias_SV: torch.Tensor | None = None
    history_SV: torch.Tensor | None = None
    repetition_R: torch.Tensor | None = None
    presence_R: torch.Tensor | None = None
    frequency_R: torch.Tensor | None = None
    drafts_RD: torch.Tensor | None = None
    banned_RN: torch.Tensor | None = None
    masks_MW: torch.Tensor | None = None
    mask_R: torch.Tensor | None = None

    def check(self, rows: int, vocab: int) -> None:
        """Assert shapes and types for logits [rows, vocab]."""
        _check(self.temperature_R, torch.float32, rows)
        _check(self.top_p_R, torch.float32, rows)
        _check(self.min_p_R, torch.float32, rows)
        _check(self.top_k_R, torch.int32, rows)
        _check(self.seed_R, torch.int64, rows)
        _check(self.position_R, torch.int64, rows)
        for pool, dtype in ((self.bias_SV, torch.float32), (self.history_SV, torch.int32)):
            if pool is not None:
                _check(self.slot_R, torch.int32, rows)
                _check(pool, dtype, pool.shape[0], vocab)
        if self.history_SV is not None and self.bias_SV is not None:
            assert self.history_SV.shape == self.bias_SV.shape
        if self.history_SV is not None:
            for penalty_R in (self.repetition_R, self.presence_R, self.frequency_R):
                _check(penalty_R, torch.float32, rows)
        for ids in (self.drafts_RD, self.banned_RN):
            if ids is not None:
                _check(ids, torch.int32, rows, ids.shape[1])
        if self.masks_MW is not None:
            _check(self.mask_R, torch.int32, rows)
            _check(self.masks_MW, torch.int32, self.masks_MW.shape[0], -(-vocab // 32))


def _check(x: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    assert x is not None and x.dtype == dtype and x.shape == shape and x.is_contiguous()
