"""Launches of the Triton kernels: checks, configuration, workspace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kernels import backend
from kernels.quant_linear import tuning
from kernels.quant_linear.decode import BF16, E8M0, FP8, FP16, FP32, INT4, MXFP4
from kernels.quant_linear.matrix import BLOCK_BYTES, Fp8BlockMatrix, Int4Matrix, Mxfp4Matrix
from kernels.quant_linear.triton import matrix_matrix, matrix_vector
from kernels.quant_linear.tuning import Config

QuantMatrix = Fp8BlockMatrix | Int4Matrix | Mxfp4Matrix
# Where a card cannot be asked: the interpreter follows the oldest target.
INTERPRETED_TARGET = 80
SCALES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16, torch.uint8: E8M0}


@dataclass(frozen=True, slots=True)
class Layout:
    """A matrix as the kernels see it; row_bytes without what pads rows."""

    format: int
    name: str
    scale: torch.Tensor
    zero: torch.Tensor | None
    group_bytes: int
    block_n: int
    row_bytes: int

    @property
    def constants(self) -> dict[str, int | bool]:
        """The kernels' constants that follow from the format."""
        return {
            "FORMAT": self.format,
            "GROUP": self.group_bytes,
            "BLOCK_N": self.block_n,
            "SCALE": SCALES[self.scale.dtype],
            "ASYMMETRIC": self.zero is not None,
        }

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points as words of 32 bits; scales stand for missing zero points."""
        scale = self.scale if self.scale.dtype == torch.float32 else self.scale.view(torch.int32)
        return scale, scale if self.zero is None else self.zero.view(torch.int32)


def layout_of(weight: QuantMatrix) -> Layout:
    assert weight.order == "fragments", "prepare() the matrix first"
    match weight:
        case Fp8BlockMatrix(_, scale, block_n, block_k):
            assert block_k in (32, 64, 128) and scale.dtype == torch.float32
            return Layout(FP8, "fp8", scale, None, block_k, block_n, weight.in_features)
        case Int4Matrix(_, scale, zero, group):
            assert group in (32, 64, 128)
            return Layout(INT4, "int4", scale, zero, group // 2, 1, weight.in_features // 2)
        case Mxfp4Matrix(_, scale):
            return Layout(MXFP4, "mxfp4", scale, None, 16, 1, weight.in_features // 2)


def configuration(weight: QuantMatrix, rows: int, device: torch.device) -> Config:
    """The tuned configuration of the card for x of `rows` rows."""
    on_card = device.type == "cuda"
    target = backend.target(device.index or 0) if on_card else INTERPRETED_TARGET
    layout = layout_of(weight)
    return tuning.select(target, layout.name, rows, weight.out_features)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory for products that split K: fp32 partial sums, and counters that rest at zero.

    Launches that share one must follow each other on one stream.
    """

    partial: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def allocate(
        cls, weights: Iterable[QuantMatrix], row_counts: Iterable[int], device: torch.device
    ) -> Workspace:
        """Enough for each of `weights` with each of `row_counts` rows."""
        counts = tuple(row_counts)
        needs = [
            workspace_need(weight, rows, configuration(weight, rows, device))
            for weight in weights
            for rows in counts
        ]
        partial = max((need[0] for need in needs), default=0)
        tiles = max((need[1] for need in needs), default=0)
        return cls(
            torch.empty(max(partial, 1), dtype=torch.float32, device=device),
            torch.zeros(max(tiles, 1), dtype=torch.int32, device=device),
        )


def tiles_of(weight: QuantMatrix, rows: int, config: Config) -> int:
    return -(-rows // config.block_m) * -(-weight.out_features // config.block_n)


def workspace_need(weight: QuantMatrix, rows: int, config: Config) -> tuple[int, int]:
    """Elements of `partial` and of `counters` that one launch uses."""
    if config.split == 1:
        return 0, 0
    return config.split * rows * weight.out_features, tiles_of(weight, rows, config)


def quant_linear(
    x_MK: torch.Tensor,
    weight: QuantMatrix,
    out_MN: torch.Tensor,
    workspace: Workspace | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """out = x W^T by a Triton kernel. No host synchronisation; can be captured in a CUDA graph.

    x [M, K] bf16, fp16 or fp32, out [M, N] of any of them, both contiguous; with more rows than
    one, x is rounded to bf16. The split of K is fixed by the configuration, so equal inputs give
    equal bits. Without a workspace one is allocated where the configuration splits.
    """
    rows, outputs = x_MK.shape[0], weight.out_features
    assert x_MK.is_contiguous() and out_MN.is_contiguous() and weight.codes.is_contiguous()
    assert x_MK.shape == (rows, weight.in_features) and out_MN.shape == (rows, outputs)
    if rows == 0:
        return out_MN
    layout = layout_of(weight)
    config = config or configuration(weight, rows, x_MK.device)
    partial, counters = _workspace(workspace, weight, rows, config, out_MN)
    words = weight.codes.view(torch.int32)
    grid = (tiles_of(weight, rows, config), config.split)
    if config.kernel == "vector":
        assert rows == 1
        matrix_vector[grid](
            x_MK, words, *layout.tensors, out_MN, partial, counters, outputs,
            weight.in_features, **vector_constants(layout, config),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    else:
        matrix_matrix[grid](
            x_MK, words, *layout.tensors, out_MN, partial, counters,
            rows, outputs, weight.in_features, **matrix_constants(layout, config),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out_MN


def vector_constants(layout: Layout, config: Config) -> dict[str, int | bool]:
    assert config.block_bytes % BLOCK_BYTES == 0
    return layout.constants | {
        "EVEN": layout.row_bytes % config.block_bytes == 0,
        "BN": config.block_n,
        "BKB": config.block_bytes,
        "SPLIT": config.split,
        "STAGES": config.stages,
    }


def matrix_constants(layout: Layout, config: Config) -> dict[str, int | bool]:
    block = config.block_bytes
    assert block % BLOCK_BYTES == 0 or layout.name == "plain"
    # MXFP4's scale carries the bias of its decoder, and is exact in bf16.
    scale_weight = config.scale_weight or layout.format == MXFP4 or layout.group_bytes < block
    return layout.constants | {
        "EVEN": layout.row_bytes % block == 0,
        "BM": config.block_m,
        "BN": config.block_n,
        "BKB": block,
        "SPLIT": config.split,
        "SCALE_WEIGHT": scale_weight,
        "PTX": not backend.interpreted(),
    }


def _workspace(
    workspace: Workspace | None,
    weight: QuantMatrix,
    rows: int,
    config: Config,
    out_MN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    if config.split == 1:
        return out_MN, out_MN  # not read
    if workspace is None:
        partial, tiles = workspace_need(weight, rows, config)
        workspace = Workspace(
            torch.empty(partial, dtype=torch.float32, device=out_MN.device),
            torch.zeros(tiles, dtype=torch.int32, device=out_MN.device),
        )
    need = workspace_need(weight, rows, config)
    assert workspace.partial.numel() >= need[0] and workspace.counters.numel() >= need[1]
    return workspace.partial, workspace.counters
