"""What the towers share: dense layers with biases, norms, the grid of an image's patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.quant_linear import PlainMatrix, linear
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.rope import RotaryFrequencies, default_rope

# Legend: P patches, D width of the tower, N outputs, K inputs, F rotary frequencies.


@dataclass(frozen=True, slots=True)
class Affine:
    """x W^T + b: [P, K] to [P, N], computed in fp32, returned in the type asked for.

    Vision weights are stored plainly in every release, whatever the format of the language model,
    so no other form is looked for. Every rank holds the whole.
    """

    weight: torch.Tensor  # [N, K], or [N, ...] of a convolution whose stride is its size
    bias: torch.Tensor | None

    @classmethod
    def load(
        cls, reader: WeightReader, name: str, shape: tuple[int, ...], *, bias: bool = True
    ) -> Affine:
        """Read `<name>.weight` of `shape` and, with `bias`, `<name>.bias`."""
        return cls(
            weight=reader.tensor(f"{name}.weight", shape),
            bias=reader.tensor(f"{name}.bias", shape[:1]) if bias else None,
        )

    def __call__(self, x_PK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        y_PN = linear(x_PK, PlainMatrix(self.weight.flatten(1)), torch.float32)
        if self.bias is not None:
            y_PN = y_PN + self.bias.float()
        return y_PN.to(dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * w + b over the last dimension, in fp32."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    @classmethod
    def load(cls, reader: WeightReader, name: str, size: int, eps: float) -> LayerNorm:
        """Read `<name>.weight` and `<name>.bias`, [size] each."""
        weight, bias = (reader.tensor(f"{name}.{part}", (size,)) for part in ("weight", "bias"))
        return cls(weight, bias, eps)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = x.float()
        centred = x - x.mean(-1, keepdim=True)
        scale = centred.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (centred * scale * self.weight.float() + self.bias.float()).to(dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x * Phi(x) with the normal distribution's Phi, in fp32, returned in the type of x."""
    wide = x.float()
    return (wide * torch.erf(wide * math.sqrt(0.5)).add_(1.0).mul_(0.5)).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of GELU, in fp32, returned in the type of x."""
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.tanh(inner).add_(1.0).mul_(0.5)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """How pixel values 0..255 become inputs: (x / 255 - mean) / std per channel."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, pixels_HW3: torch.Tensor) -> torch.Tensor:
        """fp32 [H, W, 3] of uint8 pixels."""
        mean, std = (pixels_HW3.new_tensor(v, dtype=torch.float32) for v in (self.mean, self.std))
        return (pixels_HW3.float() / 255.0 - mean) / std


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of an image: `rows` times `columns`, in the order of reading."""

    rows: int
    columns: int

    @classmethod
    def of(cls, height: int, width: int, unit: int) -> Grid:
        """Of an image in pixels; ValueError unless both sides are multiples of `unit` pixels."""
        if height < unit or width < unit or height % unit or width % unit:
            raise ValueError(
                f"the image has {height} x {width} pixels; both sides must be multiples of {unit}"
            )
        return cls(height // unit, width // unit)

    def merged_order(self, merge: int, device: torch.device) -> torch.Tensor:
        """Numbers of the patches, int64 [P], such that every block of merge x merge is together."""
        numbers = torch.arange(self.rows * self.columns, device=device)
        blocks = numbers.view(self.rows // merge, merge, self.columns // merge, merge)
        return blocks.transpose(1, 2).flatten()

    def coordinates(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of every patch, int64 [P] each."""
        rows = torch.arange(self.rows, device=device)
        columns = torch.arange(self.columns, device=device)
        return rows.repeat_interleave(self.columns), columns.repeat(self.rows)


def cut_patches(image_HW3: torch.Tensor, patch: int) -> torch.Tensor:
    """Patches [P, 3, patch, patch] of an image in the order of reading."""
    height, width, _ = image_HW3.shape
    cells = image_HW3.view(height // patch, patch, width // patch, patch, 3)
    return cells.permute(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)


@dataclass(frozen=True, slots=True)
class AxialRope:
    """Rotary angles of a patch: a quarter of a head's width turns with its row, a quarter with its
    column, and the other half is the partner of these."""

    frequencies: RotaryFrequencies

    @classmethod
    def make(cls, head_dim: int, theta: float, device: torch.device) -> AxialRope:
        """theta^(-4i / head_dim) for i < head_dim / 4."""
        return cls(default_rope(theta, head_dim // 2).to(device))

    def angles(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin fp32 [P, head_dim / 2]: of the row, then of the column."""
        inverse_F = self.frequencies.inverse_F
        turns = [c.float()[:, None] * inverse_F for c in grid.coordinates(inverse_F.device)]
        angles = torch.cat(turns, dim=1)
        return angles.cos(), angles.sin()
