"""Token selection of GLM-5: pooled keys, weighted pool scores, best pools and the tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import backend
from kernels.index_pool import reference

# Legend: T packed tokens, B sequences, P pages (of a pool, or of a table), N entries of a page,
# H index heads, D index head dim, R tokens of a pool, S = budget + R - 1.


@dataclass(frozen=True, slots=True)
class KeyPool:
    """Pooled keys in pages, in one of two forms.

    `values` [P, N, D] of a float type and no `scale`; or e4m3 codes uint8 [P, N, D] of the
    keys after `kernels.hadamard`, with one multiplier per key, `scale` fp32 [P, N, 1], a power of
    two. D is then a power of two as well.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.values.dtype == torch.uint8) != (self.scale is not None):
            raise ValueError(f"pooled keys of {self.values.dtype}: codes and a scale go together")


def pool_keys(
    keys_TRD: torch.Tensor, gates_TRD: torch.Tensor, bias_RD: torch.Tensor
) -> torch.Tensor:
    """One key for R tokens, oldest first: [T, R, D] to [T, D] of the same type.

    Per channel sum_r softmax_r(gates + bias) * keys, in fp32. Source: key pooling of the GLM-5.3
    indexer (`index_kpool_compress_gate`, `index_kpool_compress_ape`).
    """
    assert keys_TRD.shape == gates_TRD.shape and keys_TRD.shape[1:] == bias_RD.shape
    if not backend.uses_triton(keys_TRD):
        return reference.pool_keys(keys_TRD, gates_TRD, bias_RD)
    from kernels.index_pool import launch

    return launch.pool_keys(keys_TRD, gates_TRD, bias_RD)


def write_pools(
    keys_TD: torch.Tensor,
    pool: KeyPool,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    """Store the pooled keys of the tokens that complete a pool, in place.

    Token t completes pool positions[t] // ratio when (positions[t] + 1) % ratio is 0; its key
    keys[t] becomes that entry of its sequence's pages. Other rows are ignored. Codes: the rotated
    key rounded to the type of `keys`, divided by 2^ceil(log2(max(amax, 1e-4) / 448)), to nearest.
    """
    assert keys_TD.shape[1:] == pool.values.shape[2:]
    if backend.uses_triton(keys_TD):
        from kernels.index_pool import launch

        at = (page_table_BP, sequence_T, positions_T)
        return launch.write_pools(keys_TD.contiguous(), pool, *at, ratio)
    return reference.write_pools(
        keys_TD, pool.values, pool.scale, page_table_BP, sequence_T, positions_T, ratio
    )


def select_pools(
    q_THD: torch.Tensor,
    weights_TH: torch.Tensor,
    pool: KeyPool,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    ratio: int,
    budget: int,
) -> torch.Tensor:
    """Positions that each token attends to: int64 [T, budget + ratio - 1], ascending, then -1.

    Of the n = (position + 1) // ratio complete pools the budget // ratio best are taken whole, by
    score sum_h weights_h relu(q_h . K_pool / sqrt(D)) in fp32 with weights fp32 [T, H] of either
    sign; among equal scores (all heads at 0 is one) the earlier pool. The 0 to ratio - 1 tokens
    behind the last complete pool are always taken. On a GPU q, and the rotated q, are rounded to
    bf16. Source: GLM-5.3 DSA indexer.
    """
    assert weights_TH.dtype == torch.float32 and weights_TH.shape == q_THD.shape[:2]
    assert budget % ratio == 0 and q_THD.shape[2] == pool.values.shape[2]
    if backend.uses_triton(q_THD):
        from kernels.index_pool import launch

        at = (page_table_BP, sequence_T, positions_T)
        return launch.select_pools(q_THD, weights_TH, pool, *at, ratio, budget)
    return reference.select_pools(
        q_THD,
        weights_TH,
        pool.values,
        pool.scale,
        page_table_BP,
        sequence_T,
        positions_T,
        ratio,
        budget,
    )
