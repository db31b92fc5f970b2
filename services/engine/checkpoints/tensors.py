"""Tensors of a checkpoint as torch tensors in their stored type, whole or a rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.common.checkpoint import Checkpoint, CheckpointError, TensorInfo

# e8m0 codes and pairs of four-bit codes are bytes: a copy by value would lose them.
TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "F4": torch.uint8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
FLOAT_DTYPES = ("BF16", "F16", "F32")
_SCAN_BYTES = 1 << 19
_RELEASE_BYTES = 1 << 30  # file pages that stay mapped while loading


@dataclass(frozen=True, slots=True)
class Slice:
    """Index ranges [start, stop) along one dimension, concatenated in order."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Indices that remain."""
        return sum(stop - start for start, stop in self.ranges)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of these indices of a tensor."""
        return torch.cat([tensor.narrow(self.dim, a, b - a) for a, b in self.ranges], self.dim)


class TensorReader:
    """Reads tensors of one checkpoint into the host's memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._since_release = 0

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self._checkpoint.folder

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return self._checkpoint.names()

    def info(self, name: str) -> TensorInfo:
        """Where `name` lies; CheckpointError names a missing tensor and the folder."""
        return self._checkpoint.info(name)

    def expect(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> None:
        """CheckpointError unless `name` exists with this shape and one of these types."""
        if name not in self._checkpoint:
            raise CheckpointError(
                f"missing tensor of shape {list(shape)}", file=self._checkpoint.folder, tensor=name
            )
        info = self._checkpoint.info(name)
        if info.shape != tuple(shape):
            raise CheckpointError(
                f"shape {list(info.shape)} disagrees with the config, which gives {list(shape)}",
                file=info.file,
                tensor=name,
            )
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"type {info.dtype} where one of {', '.join(dtypes)} is served",
                file=info.file,
                tensor=name,
            )

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        """A copy of `name`, or of `part` of it, in its stored type.

        e8m0 codes come as uint8; so do four-bit floats, two a byte and [..., K / 2].
        Raises CheckpointError where an e4m3 tensor holds a NaN code (0x7F, 0xFF).
        """
        info = self._checkpoint.info(name)
        dtype = TORCH_DTYPES[info.dtype]
        plain = np.dtype(f"u{dtype.itemsize}")
        whole = np.frombuffer(self._checkpoint.raw(name), dtype=plain).reshape(_shape(info))
        shape = list(whole.shape)
        if part is not None:
            shape[part.dim] = part.size
        out = torch.empty(shape, dtype=dtype)
        _copy(whole, out.view(_INTEGERS[dtype.itemsize]).numpy(), part)
        if dtype == torch.float8_e4m3fn:
            refuse_nan_codes(out.view(torch.uint8), info)
        del whole
        self._since_release += out.nbytes
        if self._since_release > _RELEASE_BYTES:
            self._checkpoint.release_pages()
            self._since_release = 0
        return out


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _shape(info: TensorInfo) -> tuple[int, ...]:
    """Elements of the type that the tensor is read as."""
    return (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" else info.shape


def _copy(whole: np.ndarray, out: np.ndarray, part: Slice | None) -> None:
    out = out.view(whole.dtype)
    if part is None:
        out[...] = whole
        return
    source, target = whole.swapaxes(0, part.dim), out.swapaxes(0, part.dim)
    row = 0
    for start, stop in part.ranges:
        target[row : row + stop - start] = source[start:stop]
        row += stop - start


def refuse_nan_codes(codes: torch.Tensor, info: TensorInfo) -> None:
    """CheckpointError where e4m3 `codes` (uint8) hold a NaN."""
    if codes.numel() == 0:
        return
    flat = codes.flatten()
    # The largest of a piece that lies in a cache is far quicker found than codes are counted.
    if all(int((part & 0x7F).max()) < 0x7F for part in torch.split(flat, _SCAN_BYTES)):
        return
    bad = sum(int(((part & 0x7F) == 0x7F).sum()) for part in torch.split(flat, _SCAN_BYTES))
    raise CheckpointError(
        f"{bad} NaN codes (0x7F or 0xFF) in an e4m3 tensor", file=info.file, tensor=info.name
    )
