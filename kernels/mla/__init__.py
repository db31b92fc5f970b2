"""Latent attention without positions: queries and values pass through one latent per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels import backend
from kernels.mla import reference
from kernels.quant_linear import Matrix

if TYPE_CHECKING:
    from kernels.split_keys import Partials

# Legend: T packed tokens, B sequences, P pages, N entries of a page, H heads, K query/key dim,
# V value dim, C latent dim, S selected tokens.


def absorb_queries(q_THK: torch.Tensor, kv_b: Matrix) -> torch.Tensor:
    """Queries against latents: q_h W_UK,h, [T, H, C] in the type of q [T, H, K].

    `kv_b` [H * (K + V), C] holds K key rows, then V value rows, for each head. On a GPU a plain
    matrix is multiplied in its own type by the vendor's library, which a CUDA graph can hold;
    others are widened to fp32 in every call, four-bit ones not inside a graph.
    """
    assert kv_b.out_features % q_THK.shape[1] == 0
    if not backend.uses_triton(q_THK):
        return reference.absorb_queries(q_THK, kv_b)
    from kernels.mla import launch

    return launch.absorb_queries(q_THK, kv_b)


def expand_values(o_THC: torch.Tensor, kv_b: Matrix, value_dim: int) -> torch.Tensor:
    """Values from mixed latents: W_UV,h o_h, [T, H, V] in the type of o; `kv_b` as above."""
    assert kv_b.in_features == o_THC.shape[2]
    if not backend.uses_triton(o_THC):
        return reference.expand_values(o_THC, kv_b, value_dim)
    from kernels.mla import launch

    return launch.expand_values(o_THC, kv_b, value_dim)


def mla_attention(
    q_THC: torch.Tensor,
    latents_PNC: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    *,
    scale: float,
    selected_TS: torch.Tensor,
    partials: Partials | None = None,
) -> torch.Tensor:
    """softmax(scale q c^T) c over the selected tokens of each token's sequence.

    Absorbed queries q [T, H, C]; one latent c per token is key and value of all heads, in pages
    [P, N, C]. `selected` int64 [T, S]: positions, ascending, -1 behind the last one. Softmax in
    fp32; returns [T, H, C] in the type of q. The latents of the step's own tokens must be in the
    pages already. Source: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in absorbed
    form, over the tokens that a sparse-attention indexer selects.

    On a GPU queries, latents and weights are rounded to bf16, numbers out of range are left out, a
    token without any key gets 0, and its result depends, beside its own keys, through the number
    of splits on T. `partials` hold what splits keep; without them a split launch allocates.
    """
    assert q_THC.shape[2] == latents_PNC.shape[2] and selected_TS.shape[0] == q_THC.shape[0]
    if not backend.uses_triton(q_THC):
        return reference.mla_attention(
            q_THC, latents_PNC, page_table_BP, sequence_T, scale, selected_TS
        )
    from kernels.mla import launch

    return launch.mla_attention(
        q_THC, latents_PNC, page_table_BP, sequence_T, scale, selected_TS, partials
    )
