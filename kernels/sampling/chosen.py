"""Plain torch definition of choosing tokens by `RowSettings`, one row after the other."""

from __future__ import annotations

import torch

from kernels.sampling import reference
from kernels.sampling.settings import IN_PROMPT, OCCURRENCE, RowSettings

# Legend: R rows, V vocabulary.


def choose(
    logits_RV: torch.Tensor, s: RowSettings, uniform_R: torch.Tensor | None = None
) -> torch.Tensor:
    if uniform_R is None:
        uniform_R = reference.philox_uniform(s.seed_R, s.position_R)
    chosen = [
        _token(adjusted(logits_RV, s, row), s, row, uniform_R[row : row + 1])
        for row in range(logits_RV.shape[0])
    ]
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)


def adjusted(logits_RV: torch.Tensor, s: RowSettings, row: int) -> torch.Tensor:
    """Logits fp32 [V] of one row with bias, bans, penalties and mask."""
    x_V = logits_RV[row].float()
    slot = -1 if s.slot_R is None else int(s.slot_R[row])
    if s.bias_SV is not None and 0 <= slot < s.bias_SV.shape[0]:
        x_V = x_V + s.bias_SV[slot]
    if s.banned_RN is not None:
        x_V = x_V.index_fill(0, _within(s.banned_RN[row], len(x_V)), -torch.inf)
    if s.history_SV is not None and 0 <= slot < s.history_SV.shape[0]:
        x_V = _penalised(x_V, s, row, s.history_SV[slot])
    if s.masks_MW is not None and s.mask_R is not None:
        mask = int(s.mask_R[row])
        if 0 <= mask < s.masks_MW.shape[0]:
            allowed_V = _bits(s.masks_MW[mask], len(x_V))
            x_V = x_V.masked_fill(~allowed_V, -torch.inf)
            x_V = torch.where(x_V.isneginf().all() & allowed_V, 0.0, x_V)
    return x_V


def _within(ids_N: torch.Tensor, vocab: int) -> torch.Tensor:
    return ids_N[(ids_N >= 0) & (ids_N < vocab)].long()


def _penalised(
    x_V: torch.Tensor, s: RowSettings, row: int, history_V: torch.Tensor
) -> torch.Tensor:
    assert s.presence_R is not None and s.frequency_R is not None and s.repetition_R is not None
    if s.drafts_RD is not None:
        drafts = _within(s.drafts_RD[row], len(x_V))
        history_V = history_V.index_add(
            0, drafts, torch.full_like(drafts, OCCURRENCE, dtype=history_V.dtype)
        )
    one = slice(row, row + 1)
    penalised: torch.Tensor = reference.apply_penalties(
        x_V[None], history_V[None] != 0, history_V[None] // (2 * IN_PROMPT), s.presence_R[one],
        s.frequency_R[one], s.repetition_R[one],
    )  # fmt: skip
    return penalised[0]


def _bits(words_W: torch.Tensor, vocab: int) -> torch.Tensor:
    bits_W32 = (words_W[:, None] >> torch.arange(32, device=words_W.device)) & 1
    return bits_W32.flatten()[:vocab] != 0


def _token(x_V: torch.Tensor, s: RowSettings, row: int, uniform_1: torch.Tensor) -> torch.Tensor:
    one = slice(row, row + 1)
    if float(s.temperature_R[row]) <= 0.0:
        return reference.greedy(x_V[None])
    kept = int(s.top_k_R[row])
    if 0 < kept < len(x_V):  # of equal logits the lowest ids stay
        beyond = (x_V / s.temperature_R[row]).sort(descending=True, stable=True).indices[kept:]
        x_V = x_V.index_fill(0, beyond, -torch.inf)
    return reference.sample(
        x_V[None], 0, s.temperature_R[one], s.top_p_R[one], s.min_p_R[one], uniform_1
    )
