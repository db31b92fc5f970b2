# ruff: noqa: N803 (shape suffixes)
"""The formulas of the architecture as plain functions for training on packed rows.

Each function computes what the transformers implementation computes (a test compares them),
without its Python loops. A row holds several documents; `pos` is a token's index in its document
and `start` the row index where its document begins, a multiple of the indexer's block size. Shape
letters: B rows, T tokens of a row, D hidden, S residual streams, H heads, E experts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

EPS = 1e-6
_RESET = 60.0  # decay exponent that erases the recurrent state where a new document begins
_CHUNK = 64
_BASE = 16


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Apply `weight` in the dtype of `x`."""
    out: Tensor = F.linear(x, weight.to(x.dtype))
    return out


def rms_norm(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """Zero-centred RMS norm in fp32 over each of `groups` equal parts of the last axis."""
    parts: Tensor = x.float().unflatten(-1, (groups, -1))
    parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + EPS)
    return parts.flatten(-2) * (1.0 + weight.float())


def hc_read(
    r_BTSD: Tensor,
    norm: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Read the block input [B, T, D] and the injection weights [B, T, S] from the streams."""
    streams = r_BTSD.shape[2]
    xn = rms_norm(r_BTSD.flatten(2), norm, streams).to(dtype)
    gate = torch.sigmoid(linear(F.silu(linear(xn, down) / streams), up))
    x = (gate * xn).unflatten(-1, (streams, -1)).mean(2)
    if inject is None:
        return x, None
    return x, 2 * torch.sigmoid(linear(xn, inject) / streams)


def hc_write(r_BTSD: Tensor, y_BTD: Tensor, inject_BTS: Tensor) -> Tensor:
    """Add the block output to every stream by its injection weight."""
    return r_BTSD + y_BTD.unsqueeze(2).to(r_BTSD.dtype) * inject_BTS.unsqueeze(-1).to(r_BTSD.dtype)


def causal_conv(x_BTC: Tensor, weight_CK: Tensor, pos_BT: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise causal convolution that does not reach over the start of a document."""
    taps = weight_CK.shape[1]
    out = x_BTC * weight_CK[:, taps - 1].to(x_BTC.dtype)
    for back in range(1, taps):
        distance = back * dilation
        shifted = F.pad(x_BTC, (0, 0, distance, 0))[:, : x_BTC.shape[1]]
        shifted = shifted * (pos_BT >= distance).unsqueeze(-1)
        out = out + shifted * weight_CK[:, taps - 1 - back].to(x_BTC.dtype)
    return out


def gdn_inputs(
    x_BTD: Tensor,
    qkv: Tensor,
    conv: Tensor,
    a_weight: Tensor,
    b_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    pos_BT: Tensor,
    shape: tuple[int, int, int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k [B, H, T, K], v [B, H, T, V], log decay and beta [B, H, T], all fp32.

    `shape` is (key heads, value heads, key width, value width).
    """
    k_heads, v_heads, k_dim, v_dim = shape
    mixed = F.silu(causal_conv(linear(x_BTD, qkv), conv, pos_BT)).float()
    q, k, v = mixed.split([k_heads * k_dim, k_heads * k_dim, v_heads * v_dim], dim=-1)
    q, k = (t.unflatten(-1, (k_heads, k_dim)) for t in (q, k))
    q, k = (t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + EPS) for t in (q, k))
    q = q * k_dim**-0.5
    q, k = (t.repeat_interleave(v_heads // k_heads, dim=2).transpose(1, 2) for t in (q, k))
    v = v.unflatten(-1, (v_heads, v_dim)).transpose(1, 2)
    decay = -a_log.float().exp() * F.softplus(linear(x_BTD, a_weight).float() + dt_bias.float())
    decay = torch.where((pos_BT == 0).unsqueeze(-1), decay - _RESET, decay)
    beta = torch.sigmoid(linear(x_BTD, b_weight)).float()
    return q, k, v, decay.transpose(1, 2), beta.transpose(1, 2)


def _diagonal_blocks(a: Tensor, size: int, row: int, column: int, step: int) -> Tensor:
    """Return blocks (row + step*i, column + step*i) of width `size` as [..., i, size, size]."""
    count = a.shape[-1] // size
    blocks = a.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    picked: Tensor = blocks[..., row::step, :, column::step, :]
    return picked.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return (I + a)^-1 for strictly lower triangular `a` [..., C, C], C = 16 * 2^n.

    16-wide diagonal blocks by the finite Neumann product, then pairs of blocks are joined.
    """
    power = -_diagonal_blocks(a, _BASE, 0, 0, 1)
    eye = torch.eye(_BASE, dtype=a.dtype, device=a.device)
    inverse = eye + power
    for _ in range(int(math.log2(_BASE)) - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    size = _BASE
    while size < a.shape[-1]:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        low = -second @ _diagonal_blocks(a, size, 1, 0, 2) @ first
        top = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([top, torch.cat([low, second], dim=-1)], dim=-2)
        size *= 2
    return inverse.squeeze(-3)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule from an empty state, in chunks of 64; returns [B, H, T, V] in fp32.

    T must be a multiple of 64. Formulas: section 3.4 of the family's public description.
    """
    chunks = q.shape[2] // _CHUNK
    q, k, v = (t.unflatten(2, (chunks, _CHUNK)) for t in (q, k, v))
    beta = beta.unflatten(2, (chunks, _CHUNK)).unsqueeze(-1)
    total = decay.unflatten(2, (chunks, _CHUNK)).cumsum(-1)
    above = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).triu(1)
    pair = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, -math.inf).exp()
    inside = (q @ k.transpose(-1, -2)) * pair
    system = ((k * beta) @ k.transpose(-1, -2) * pair).tril(-1)
    inverse = unit_lower_inverse(system)
    grown = total.exp().unsqueeze(-1)
    values = inverse @ (v * beta)
    reads = inverse @ (k * beta * grown)
    q = q * grown
    last = total[..., -1:]
    k = (k * (last - total).exp().unsqueeze(-1)).transpose(-1, -2)
    keep = last.exp().unsqueeze(-1)
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype, device=q.device)
    outs = []
    for i in range(chunks):
        fresh = values[:, :, i] - reads[:, :, i] @ state
        outs.append(q[:, :, i] @ state + inside[:, :, i] @ fresh)
        state = state * keep[:, :, i] + k[:, :, i] @ fresh
    return torch.cat(outs, dim=2)


def gdn_output(
    o_BHTV: Tensor, x_BTD: Tensor, z_weight: Tensor, norm: Tensor, out: Tensor
) -> Tensor:
    """Normalise each head, gate with sigmoid(z) and project back to the hidden width."""
    heads, width = o_BHTV.shape[1], o_BHTV.shape[3]
    z = linear(x_BTD, z_weight).unflatten(-1, (heads, width)).float()
    o = o_BHTV.transpose(1, 2)
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS) * norm.float() * torch.sigmoid(z)
    return linear(o.flatten(-2).to(x_BTD.dtype), out)


def rope_tables(
    length: int, width: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, width] of plain rotary positions 0..T-1."""
    inverse = 1.0 / theta ** (torch.arange(0, width, 2, device=device).float() / width)
    angle = torch.arange(length, device=device).float()[:, None] * inverse
    return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dims of `x` [..., T, W]; cos and sin are [T, R]."""
    width = cos.shape[-1]
    head, tail = x[..., :width], x[..., width:]
    turned = torch.cat([-head[..., width // 2 :], head[..., : width // 2]], dim=-1)
    return torch.cat([head * cos + turned * sin, tail], dim=-1)


def moe(
    x_BTD: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Routed experts, computed densely; returns the output and the load-balance loss."""
    experts = gate.shape[0]
    probs = torch.softmax(linear(x_BTD, gate).float(), dim=-1)
    value, index = probs.topk(top_k, dim=-1)
    chosen = torch.zeros_like(probs).scatter(-1, index, 1.0)
    weight = chosen * probs / value.sum(-1, keepdim=True)
    hidden = linear(x_BTD, gate_up.flatten(0, 1)).unflatten(-1, (experts, -1))
    up_gate, up = hidden.chunk(2, dim=-1)
    hidden = F.silu(up_gate) * up * weight.unsqueeze(-1).to(x_BTD.dtype)
    y = linear(hidden.flatten(-2), down.permute(1, 0, 2).flatten(1))
    balance = experts * (chosen.mean((0, 1)) * probs.mean((0, 1))).sum() / top_k
    return y, balance


def shared_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, switch: Tensor) -> Tensor:
    """The always-on expert, scaled by its scalar gate."""
    y = linear(F.silu(linear(x, gate)) * linear(x, up), down)
    return torch.sigmoid(linear(x, switch)) * y


def ple_rows(
    ids_BT: Tensor, pos_BT: Tensor, eos: int, multipliers: Tensor, sizes: Tensor, offsets: Tensor
) -> Tensor:
    """Return the table rows [B, T, heads] of each token's 2-gram and 3-gram."""
    one = torch.where(pos_BT >= 1, ids_BT.roll(1, 1), eos)
    two = torch.where((pos_BT >= 2) & (one != eos), ids_BT.roll(2, 1), eos)
    pair = (ids_BT * multipliers[0]) ^ (one * multipliers[1])
    triple = pair ^ (two * multipliers[2])
    half = sizes.shape[0] // 2
    mixed = torch.cat([t.unsqueeze(-1).expand(-1, -1, half) for t in (pair, triple)], dim=-1)
    return mixed % sizes + offsets


def ple(
    r_BTSD: Tensor,
    e_BTP: Tensor,
    key: Tensor,
    value: Tensor,
    norms: tuple[Tensor, Tensor, Tensor],
    conv: Tensor,
    pos_BT: Tensor,
    dilation: int,
) -> Tensor:
    """Return the streams with the n-gram features added; `norms` are key, query and conv."""
    streams, width = r_BTSD.shape[2:]
    k = rms_norm(linear(e_BTP, key), norms[0], streams).unflatten(-1, (streams, width))
    q = rms_norm(r_BTSD.flatten(2), norms[1], streams).unflatten(-1, (streams, width))
    score = (k * q).sum(-1, keepdim=True) / math.sqrt(width)
    score = score.abs().clamp_min(EPS).sqrt() * score.sign()
    gated = torch.sigmoid(score) * linear(e_BTP, value).float().unsqueeze(2)
    normed = rms_norm(gated.flatten(2), norms[2], streams)
    mixed = F.silu(causal_conv(normed, conv, pos_BT, dilation))
    out: Tensor = r_BTSD + gated + mixed.unflatten(-1, (streams, width))
    return out
