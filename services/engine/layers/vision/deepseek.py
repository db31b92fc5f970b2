"""The vision tower of DeepSeek-V4 Vision-Exp and DeepSeek-V4.1, and where its tokens lie.

Sources: the vision code published with DeepSeek-V4.1-Flash, and that of vLLM 0.33 for Vision-Exp.
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
    Normalisation,
    cut_patches,
    gelu,
)

# Legend: P patches, N image tokens, S tokens of a span, D width of the tower, H hidden.

NORM_EPS = 1e-6  # whatever the eps of the language model
WINDOW = 4  # tokens that a compressed entry of Vision-Exp stands for
_NORMALISE = Normalisation((0.5,) * 3, (0.5,) * 3)
_START, _NEWLINE, _END, _PAD, _IMAGES = range(5)  # rows of the table that a span picks from


@dataclass(frozen=True, slots=True)
class DeepseekVisionConfig:
    """Sizes of the tower. `hidden` is the language model's, `max_tokens` bounds a span.

    `tiled` lays tokens out for compressed windows of four (Vision-Exp), else in reading order.
    """

    layers: int
    width: int
    heads: int
    intermediate: int
    patch: int  # pixels of a side
    downsample: int  # patches of a side that become one token
    rope_theta: float
    max_tokens: int
    hidden: int
    tiled: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """x + attention(norm x), then x + w2(silu(a) * b) with [a | b] = w1(norm x)."""

    attention_norm: RmsNorm
    attention: VisionAttention
    mlp_norm: RmsNorm
    w1: Affine
    w2: Affine
    dtype: torch.dtype

    @classmethod
    def load(cls, reader: WeightReader, config: DeepseekVisionConfig, dtype: torch.dtype) -> _Block:
        width, inner = config.width, config.intermediate
        shape = AttentionShape(width, config.heads, ("wqkv", "wo"))
        return cls(
            attention_norm=_norm(reader, "norm1", config),
            attention=VisionAttention.load(reader.at("attn"), shape),
            mlp_norm=_norm(reader, "norm2", config),
            w1=Affine.load(reader, "mlp.w1", (2 * inner, width), bias=False),
            w2=Affine.load(reader, "mlp.w2", (width, inner), bias=False),
            dtype=dtype,
        )

    def __call__(
        self, x_PD: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        x_PD = x_PD + self.attention(self.attention_norm(x_PD, self.dtype), angles)
        gate, up = self.w1(self.mlp_norm(x_PD, self.dtype), self.dtype).chunk(2, dim=1)
        return x_PD + self.w2(silu_and_mul(gate, up), torch.float32)


def _norm(reader: WeightReader, name: str, config: DeepseekVisionConfig) -> RmsNorm:
    return RmsNorm.load(reader, name, config.width, NORM_EPS, zero_centred=False)


@dataclass(frozen=True, slots=True)
class DeepseekVision:
    """Implements `VisionModel`. Blocks of patches become tokens, framed by learned vectors."""

    config: DeepseekVisionConfig
    patch_embed: Affine
    blocks: tuple[_Block, ...]
    norm: RmsNorm
    w1: Affine
    w2: Affine
    marks: tuple[torch.Tensor, ...]  # [H] each: START, NEWLINE, END, PAD
    rope: AxialRope
    dtype: torch.dtype

    rope_lag = 0

    @classmethod
    def load(
        cls, reader: WeightReader, config: DeepseekVisionConfig, dtype: torch.dtype
    ) -> DeepseekVision:
        """Read `vision.*`, `aligner.*` and `image_*` below `reader`, the checkpoint's root."""
        tower, width, hidden = reader.at("vision"), config.width, config.hidden
        names = ("start", "newline", "end", *(("pad",) if config.tiled else ()))
        merged = width * config.downsample**2
        return cls(
            config=config,
            patch_embed=Affine.load(tower, "patch_embed.proj", (width, 3 * config.patch**2)),
            blocks=tuple(
                _Block.load(tower.at(f"blocks.{i}"), config, dtype) for i in range(config.layers)
            ),
            norm=_norm(tower, "norm", config),
            w1=Affine.load(reader, "aligner.w1", (hidden, merged)),
            w2=Affine.load(reader, "aligner.w2", (hidden, hidden)),
            marks=tuple(reader.tensor(f"image_{name}", (hidden,)) for name in names),
            rope=AxialRope.make(width // config.heads, config.rope_theta, reader.device),
            dtype=dtype,
        )

    @property
    def atomic_spans(self) -> bool:
        """Whether the tokens of an image see each other in both directions: in Vision-Exp."""
        return self.config.tiled

    def span_tokens(self, height: int, width: int, offset: int) -> int:
        """As `VisionModel.span_tokens`."""
        tokens = len(self._layout(*self._cells(self._grid(height, width)), offset))
        if tokens > self.config.max_tokens:
            raise ValueError(
                f"the image of {height} x {width} pixels has {tokens} tokens; the model takes at "
                f"most {self.config.max_tokens}"
            )
        return tokens

    def embed(self, pixels_HW3: torch.Tensor, offset: int) -> torch.Tensor:
        """As `VisionModel.embed`: fp32 [S, H]."""
        height, width, _ = pixels_HW3.shape
        grid = self._grid(height, width)
        features_PD = self.encode(self.patches(pixels_HW3), grid)
        return self.frame(self.align(features_PD, grid), grid, offset)

    def rope_positions(
        self, images: Sequence[ImageSpan], start: int, count: int
    ) -> torch.Tensor | None:
        """None: a token's rotary position is its position."""
        return None

    def patches(self, pixels_HW3: torch.Tensor) -> torch.Tensor:
        """Normalised patches [P, 3, patch, patch] in bf16, to which the release rounds them."""
        return cut_patches(_NORMALISE(pixels_HW3).to(torch.bfloat16), self.config.patch)

    def encode(self, patches_P3XX: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Features fp32 [P, D] of the normalised patches [P, 3, patch, patch] of a grid."""
        inputs = patches_P3XX.flatten(1).to(self.dtype)
        x_PD, angles = self.patch_embed(inputs, torch.float32), self.rope.angles(grid)
        for block in self.blocks:
            x_PD = block(x_PD, angles)
        return self.norm(x_PD)

    def align(self, features_PD: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Tokens fp32 [N, H]: blocks of patches, channel outermost, through a two-layer MLP."""
        rows, columns = self._cells(grid)
        side = self.config.downsample
        image = features_PD.to(self.dtype).view(grid.rows, grid.columns, -1)
        beyond = (0, 0, 0, columns * side - grid.columns, 0, rows * side - grid.rows)
        padded = torch.nn.functional.pad(image, beyond)
        cells = padded.view(rows, side, columns, side, -1).permute(0, 2, 4, 1, 3)
        inner = gelu(self.w1(cells.reshape(rows * columns, -1), self.dtype))
        return self.w2(inner, torch.float32)

    def frame(self, tokens_NH: torch.Tensor, grid: Grid, offset: int) -> torch.Tensor:
        """A span fp32 [S, H] from its tokens [N, H]: in their places, with the marks around."""
        marks = [mark.float() for mark in self.marks]
        marks += [torch.zeros_like(marks[0])] * (_IMAGES - len(marks))
        table = torch.cat([torch.stack(marks), tokens_NH])
        places_S = self._layout(*self._cells(grid), offset)
        return table.index_select(0, torch.tensor(places_S, device=table.device))

    def _grid(self, height: int, width: int) -> Grid:
        return Grid.of(height, width, self.config.patch)

    def _cells(self, grid: Grid) -> tuple[int, int]:
        """Rows and columns of tokens; patches beyond the last whole block count as one."""
        side = self.config.downsample
        return -(-grid.rows // side), -(-grid.columns // side)

    def _layout(self, rows: int, columns: int, offset: int) -> list[int]:
        """Rows of the table for every token of a span that begins at position `offset`."""
        images = [
            [_IMAGES + row * columns + column for column in range(columns)] + [_NEWLINE]
            for row in range(rows)
        ]
        if not self.config.tiled:
            return [_START, *(place for line in images for place in line), _END]
        return _tiled(images, offset)


def _tiled(lines: list[list[int]], offset: int) -> list[int]:
    """START on the last place of a window, then windows of 2 x 2 places, filled up with PADs."""
    if len(lines) % 2:
        lines = [*lines, [_PAD] * len(lines[0])]
    grid = [
        place
        for upper, lower in zip(lines[::2], lines[1::2], strict=True)
        for pair in zip(upper, lower, strict=True)
        for place in pair
    ]
    leading = [_PAD] * (WINDOW - 1 - offset % WINDOW)
    trailing = [_PAD] * (-len(grid) % WINDOW)
    return [*leading, _START, *grid, *trailing, _END]
