"""Launches of humming's kernels: checks, choice by rows, intermediate results.

No host synchronisation, so a CUDA graph can hold them; modules are loaded before the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.humming import runtime
from kernels.humming.matrix import HummingMatrix, Kernel
from kernels.humming.triton import align_pairs, swiglu
from kernels.moe.triton import weighted_sum

if TYPE_CHECKING:
    from kernels.moe import ExpertWeights

# Legend: T tokens, k experts of a token, P = T k pairs, E experts, H hidden, I intermediate.

BLOCK, WARPS = 1024, 4
MANY_PAIRS = 4096  # from which on align_pairs reads so many at a time
FEWEST_BINS = 128
TILE_LANES = 32
ALIGNMENT_BYTES = 16


def quant_linear(x_MK: torch.Tensor, weight: HummingMatrix, out_MN: torch.Tensor) -> torch.Tensor:
    """out = x W^T. x [M, K] and out [M, N] contiguous, of any floating type; rounded to bf16 both.

    With another type than bf16 x or the result is converted by a kernel of its own.
    """
    rows = x_MK.shape[0]
    assert not weight.table.stack and x_MK.is_contiguous() and out_MN.is_contiguous()
    assert x_MK.shape == (rows, weight.in_features) and out_MN.shape == (rows, weight.out_features)
    if rows == 0:
        return out_MN
    x = x_MK.bfloat16()
    assert x.data_ptr() % ALIGNMENT_BYTES == 0
    plain = out_MN.dtype == torch.bfloat16 and out_MN.data_ptr() % ALIGNMENT_BYTES == 0
    out = out_MN if plain else torch.empty(out_MN.shape, dtype=torch.bfloat16, device=x.device)
    runtime.launch(weight, weight.table.pick(rows), x, out)
    return out_MN if plain else out_MN.copy_(out)


@dataclass(frozen=True, slots=True)
class Aligned:
    """The pairs as a kernel reads them: rows in order, experts of tiles, number of rows."""

    order: torch.Tensor
    tiles: torch.Tensor
    total: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.order, self.tiles, self.total


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Tiles of block_m rows that `pairs` pairs fill at most, however they fall to experts."""
    return (pairs + min(pairs, experts) * (block_m - 1)) // block_m


def align(ids_Tk: torch.Tensor, first_expert: int, experts: int, block_m: int) -> Aligned:
    """Whole tiles of block_m pairs of one expert each. Ids int64, any value."""
    pairs, device = ids_Tk.numel(), ids_Tk.device
    tiles = most_tiles(pairs, experts, block_m)
    found = Aligned(
        torch.empty(tiles * block_m, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    values, warps = alignment(pairs)
    align_pairs[(-(-experts // values["GROUP"]),)](
        ids_Tk, *found.tensors, pairs, first_expert, experts, block_m, EXPERTS=bins(experts),
        **values, num_warps=warps,
    )  # fmt: skip
    return found


def alignment(pairs: int) -> tuple[dict[str, int], int]:
    """Constants of align_pairs, and its warps: what all programs repeat is most of its work."""
    if pairs > MANY_PAIRS:
        return {"BP": MANY_PAIRS, "BT": TILE_LANES, "GROUP": 4}, 2 * WARPS
    return {"BP": BLOCK, "BT": TILE_LANES, "GROUP": 1}, WARPS


def bins(experts: int) -> int:
    """A power of two, at least the experts and at least the threads of the kernel."""
    return max(FEWEST_BINS, 1 << (experts - 1).bit_length())


def routed_experts(
    x_TH: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    experts: ExpertWeights,
    limit: float | None,
    out_TH: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` fp32 [T, H]; arguments as in kernels/moe/launch.py. Five launches.

    Ids out of this rank's range contribute nothing. Both products are rounded to bf16. Memory of
    P (I + max(2 I, H)) bf16 is allocated, in a graph from its pool.
    """
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, HummingMatrix) and isinstance(down, HummingMatrix)
    (tokens, top_k), inner = ids_Tk.shape, down.in_features
    assert gate_up.table.stack and down.table.stack
    assert gate_up.weight.shape[0] == experts.count == down.weight.shape[0]
    assert x_TH.shape == (tokens, gate_up.in_features) == out_TH.shape
    assert gate_up.out_features == 2 * inner and down.out_features == x_TH.shape[1]
    assert ids_Tk.is_contiguous() and weights_Tk.is_contiguous() and out_TH.is_contiguous()
    assert ids_Tk.dtype == torch.int64 and weights_Tk.dtype == torch.float32 == out_TH.dtype
    if tokens == 0:
        return out_TH
    pairs, device = tokens * top_k, x_TH.device
    x = x_TH.bfloat16().contiguous()
    mean = pairs / (experts.total or experts.count)
    one, two = gate_up.table.pick(mean), down.table.pick(mean)
    first = align(ids_Tk, experts.first_expert, experts.count, one.block_m)
    same = one.block_m == two.block_m
    second = first if same else align(ids_Tk, experts.first_expert, experts.count, two.block_m)
    # The gate-up products are read when the down products are written: one memory for both.
    products = torch.empty(pairs * max(2 * inner, x.shape[1]), dtype=torch.bfloat16, device=device)
    hidden = torch.empty(pairs, inner, dtype=torch.bfloat16, device=device)
    _product(gate_up, one, x, products, first, top_k)
    swiglu[(pairs, -(-inner // BLOCK))](
        products, hidden, ids_Tk, experts.first_expert, experts.count, limit or 0.0, inner,
        LIMIT=limit is not None, BI=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    _product(down, two, hidden, products, second, 1)
    weighted_sum[(tokens, -(-x.shape[1] // BLOCK))](
        products, ids_Tk, weights_Tk, out_TH, experts.first_expert, experts.count, x.shape[1],
        TOP_K=top_k, BN=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out_TH


def _product(
    weight: HummingMatrix,
    kernel: Kernel,
    x: torch.Tensor,
    products: torch.Tensor,
    pairs: Aligned,
    top_k: int,
) -> None:
    """The rows of x / top_k in order, times their expert's matrix, to the first P rows."""
    rows = x.shape[0] * top_k
    out = products[: rows * weight.out_features].view(rows, weight.out_features)
    runtime.launch(weight, kernel, x, out, pairs.tensors, top_k)


def warm_up(weight: HummingMatrix) -> None:
    """Run each kernel once on a row of zeros: modules do not load while a graph is captured."""
    device = weight.weight.device
    x = torch.zeros(1, weight.in_features, dtype=torch.bfloat16, device=device)
    out = torch.empty(1, weight.out_features, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for kernel in weight.table.kernels:
        if weight.table.stack:
            runtime.launch(weight, kernel, x, out, align(ids, 0, 1, kernel.block_m).tensors)
        else:
            runtime.launch(weight, kernel, x, out)
