"""The kernels around humming's products, in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels import backend
from kernels.humming import launch, runtime
from kernels.humming.forms import FORMS, StoredMatrix
from kernels.humming.matrix import HummingMatrix, Kernel, KernelTable
from kernels.humming.repack import repack
from kernels.humming.samples import random_weights
from kernels.moe import ExpertWeights, reference
from kernels.quant_linear import dequantize

DEVICE = "cpu" if backend.interpreted() else "cuda"


def expected_tiles(
    ids: np.ndarray, first: int, experts: int, block: int
) -> tuple[list[int], list[int]]:
    order: list[int] = []
    tiles: list[int] = []
    for expert in range(experts):
        pairs = np.flatnonzero(ids.reshape(-1) == first + expert).tolist()
        blocks = -(-len(pairs) // block)
        order += pairs + [ids.size] * (blocks * block - len(pairs))
        tiles += [expert] * blocks
    return order, tiles


@pytest.mark.parametrize(
    ("tokens", "top_k", "first", "experts", "block"),
    [
        (1, 6, 0, 16, 8),
        (65, 3, 0, 5, 16),
        (400, 3, 8, 4, 48),
        (63, 2, 100, 3, 8),
        (7, 1, 0, 1, 128),
        (2100, 2, 0, 6, 8),
    ],
)
def test_pairs_are_in_whole_tiles_of_one_expert(
    tokens: int, top_k: int, first: int, experts: int, block: int
) -> None:
    ids = torch.randint(-2, 20, (tokens, top_k))
    ids[0, 0] = 2**40
    found = launch.align(ids.to(DEVICE), first, experts, block)
    order, tiles = expected_tiles(ids.numpy(), first, experts, block)
    assert int(found.total) == len(order)
    assert len(tiles) <= len(found.tiles) and len(order) <= len(found.order)
    assert found.order[: len(order)].tolist() == order
    assert found.tiles[: len(tiles)].tolist() == tiles


@pytest.mark.parametrize(("pairs", "experts", "block"), [(1, 256, 8), (6, 4, 16), (1000, 7, 48)])
def test_there_is_room_for_the_worst_routes(pairs: int, experts: int, block: int) -> None:
    few = min(pairs, experts)
    worst = (few - 1) + -(-(pairs - few + 1) // block)
    assert launch.most_tiles(pairs, experts, block) >= worst


class ByTorch:
    """Stands for the kernels of stacks: the products that they are for."""

    def __init__(self, stacks: list[tuple[HummingMatrix, torch.Tensor]]) -> None:
        self._dense = {id(matrix): dense_ENK for matrix, dense_ENK in stacks}

    def launch(
        self,
        matrix: HummingMatrix,
        kernel: Kernel,
        x: torch.Tensor,
        out: torch.Tensor,
        order: Any,
        top_k: int = 1,
    ) -> None:
        rows, tiles, total = order
        block = kernel.block_m
        for tile in range(int(total) // block):
            weight = self._dense[id(matrix)][int(tiles[tile])]
            for row in rows[tile * block : (tile + 1) * block].tolist():
                if row < x.shape[0] * top_k:
                    out[row] = (x[row // top_k].float() @ weight.t()).to(out.dtype)


def in_order(stored: StoredMatrix) -> HummingMatrix:
    """A stack on the device, with a table of kernels that only a test runs."""
    weight, scale, _ = repack(stored, FORMS["mxfp4"])
    kernels = tuple(Kernel(torch.tensor([0, 1, block, 1]), block) for block in (16, 48))
    table = KernelTable(
        "mxfp4", stored.out_features, stored.in_features, True, (2.0, float("inf")), kernels
    )
    locks = runtime.new_locks(torch.device(DEVICE))
    return HummingMatrix(weight.to(DEVICE), scale.to(DEVICE), None, locks, table)


@pytest.mark.parametrize(("tokens", "first", "limit"), [(1, 0, None), (5, 0, 1.0), (33, 2, None)])
def test_experts_agree_with_the_reference(
    tokens: int, first: int, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, inner, count, top_k = 128, 64, 4, 3
    stored = [
        random_weights("mxfp4", n, k, count, "cpu")
        for n, k in ((2 * inner, hidden), (hidden, inner))
    ]
    ready = [in_order(matrix) for matrix in stored]
    dense = [dequantize(matrix).to(DEVICE) for matrix in stored]
    monkeypatch.setattr(runtime, "launch", ByTorch(list(zip(ready, dense, strict=True))).launch)
    x = (torch.randn(tokens, hidden) * 0.05).bfloat16()
    ids, weights = torch.rand(tokens, 8).topk(top_k).indices, torch.rand(tokens, top_k)
    out = torch.full((tokens, hidden), torch.nan, device=DEVICE)
    experts = ExpertWeights(ready[0], ready[1], count, first, 8)
    launch.routed_experts(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), experts, limit, out)
    of_reference = ExpertWeights(stored[0], stored[1], count, first, 8)
    expected = reference.routed_experts(x.float(), ids, weights, of_reference, limit)
    found = out.cpu()
    assert not bool(found.isnan().any())
    assert float((found - expected).norm()) <= 1e-2 * float(expected.norm())


def test_no_tokens_launch_nothing() -> None:
    stored = random_weights("mxfp4", 128, 128, 2, "cpu")
    gate_up, down = in_order(stored), in_order(random_weights("mxfp4", 128, 64, 2, "cpu"))
    empty = torch.empty(0, 128, device=DEVICE)
    ids = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    experts = ExpertWeights(gate_up, down, 2)
    out = launch.routed_experts(empty, ids, ids.float(), experts, None, empty)
    assert out.shape == (0, 128)
