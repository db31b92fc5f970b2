from __future__ import annotations

import torch

from kernels.hadamard.reference import hadamard
from kernels.qsa_index.reference import best_blocks, block_entries, write_closed_blocks
from kernels.quant_linear.reference import decode_e4m3

E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4


def pool_keys(
    keys_TRD: torch.Tensor, gates_TRD: torch.Tensor, bias_RD: torch.Tensor
) -> torch.Tensor:
    """Tokens are added one after the other: the same order for every pool."""
    logits_TRD = gates_TRD.float() + bias_RD.float()
    shares_TRD = (logits_TRD - logits_TRD.amax(1, keepdim=True)).exp_()
    weighted_TRD = shares_TRD * keys_TRD.float()
    total, weighted = shares_TRD[:, 0], weighted_TRD[:, 0]
    for r in range(1, keys_TRD.shape[1]):
        total = total + shares_TRD[:, r]
        weighted = weighted + weighted_TRD[:, r]
    return (weighted / total).to(keys_TRD.dtype)


def write_pools(
    keys_TD: torch.Tensor,
    values_PND: torch.Tensor,
    scale_PN1: torch.Tensor | None,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    at = (page_table_BP, sequence_T, positions_T, ratio)
    if scale_PN1 is None:
        write_closed_blocks(keys_TD, values_PND, *at)
        return
    codes_TD, scale_T1 = encode(hadamard(keys_TD))
    write_closed_blocks(codes_TD, values_PND, *at)
    write_closed_blocks(scale_T1, scale_PN1, *at)


def select_pools(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    values_PND: torch.Tensor,
    scale_PN1: torch.Tensor | None,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
    budget: int,
) -> torch.Tensor:
    q_THD = q_THD.float() if scale_PN1 is None else hadamard(q_THD.float())

    def scores(t: int, b: int, pools: int) -> torch.Tensor:
        keys_ND = block_entries(values_PND, page_table_BP[b], pools)
        if scale_PN1 is None:
            keys_ND = keys_ND.float()
        else:
            scale_N1 = block_entries(scale_PN1, page_table_BP[b], pools)
            keys_ND = decode_e4m3(keys_ND).mul_(scale_N1)
        return pool_scores(q_THD[t], weights_TH[t], keys_ND)

    return best_blocks(scores, sequence_T, positions_T, ratio, budget)


def pool_scores(q_HD: torch.Tensor, weights_H: torch.Tensor, keys_ND: torch.Tensor) -> torch.Tensor:
    """fp32 [N]. Adding 0 makes -0 (a negative weight times 0) the same bits as 0."""
    scores_HN = torch.mm(q_HD, keys_ND.t()).mul_(q_HD.shape[1] ** -0.5).clamp_min_(0.0)
    return scores_HN.mul_(weights_H[:, None]).sum(0).add_(0.0)


def encode(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes uint8 [T, D] and power-of-two multipliers fp32 [T, 1]."""
    x_TD = x_TD.float()
    bound_T1 = x_TD.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST_AMAX) / E4M3_MAX
    mantissa, exponent = torch.frexp(bound_T1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale_T1 = torch.ldexp(torch.ones_like(bound_T1), exponent)
    scaled_TD = (x_TD / scale_T1).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled_TD.to(torch.float8_e4m3fn).view(torch.uint8), scale_T1
