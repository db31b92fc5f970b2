"""What the layers of the DeepSeek-V4 family share in one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.rotary import rotary_angles
from services.engine.cache.spec import CachePools
from services.engine.layers.context import Angles, PassContext
from services.engine.layers.rope import RotaryFrequencies
from services.engine.runtime.batch import StepBatch

# Legend: T packed tokens, F rotary frequencies.

WINDOW_GROUP = "window"


@dataclass(frozen=True, slots=True)
class Ropes:
    """Frequencies of layers with a window only, and of those that also attend to entries."""

    window: RotaryFrequencies
    compressed: RotaryFrequencies

    def to(self, device: torch.device) -> Ropes:
        """The same on another device."""
        return Ropes(self.window.to(device), self.compressed.to(device))


@dataclass(frozen=True, slots=True)
class DeepseekContext(PassContext):
    """A pass with the angles and key ranges that its layers need."""

    window_angles: Angles
    compressed_angles: Angles
    entry_angles: Mapping[int, Angles]  # by ratio: at the first token of the token's window
    first_T: torch.Tensor  # int64, first and last position that a token's window shows
    last_T: torch.Tensor
    is_image_T: torch.Tensor | None  # bool; None where no token of the step belongs to an image

    def angles(self, compressed: bool) -> Angles:
        """Of the tokens' own positions, for a layer with or without entries."""
        return self.compressed_angles if compressed else self.window_angles

    def visible(self, ratio: int) -> torch.Tensor:
        """int64 [T]: entries of `ratio` tokens each that a token sees."""
        return (self.positions_T + 1) // ratio


@dataclass(frozen=True, slots=True)
class DeepseekContextMaker:
    """Makes the context of a forward pass.

    `window` tokens are visible, the own one among them; with `two_sided_images` a token of an
    image also sees all tokens of that image.
    """

    ropes: Ropes
    window: int
    ratios: tuple[int, ...]
    two_sided_images: bool = False

    def __call__(self, batch: StepBatch, pools: CachePools) -> DeepseekContext:
        base = PassContext.make(batch, pools)
        positions_T = base.positions_T
        first_T, last_T = self._range(batch)
        return DeepseekContext(
            batch=batch,
            pools=pools,
            positions_T=positions_T,
            sequence_T=base.sequence_T,
            offset_T=base.offset_T,
            token_T=base.token_T,
            window_angles=_angles(positions_T, self.ropes.window),
            compressed_angles=_angles(positions_T, self.ropes.compressed),
            entry_angles={
                r: _angles(positions_T // r * r, self.ropes.compressed) for r in self.ratios
            },
            first_T=first_T,
            last_T=last_T,
            is_image_T=_image_mask(batch),
        )

    def _range(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        first_T = (batch.positions_T - (self.window - 1)).clamp_min(0)
        last_T = batch.positions_T
        if self.two_sided_images and batch.images is not None:
            first_T = torch.minimum(first_T, batch.images.span_first_T)
            last_T = torch.maximum(last_T, batch.images.span_last_T)
        return first_T, last_T


def _image_mask(batch: StepBatch) -> torch.Tensor | None:
    if batch.images is None:
        return None
    mask_T = torch.zeros_like(batch.token_ids_T, dtype=torch.bool)
    return mask_T.index_fill_(0, batch.images.rows_R, True)


def _angles(positions_T: torch.Tensor, rope: RotaryFrequencies) -> Angles:
    return Angles(*rotary_angles(positions_T, rope.inverse_F, rope.scaling))
