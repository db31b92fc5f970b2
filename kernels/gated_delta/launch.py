"""Launches of the Triton kernels: three for a call. None synchronises with the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.gated_delta import Slots, configs
from kernels.gated_delta.triton import FACTORS, delta_pass, finish, prepare
from kernels.gated_delta.triton import C as CHUNK

# Legend: T packed tokens, B sequences, N slots of chunks, G key heads, H value heads, K key dim,
# V value dim, W writes, S slots of a pool of states, C tokens of a chunk.

C: int = CHUNK.value


@dataclass(frozen=True, slots=True)
class States:
    """Where states are read and written: [B, H, K, V] and [W, H, K, V], or with `slots` pools
    [S, H, K, V], which may be the same one.
    """

    read: torch.Tensor
    written: torch.Tensor
    slots: Slots | None = None

    def __post_init__(self) -> None:
        for x in (self.read, self.written):
            assert x.dtype == torch.float32 and x.is_contiguous()
        assert self.read.shape[1:] == self.written.shape[1:]


def states_of(state: torch.Tensor, write_token_W: torch.Tensor, slots: Slots | None) -> States:
    """`state` as it was given to the package, and where the writes go."""
    if slots is None:
        return States(state, state.new_empty(len(write_token_W), *state.shape[1:]))
    return States(state, state, slots)


@dataclass(frozen=True, slots=True)
class Tiles:
    """What a chunk's preparation leaves for the pass.

    solved and weights bf16 [N, H, C, C]; factors fp32 [N, H, FACTORS, C], or [N, H, K] for
    decays of channels, which have bf16 keys, queries and updates [N, H, C, K] too.
    """

    solved: torch.Tensor
    weights: torch.Tensor
    factors: torch.Tensor
    scaled: tuple[torch.Tensor, ...] = ()


def slots_of(tokens: int, sequences: int) -> int:
    """Chunks that `tokens` of `sequences` have at most."""
    return tokens // C + sequences


def rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] with the values of a token side by side; copied only where they are not."""
    whole = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if whole else x.contiguous()


def gated_delta(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    states: States,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    """Fill `out` (fp32 or bf16) and the states of the writes; see the package.

    q, k, v may be slices of wider rows. Can be captured in a CUDA graph.
    """
    tokens, heads, _ = v_THV.shape
    key_heads, width = k_TGK.shape[1:]
    sequences = len(starts_B1) - 1
    if tokens == 0 or sequences <= 0:
        return
    q, k, v = rows(q_TGK), rows(k_TGK), rows(v_THV)
    decay, beta = decay_TH.contiguous(), beta_TH.contiguous()
    slots = slots_of(tokens, sequences)
    tiles = matrices(slots, heads, FACTORS.value * C, q.device)
    prepare[(slots * heads,)](
        q, k, decay, beta, starts_B1, tiles.solved, tiles.weights, tiles.factors, tokens,
        sequences, heads, heads // key_heads, q.stride(0), k.stride(0), width**-0.5, K=width,
        num_warps=configs.WARPS, num_stages=1,
    )  # fmt: skip
    run_pass(q, k, v, decay, tiles, states, starts_B1, write_token_W, out_THV)


def matrices(
    slots: int,
    heads: int,
    factors: int,
    device: torch.device,
    scaled: tuple[torch.Tensor, ...] = (),
) -> Tiles:
    solved, weights = (
        torch.empty(slots, heads, C, C, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    return Tiles(solved, weights, torch.empty(slots, heads, factors, device=device), scaled)


def run_pass(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    decay: torch.Tensor,
    tiles: Tiles,
    states: States,
    starts_B1: torch.Tensor,
    write_token_W: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    """The pass over chunks of which `tiles` are prepared."""
    tokens, heads, values = v_THV.shape
    key_heads, width = k_TGK.shape[1:]
    sequences = len(starts_B1) - 1
    for size in (width, values):
        assert 32 <= size <= 128 and size & (size - 1) == 0, "a width is 32, 64 or 128"
    assert states.read.shape[1:] == (heads, width, values)
    assert out_THV.is_contiguous() and out_THV.shape == v_THV.shape
    assert starts_B1.is_contiguous() and write_token_W.is_contiguous()
    keys, queries, updates = tiles.scaled or (k_TGK, q_TGK, k_TGK)
    slots = states.slots or Slots(starts_B1, write_token_W)
    assert slots.read_B.is_contiguous() and slots.write_W.is_contiguous()
    assert len(slots.read_B) >= sequences and len(slots.write_W) == len(write_token_W)
    assert states.slots or len(states.read) >= sequences
    block = min(configs.BLOCK_VALUES, values)
    writes = len(write_token_W)
    slices = heads * (values // block)
    constants = {
        "K": width, "V": values, "BV": block, "CHANNELS": bool(tiles.scaled),
        "POOL": states.slots is not None,
    }  # fmt: skip
    delta_pass[(sequences * slices,)](
        keys, queries, updates, v_THV, tiles.solved, tiles.weights, tiles.factors, states.read,
        out_THV, states.written, starts_B1, write_token_W, slots.read_B, slots.write_W, tokens,
        sequences, writes, states.read.shape[0], states.written.shape[0], H=heads,
        GROUP=heads // key_heads, Q_ROW=q_TGK.stride(0), K_ROW=k_TGK.stride(0),
        V_ROW=v_THV.stride(0), **constants, num_warps=configs.PASS_WARPS,
        num_stages=configs.stages(v_THV.device),
    )  # fmt: skip
    if writes:
        finish[(writes * slices,)](
            keys, updates, k_TGK, v_THV, decay, tiles.solved, tiles.factors, states.written,
            starts_B1, write_token_W, slots.write_W, tokens, sequences, writes,
            states.written.shape[0], heads, heads // key_heads, k_TGK.stride(0), v_THV.stride(0),
            **constants, num_warps=configs.WARPS, num_stages=1,
        )  # fmt: skip
