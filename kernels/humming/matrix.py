"""Weights in humming's order, with the kernels that read them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

# Legend: E experts (a leading dimension that may be absent), N outputs, K inputs.


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that the launcher knows, on one card.

    configs int64 [4] on the CPU, as the launcher takes it: rows above 0, rows up to 2^30, the
    kernel's number, multiprocessors.
    """

    configs: torch.Tensor
    block_m: int


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernels of one weight shape on one card: kernel i takes up to `limits[i]` rows.

    Rows of x for a dense matrix, rows of an expert on average for a stack. The last limit is
    infinite.
    """

    form: str
    out_features: int
    in_features: int
    stack: bool
    limits: tuple[float, ...]
    kernels: tuple[Kernel, ...]

    def pick(self, rows: float) -> Kernel:
        return self.kernels[bisect_left(self.limits, rows)]


@dataclass(frozen=True, slots=True)
class HummingMatrix:
    """A matrix [N, K], or a stack [E, N, K], that only humming's kernels read.

    weight int32 [..., K / 16, N bits / 2], scale [..., K / group, N or N / 128], zero int32
    [..., K / group, N / 8] or None (see repack.py). `locks` int32, at zero between launches. A
    launch must not run beside another, of whatever matrix: its blocks wait for each other.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    locks: torch.Tensor
    table: KernelTable

    @property
    def out_features(self) -> int:
        return self.table.out_features

    @property
    def in_features(self) -> int:
        return self.table.in_features

    @property
    def nbytes(self) -> int:
        """Bytes that this matrix occupies."""
        tensors = (self.weight, self.scale, self.zero, self.locks)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def expert(self, index: int) -> HummingMatrix:
        """TypeError: the kernels of a stack take the whole stack."""
        raise TypeError(f"expert {index} alone: a stack in humming's order has no single matrices")

    def to(self, device: torch.device) -> HummingMatrix:
        """This matrix, which stays where its kernels are. TypeError for another device."""
        if device.type == self.weight.device.type and device.index in (
            None,
            self.weight.device.index,
        ):
            return self
        raise TypeError(f"a matrix prepared for {self.weight.device} does not move to {device}")
