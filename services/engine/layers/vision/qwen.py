"""The vision tower of Qwen3.8 and its rotary positions.

Source: Qwen3_5VisionModel and Qwen3_5Model.get_rope_index of transformers 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.engine.checkpoints.loader import WeightReader
from services.engine.images import ImageSpan
from services.engine.layers.vision.attention import AttentionShape, VisionAttention
from services.engine.layers.vision.parts import (
    Affine,
    AxialRope,
    Grid,
    LayerNorm,
    Normalisation,
    cut_patches,
    gelu,
    gelu_tanh,
)

# Legend: P patches, N tokens of an image, D width of the tower, H hidden, X frames of a patch.

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class QwenVisionConfig:
    """Sizes of the tower. `hidden` is the language model's.

    `positions` is the number of learned positions, a square grid. `rope_lag` as in `VisionModel`.
    """

    layers: int
    width: int
    heads: int
    intermediate: int
    patch: int  # pixels of a side
    frames: int  # of one patch; an image repeats its only one
    merge: int  # patches of a side that become one token
    positions: int
    rope_theta: float
    hidden: int
    normalisation: Normalisation
    rope_lag: int = 0

    @property
    def side(self) -> int:
        """Learned positions of a side."""
        return math.isqrt(self.positions)


@dataclass(frozen=True, slots=True)
class _Block:
    """x + attention(norm x), then x + fc2(gelu(fc1(norm x)))."""

    attention_norm: LayerNorm
    attention: VisionAttention
    mlp_norm: LayerNorm
    fc1: Affine
    fc2: Affine
    dtype: torch.dtype

    @classmethod
    def load(cls, reader: WeightReader, config: QwenVisionConfig, dtype: torch.dtype) -> _Block:
        width, inner = config.width, config.intermediate
        shape = AttentionShape(width, config.heads, ("qkv", "proj"))
        return cls(
            attention_norm=LayerNorm.load(reader, "norm1", width, NORM_EPS),
            attention=VisionAttention.load(reader.at("attn"), shape),
            mlp_norm=LayerNorm.load(reader, "norm2", width, NORM_EPS),
            fc1=Affine.load(reader, "mlp.linear_fc1", (inner, width)),
            fc2=Affine.load(reader, "mlp.linear_fc2", (width, inner)),
            dtype=dtype,
        )

    def __call__(
        self, x_PD: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        x_PD = x_PD + self.attention(self.attention_norm(x_PD, self.dtype), angles)
        inner = gelu_tanh(self.fc1(self.mlp_norm(x_PD, self.dtype), self.dtype))
        return x_PD + self.fc2(inner, torch.float32)


@dataclass(frozen=True, slots=True)
class QwenVision:
    """Implements `VisionModel`: one token for each block of merge x merge patches."""

    config: QwenVisionConfig
    patch_embed: Affine
    positions_table: torch.Tensor  # [positions, D], row by row
    blocks: tuple[_Block, ...]
    norm: LayerNorm
    fc1: Affine
    fc2: Affine
    rope: AxialRope
    dtype: torch.dtype

    atomic_spans = False

    @classmethod
    def load(cls, reader: WeightReader, config: QwenVisionConfig, dtype: torch.dtype) -> QwenVision:
        """Read `model.visual.*` or `visual.*` below `reader`, the checkpoint's root."""
        tower = reader.at(visual_prefix(reader))
        width, merged = config.width, config.width * config.merge**2
        inputs = (width, 3, config.frames, config.patch, config.patch)
        return cls(
            config=config,
            patch_embed=Affine.load(tower, "patch_embed.proj", inputs),
            positions_table=tower.tensor("pos_embed.weight", (config.positions, width)),
            blocks=tuple(
                _Block.load(tower.at(f"blocks.{i}"), config, dtype) for i in range(config.layers)
            ),
            norm=LayerNorm.load(tower, "merger.norm", width, NORM_EPS),
            fc1=Affine.load(tower, "merger.linear_fc1", (merged, merged)),
            fc2=Affine.load(tower, "merger.linear_fc2", (config.hidden, merged)),
            rope=AxialRope.make(width // config.heads, config.rope_theta, reader.device),
            dtype=dtype,
        )

    @property
    def rope_lag(self) -> int:
        """As `VisionModel.rope_lag`."""
        return self.config.rope_lag

    def span_tokens(self, height: int, width: int, offset: int) -> int:
        """As `VisionModel.span_tokens`."""
        cells = self._cells(height, width)
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
        """As `VisionModel.rope_positions`: all axes advance with text.

        The token at (row, column) of an image that begins at s has (s, s + row, s + column); the
        text behind it goes on at s + max(rows, columns).
        """
        place_T = torch.arange(start, start + count)
        axes_T3 = place_T[:, None].repeat(1, 3)
        for image in images:
            cells = self._cells(image.height, image.width)
            index_T = place_T - image.offset
            turned_T3 = torch.stack(
                (-index_T, index_T // cells.columns - index_T, index_T % cells.columns - index_T), 1
            )
            inside_T1 = ((index_T >= 0) & (place_T < image.end))[:, None]
            saved = max(cells.rows, cells.columns) - image.length
            behind_T1 = (place_T >= image.end)[:, None]
            axes_T3 = axes_T3 + inside_T1 * turned_T3 + behind_T1 * saved
        return axes_T3

    def encode(self, patches_P3XX: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Features fp32 [P, D] of the normalised patches [P, 3, patch, patch] of a grid."""
        frames = patches_P3XX[:, :, None].expand(-1, -1, self.config.frames, -1, -1)
        inputs, angles = frames.flatten(1).to(self.dtype), self.rope.angles(grid)
        x_PD = self.patch_embed(inputs, torch.float32) + self.learned_positions(grid)
        for block in self.blocks:
            x_PD = block(x_PD, angles)
        return x_PD

    def merge(self, features_PD: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Tokens fp32 [N, H]: the patches of a block side by side, through a two-layer MLP."""
        side = self.config.merge
        order = grid.merged_order(side, features_PD.device)
        blocks = self.norm(features_PD, self.dtype).index_select(0, order)
        inner = gelu(self.fc1(blocks.view(-1, side * side * self.config.width), self.dtype))
        return self.fc2(inner, torch.float32)

    def learned_positions(self, grid: Grid) -> torch.Tensor:
        """fp32 [P, D]: the square table resampled bilinearly to the grid, corners on corners."""
        device, side = self.positions_table.device, self.config.side
        rows, columns = (_linear_taps(size, side, device) for size in (grid.rows, grid.columns))
        total = torch.zeros((), device=device)
        for row, row_weight in rows:
            for column, column_weight in columns:
                values = self.positions_table[(row[:, None] * side + column).flatten()].float()
                weights = (row_weight[:, None] * column_weight).flatten()
                total = total + values * weights[:, None]
        return total

    def _cells(self, height: int, width: int) -> Grid:
        return Grid.of(height, width, self.config.patch * self.config.merge)


def visual_prefix(reader: WeightReader) -> str:
    """Where the tower's tensors lie: "model.visual", or "visual" in older exports."""
    return "visual" if reader.has("visual.pos_embed.weight") else "model.visual"


def _linear_taps(
    size: int, side: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two (indices int64 [size], weights fp32 [size]) that resample `side` points to `size`."""
    source = torch.arange(size, dtype=torch.float32, device=device) * (side - 1) / max(size - 1, 1)
    low = source.floor()
    share, index = source - low, low.long()
    return [(index, 1.0 - share), ((index + 1).clamp_max(side - 1), share)]
