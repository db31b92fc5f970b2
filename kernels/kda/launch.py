"""Launches of the Triton kernels. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels.gated_delta import configs
from kernels.gated_delta.launch import C, States, matrices, rows, run_pass, slots_of
from kernels.kda.triton import log_decay as log_decay_kernel
from kernels.kda.triton import prepare

# Legend: T packed tokens, B sequences, H heads, K key dim, V value dim, W writes.

CHANNELS = 1024  # of a program of `log_decay`


def log_decay(
    f_THK: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_HK: torch.Tensor,
    lower_bound: float | None,
) -> torch.Tensor:
    """See the package. Rows of f may lie apart."""
    tokens, heads, width = f_THK.shape
    f = rows(f_THK)
    out = torch.empty(tokens, heads, width, device=f.device)
    if out.numel():
        channels = heads * width
        log_decay_kernel[(tokens, -(-channels // CHANNELS))](
            f, a_log_H.contiguous(), dt_bias_HK.contiguous(), out, f.stride(0), lower_bound or 0.0,
            HK=channels, K=width, BOUNDED=lower_bound is not None, N=CHANNELS,
            num_warps=configs.WARPS,
        )  # fmt: skip
    return out


def kda(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    decay_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    states: States,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    """Fill `out` (fp32 or bf16) and the states of the writes; see the package.

    q, k, v may be slices of wider rows. Can be captured in a CUDA graph.
    """
    tokens, heads, width = k_THK.shape
    sequences = len(starts_B1) - 1
    if tokens == 0 or sequences <= 0:
        return
    q, k, v = rows(q_THK), rows(k_THK), rows(v_THV)
    decay, beta = decay_THK.contiguous(), beta_TH.contiguous()
    slots = slots_of(tokens, sequences)
    keys, queries, updates = (
        torch.empty(slots, heads, C, width, dtype=torch.bfloat16, device=q.device) for _ in range(3)
    )
    tiles = matrices(slots, heads, width, q.device, (keys, queries, updates))
    prepare[(slots * heads,)](
        q, k, decay, beta, starts_B1, keys, queries, updates, tiles.solved, tiles.weights,
        tiles.factors, tokens, sequences, heads, q.stride(0), k.stride(0), width**-0.5, K=width,
        num_warps=configs.WARPS, num_stages=1,
    )  # fmt: skip
    run_pass(q, k, v, decay, tiles, states, starts_B1, write_token_W, out_THV)
