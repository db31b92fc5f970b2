# ruff: noqa: N803 (shape suffixes)
"""Block-selecting attention (QSA) over packed rows, and the losses that train its indexer.

The choice of blocks passes no gradient. The indexer learns from the attention itself: from the
divergence between its scores and the attention mass of every visible block. Shape letters as in
functional.py; N index blocks of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.checkpoints.nano.functional import linear, rms_norm, rope

_MARGIN = 0.25  # every visible block should score above this in one head: no ties at zero


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and widths of the main attention and of its indexer."""

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    block: int
    top_blocks: int


def index_scores(
    x_BTD: Tensor,
    weight: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    shape: AttentionShape,
) -> tuple[Tensor, Tensor]:
    """Return fp32 block scores [B, T, N] and the greatest single-head product before relu."""
    qk = linear(x_BTD, weight).unflatten(-1, (shape.index_heads + 1, shape.index_dim))
    q = rms_norm(qk[:, :, :-1], q_norm).transpose(1, 2)
    pooled = qk[:, :, -1].float().unflatten(1, (-1, shape.block)).mean(2)
    k = rope(rms_norm(pooled, k_norm), cos[:: shape.block], sin[:: shape.block])
    products = rope(q, cos, sin) @ k.unsqueeze(1).transpose(-1, -2)
    best = products.amax(1)
    return products.relu().sum(1) / math.sqrt(shape.index_dim), best


def visible_blocks(start_BT: Tensor, block: int) -> Tensor:
    """Return which complete blocks of its own document each token sees, [B, T, N]."""
    length = start_BT.shape[1]
    here = torch.arange(length, device=start_BT.device)
    first = here[::block]
    return (first >= start_BT.unsqueeze(-1)) & (first + block - 1 <= here[:, None])


def chosen_tokens(scores_BTN: Tensor, visible_BTN: Tensor, shape: AttentionShape) -> Tensor:
    """Return the mask [B, T, T] of tokens in the best blocks and in the open block."""
    length = scores_BTN.shape[1]
    count = min(shape.top_blocks, scores_BTN.shape[2])
    ranked = scores_BTN.detach().masked_fill(~visible_BTN, -math.inf).topk(count, dim=-1).indices
    chosen = torch.zeros_like(visible_BTN).scatter(-1, ranked, True) & visible_BTN
    here = torch.arange(length, device=scores_BTN.device)
    tail = (here >= (here[:, None] + 1) // shape.block * shape.block) & (here <= here[:, None])
    return chosen.repeat_interleave(shape.block, dim=-1) | tail


def _indexer_losses(
    scores: Tensor, best: Tensor, visible: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor]:
    """Return divergence from the attention mass and the margin loss, means over query tokens."""
    some = visible.any(-1)
    target = mass * visible
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-6)
    log_q = torch.log_softmax(scores.masked_fill(~visible, -1e4), dim=-1)
    divergence = (target * (target.clamp_min(1e-9).log() - log_q)).sum(-1)
    short = ((_MARGIN - best).relu() * visible).sum(-1) / visible.sum(-1).clamp_min(1)
    count = some.sum().clamp_min(1)
    return (divergence * some).sum() / count, (short * some).sum() / count


def sparse_attention(
    x_BTD: Tensor,
    weights: dict[str, Tensor],
    start_BT: Tensor,
    cos: Tensor,
    sin: Tensor,
    shape: AttentionShape,
    select: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention output [B, T, D], the divergence loss and the margin loss.

    With `select` off every visible token is attended (warm-up); the indexer is trained either way.
    """
    qg = linear(x_BTD, weights["q_proj"]).unflatten(-1, (shape.heads, 2 * shape.head_dim))
    q, gate = qg.chunk(2, dim=-1)
    k, v = (
        linear(x_BTD, weights[n]).unflatten(-1, (shape.kv_heads, shape.head_dim)).transpose(1, 2)
        for n in ("k_proj", "v_proj")
    )
    q = rope(rms_norm(q, weights["q_norm"]).transpose(1, 2), cos, sin).to(x_BTD.dtype)
    k = rope(rms_norm(k, weights["k_norm"]), cos, sin).to(x_BTD.dtype)
    share = shape.heads // shape.kv_heads
    k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
    here = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    causal = (here <= here[:, None]) & (here >= start_BT.unsqueeze(-1))
    logits = (q @ k.transpose(-1, -2)).float() * shape.head_dim**-0.5
    logits = logits.masked_fill(~causal.unsqueeze(1), -1e30)

    scores, best = index_scores(
        x_BTD.detach(), weights["index_qk_proj"], weights["index_q_norm"], weights["index_k_norm"],
        cos, sin, shape,
    )  # fmt: skip
    visible = visible_blocks(start_BT, shape.block)
    with torch.no_grad():
        mass = torch.softmax(logits, dim=-1).sum(1).unflatten(-1, (-1, shape.block)).sum(-1)
    divergence, margin = _indexer_losses(scores, best, visible, mass)

    if select:
        kept = chosen_tokens(scores, visible, shape)
        logits = logits.masked_fill(~kept.unsqueeze(1), -1e30)
    out = (torch.softmax(logits, dim=-1).to(x_BTD.dtype) @ v).transpose(1, 2)
    out = out.flatten(-2) * torch.sigmoid(gate.flatten(-2))
    return linear(out, weights["o_proj"]), divergence, margin
