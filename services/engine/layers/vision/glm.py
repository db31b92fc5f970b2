"""The vision tower of GLM-5.3-Flash.

Source: Glm5NextVisionModel of transformers 5.23, apart from the eps of its RMS norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.activation import silu_and_mul
from services.engine.checkpoints.loader import WeightReader
from services.engine.images import ImageSpan
from services.engine.layers.norm import RmsNorm
from services.engine.layers.vision.attention import AttentionShape, VisionAttention
from services.engine.layers.vision.parts import (
    Affine,
    AxialRope,
    Grid,
    LayerNorm,
    Normalisation,
    cut_patches,
    gelu,
)

# Legend: P patches, N tokens of an image, D width of the tower, H hidden, X frames of a patch.

# config.json says 1e-5, the tower was trained with 1e-6: with 1e-5 it sees worse (vLLM 0.33).
NORM_EPS = 1e-6
_MERGER_EPS = 1e-5  # torch's default of a layer norm


@dataclass(frozen=True, slots=True)
class GlmVisionConfig:
    """Sizes of the tower. `hidden` is the language model's, `limit` clamps every SwiGLU."""

    layers: int
    width: int
    heads: int
    intermediate: int
    projection: int  # intermediate width of the merger
    patch: int  # pixels of a side
    frames: int  # of one patch; an image repeats its only one
    merge: int  # patches of a side that become one token
    rope_theta: float
    limit: float
    hidden: int
    normalisation: Normalisation


@dataclass(frozen=True, slots=True)
class _Mlp:
    """down(silu(gate x) * up x), both halves clamped."""

    gate: Affine
    up: Affine
    down: Affine
    limit: float

    @classmethod
    def load(
        cls, reader: WeightReader, width: int, inner: int, limit: float, *, bias: bool
    ) -> _Mlp:
        return cls(
            gate=Affine.load(reader, "gate_proj", (inner, width), bias=bias),
            up=Affine.load(reader, "up_proj", (inner, width), bias=bias),
            down=Affine.load(reader, "down_proj", (width, inner), bias=bias),
            limit=limit,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate(x, x.dtype), self.up(x, x.dtype)
        return self.down(silu_and_mul(gate, up, self.limit), torch.float32)


@dataclass(frozen=True, slots=True)
class _Block:
    """x + attention(norm x), then x + mlp(norm x)."""

    attention_norm: RmsNorm
    attention: VisionAttention
    mlp_norm: RmsNorm
    mlp: _Mlp
    dtype: torch.dtype

    @classmethod
    def load(cls, reader: WeightReader, config: GlmVisionConfig, dtype: torch.dtype) -> _Block:
        width = config.width
        shape = AttentionShape(width, config.heads, ("qkv", "proj"), head_eps=NORM_EPS)
        mlp = reader.at("mlp")
        return cls(
            attention_norm=_norm(reader, "norm1", width),
            attention=VisionAttention.load(reader.at("attn"), shape),
            mlp_norm=_norm(reader, "norm2", width),
            mlp=_Mlp.load(mlp, width, config.intermediate, config.limit, bias=True),
            dtype=dtype,
        )

    def __call__(
        self, x_PD: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        x_PD = x_PD + self.attention(self.attention_norm(x_PD, self.dtype), angles)
        return x_PD + self.mlp(self.mlp_norm(x_PD, self.dtype))


def _norm(reader: WeightReader, name: str, width: int) -> RmsNorm:
    return RmsNorm.load(reader, name, width, NORM_EPS, zero_centred=False)


@dataclass(frozen=True, slots=True)
class GlmVision:
    """Implements `VisionModel`: one token for each block of merge x merge patches."""

    config: GlmVisionConfig
    patch_embed: Affine
    blocks: tuple[_Block, ...]
    norm: RmsNorm
    downsample: Affine
    projection: Affine
    projection_norm: LayerNorm
    merger: _Mlp
    rope: AxialRope
    dtype: torch.dtype

    atomic_spans = False
    rope_lag = 0

    @classmethod
    def load(cls, reader: WeightReader, config: GlmVisionConfig, dtype: torch.dtype) -> GlmVision:
        """Read `model.visual.*` below `reader`, the checkpoint's root."""
        tower, width, hidden = reader.at("model.visual"), config.width, config.hidden
        merger, side = tower.at("merger"), config.merge
        inputs = (width, 3, config.frames, config.patch, config.patch)
        return cls(
            config=config,
            patch_embed=Affine.load(tower, "patch_embed.proj", inputs),
            blocks=tuple(
                _Block.load(tower.at(f"blocks.{i}"), config, dtype) for i in range(config.layers)
            ),
            norm=_norm(tower, "post_layernorm", width),
            downsample=Affine.load(tower, "downsample", (hidden, width, side, side)),
            projection=Affine.load(merger, "proj", (hidden, hidden), bias=False),
            projection_norm=LayerNorm.load(merger, "post_projection_norm", hidden, _MERGER_EPS),
            merger=_Mlp.load(merger, hidden, config.projection, config.limit, bias=False),
            rope=AxialRope.make(width // config.heads, config.rope_theta, reader.device),
            dtype=dtype,
        )

    def span_tokens(self, height: int, width: int, offset: int) -> int:
        """As `VisionModel.span_tokens`."""
        cells = Grid.of(height, width, self.config.patch * self.config.merge)
        return cells.rows * cells.columns

    def embed(self, pixels_HW3: torch.Tensor, offset: int) -> torch.Tensor:
        """As `VisionModel.embed`: fp32 [N, H]."""
        height, width, _ = pixels_HW3.shape
        grid = Grid.of(height, width, self.config.patch)
        image = self.config.normalisation(pixels_HW3)
        return self.merge(self.encode(cut_patches(image, self.config.patch), grid), grid)

    def rope_positions(
        self, images: Sequence[ImageSpan], start: int, count: int
    ) -> torch.Tensor | None:
        """None: the language model has no rotary positions."""
        return None

    def encode(self, patches_P3XX: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Features fp32 [P, D] of the normalised patches [P, 3, patch, patch] of a grid."""
        frames = patches_P3XX[:, :, None].expand(-1, -1, self.config.frames, -1, -1)
        inputs, angles = frames.flatten(1).to(self.dtype), self.rope.angles(grid)
        x_PD = self.patch_embed(inputs, torch.float32)
        for block in self.blocks:
            x_PD = block(x_PD, angles)
        return self.norm(x_PD)

    def merge(self, features_PD: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Tokens fp32 [N, H]: a convolution over each block, then a gated projection."""
        side = self.config.merge
        order = grid.merged_order(side, features_PD.device)
        blocks = features_PD.index_select(0, order).view(-1, side * side, self.config.width)
        inputs = blocks.transpose(1, 2).flatten(1).to(self.dtype)
        x_NH = self.projection(self.downsample(inputs, self.dtype), torch.float32)
        return self.merger(gelu(self.projection_norm(x_NH, self.dtype)))
