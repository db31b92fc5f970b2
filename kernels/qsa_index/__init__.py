"""Token selection of query-sparse attention: compressed keys, block scores, best blocks."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.qsa_index import reference

# Legend: T packed tokens, B sequences, P pages of a table, N entries of a page, H index heads,
# D index head dim, S = budget + ratio - 1.


def mean_of_blocks(keys_TRD: torch.Tensor) -> torch.Tensor:
    """Mean over R raw keys, oldest first, summed in fp32: [T, R, D] to [T, D] of the same type."""
    if backend.uses_triton(keys_TRD):
        from kernels.qsa_index import launch

        return launch.mean_of_blocks(keys_TRD)
    return reference.mean_of_blocks(keys_TRD)


def write_closed_blocks(
    keys_TD: torch.Tensor,
    pool_PND: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    """Store the compressed keys of the tokens that close a block, in place.

    Token t closes block positions[t] // ratio when (positions[t] + 1) % ratio is 0; its key
    keys[t] becomes entry `block` of its sequence's pages. Other rows are ignored, on a GPU also
    those whose sequence, position or page is out of range.
    """
    assert keys_TD.shape[1:] == pool_PND.shape[2:]
    if backend.uses_triton(keys_TD):
        from kernels.paged_attention.launch import Place, write

        write(keys_TD, pool_PND, Place(page_table_BP, sequence_T, positions_T), ratio)
        return
    reference.write_closed_blocks(keys_TD, pool_PND, page_table_BP, sequence_T, positions_T, ratio)


def select_tokens(
    q_THD: torch.Tensor,
    pool_PND: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    ratio: int,
    budget: int,
) -> torch.Tensor:
    """Positions that each token attends to: int64 [T, budget + ratio - 1], ascending, then -1.

    Of the n = (position + 1) // ratio complete blocks the budget // ratio best are taken whole,
    by score sum_h relu(q_h . K_block) / sqrt(D) in fp32 (ties: the earlier block), and the 0 to
    ratio - 1 tokens behind the last complete block always. Source: Qwen4-Exp QSA indexer.

    On a GPU D and `ratio` are powers of two; among steps with as many tokens and sequences a
    token's row does not depend on the other tokens.
    """
    assert budget % ratio == 0 and q_THD.shape[2] == pool_PND.shape[2]
    if backend.uses_triton(q_THD):
        from kernels.paged_attention.launch import Place
        from kernels.qsa_index import launch

        place = Place(page_table_BP, sequence_T, positions_T)
        return launch.select_tokens(q_THD.contiguous(), pool_PND, place, ratio, budget)
    return reference.select_tokens(
        q_THD, pool_PND, page_table_BP, sequence_T, positions_T, ratio, budget
    )
