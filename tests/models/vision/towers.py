"""Towers loaded on their own, and pictures for them."""

from __future__ import annotations

from pathlib import Path

import torch

from services.common.checkpoint import Checkpoint
from services.engine.checkpoints.loader import WeightReader, make_readers
from services.engine.models.base import Shard


def reader_of(folder: Path) -> tuple[Checkpoint, WeightReader]:
    """A checkpoint and a reader at its root."""
    checkpoint = Checkpoint.open(folder)
    return checkpoint, make_readers(checkpoint, torch.device("cpu"), Shard())[1]


def picture(height: int, width: int, seed: int) -> torch.Tensor:
    """uint8 [height, width, 3]: noise, so that no two patches are alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
