"""What a recurrent step works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Legend: B sequences, N rows of each, S slots, H value heads, G key heads, K key dim, V value dim,
# C = 2 G K + H V channels.

TAPS = 4
MOST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the sequences of a step start and leave their states; int64, on the pools' device.

    `read` is the slot to start from. The state after token n of sequence b goes to slot
    `write[b, n]`. A slot outside the pools is read as zeros and not written. `length` [B] counts
    the tokens of each sequence, at most N; rows behind them are no tokens. The slots that one
    sequence writes differ from each other; no other sequence reads or writes them.
    """

    read_B: torch.Tensor
    write_BN: torch.Tensor
    length_B: torch.Tensor

    def __post_init__(self) -> None:
        given = (self.read_B, self.write_BN, self.length_B)
        assert all(x.dtype == torch.int64 and x.is_contiguous() for x in given)
        assert self.read_B.shape == self.length_B.shape == self.write_BN.shape[:1]
        assert 1 <= self.write_BN.shape[1] <= MOST_TOKENS


@dataclass(frozen=True, slots=True)
class Pools:
    """States by slot, both contiguous: the last rows before the convolution [S, 3, C], oldest
    first, in the type of the projections; the matrices [S, H, K, V] in fp32."""

    window_SRC: torch.Tensor
    delta_SHKV: torch.Tensor

    def __post_init__(self) -> None:
        window, delta = self.window_SRC, self.delta_SHKV
        assert window.shape[:2] == (delta.shape[0], TAPS - 1) and delta.dtype == torch.float32
        assert window.is_contiguous() and delta.is_contiguous()

    @property
    def key_heads(self) -> int:
        """G, which follows from the number of channels."""
        heads, key_dim, value_dim = self.delta_SHKV.shape[1:]
        key_heads = (self.window_SRC.shape[2] - heads * value_dim) // (2 * key_dim)
        assert 2 * key_heads * key_dim + heads * value_dim == self.window_SRC.shape[2]
        assert heads % key_heads == 0
        return key_heads


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer: taps [C, 4] in the type of the projections, which on a GPU has 16 bits; of any
    float type `a_log` [H], `dt_bias` [H] (gated delta rule) or [H * K] (KDA) and the norm's weight
    [V]; its epsilon; the gate is "silu" or "sigmoid".
    """

    conv_CJ: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias: torch.Tensor
    norm_V: torch.Tensor
    eps: float
    gate_type: str

    def __post_init__(self) -> None:
        assert self.conv_CJ.shape[1] == TAPS and self.gate_type in ("silu", "sigmoid")
        given = (self.conv_CJ, self.a_log_H, self.dt_bias, self.norm_V)
        assert all(x.is_contiguous() for x in given)


def workspace_of(sequences: int, pools: Pools) -> int:
    """Of so many sequences, in 32 bits: a word of 64 for each value, padded as the kernels do, and
    a counter for each channel of q and k."""
    return words_of(sequences, pools) + sequences * 2 * pools.key_heads * pools.delta_SHKV.shape[2]


def words_of(sequences: int, pools: Pools) -> int:
    """The part of `workspace_of` that comes first and has words of 64 bits."""
    heads, *widths = pools.delta_SHKV.shape[1:]
    return 2 * sequences * heads * padded(max(widths))


def padded(width: int) -> int:
    """The next power of two, and at least the eight that a program divides."""
    return 1 << max(3, (width - 1).bit_length())


def new_workspace(sequences: int, pools: Pools) -> torch.Tensor:
    """What a step needs for up to `sequences` sequences: zeros, and zeros again after every launch,
    so that layers of one shape may share them. Their launches follow each other on one stream."""
    count = workspace_of(sequences, pools)
    return torch.zeros(count, dtype=torch.int32, device=pools.delta_SHKV.device)
