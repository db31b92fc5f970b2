"""Weight matrices as stored: what a kernel needs to know to read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernels.humming.matrix import HummingMatrix

# Legend: E experts (a leading dimension that may be absent), N outputs, K inputs.


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """[..., N, K] in bf16, fp16 or fp32."""

    data: torch.Tensor

    @property
    def out_features(self) -> int:
        return self.data.shape[-2]

    @property
    def in_features(self) -> int:
        return self.data.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that this matrix occupies."""
        return self.data.nbytes

    def expert(self, index: int) -> PlainMatrix:
        """Matrix `index` of a stack [E, N, K]."""
        return PlainMatrix(self.data[index])

    def to(self, device: torch.device) -> PlainMatrix:
        """The matrix on `device`."""
        return PlainMatrix(self.data.to(device))


# Where codes lie along K:
# "pairs", as checkpoints have them: k in turn, of four-bit codes k = 2 j in the low and 2 j + 1 in
# the high half of byte j;
# "fragments", as the GPU kernels read them: see kernels/quant_linear/README.md.
Order = Literal["pairs", "fragments"]
BLOCK_BYTES = 64  # within which "fragments" reorders; rows are padded to whole blocks
NIBBLE_UNIT = 32  # four-bit matrices have whole units along K


@dataclass(frozen=True, slots=True)
class Fp8BlockMatrix:
    """e4m3 codes uint8 [..., N, K]; value = code * scale of its block.

    scale [..., ceil(N / block_n), ceil(K / block_k)] in bf16 or fp32, or uint8 holding e8m0 codes
    (2^(code - 127)); the last blocks may be partial. `inputs` is K where rows of codes in
    "fragments" order are padded, else 0.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    block_n: int = 128
    block_k: int = 128
    order: Order = "pairs"
    inputs: int = 0

    def __post_init__(self) -> None:
        expected = (-(-self.out_features // self.block_n), -(-self.in_features // self.block_k))
        if self.codes.dtype != torch.uint8 or tuple(self.scale.shape[-2:]) != expected:
            raise ValueError(
                f"scale {tuple(self.scale.shape)} does not fit codes {tuple(self.codes.shape)} "
                f"{self.codes.dtype} in blocks of {self.block_n} x {self.block_k}"
            )

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @property
    def in_features(self) -> int:
        return self.inputs or self.codes.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that this matrix occupies."""
        return self.codes.nbytes + self.scale.nbytes

    def expert(self, index: int) -> Fp8BlockMatrix:
        """Matrix `index` of a stack [E, N, K]."""
        return replace(self, codes=self.codes[index], scale=self.scale[index])

    def to(self, device: torch.device) -> Fp8BlockMatrix:
        """The matrix on `device`."""
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device))


# Scales of a row in "fragments" order are padded to so many: whole 32-bit words.
SCALES_PADDED = 4


def _check_nibbles(weight: Int4Matrix | Mxfp4Matrix) -> None:
    codes, scale, group, inputs = weight.codes, weight.scale, weight.group, weight.in_features
    if codes.dtype != torch.uint8 or inputs % NIBBLE_UNIT or group % NIBBLE_UNIT:
        raise ValueError(f"codes {codes.dtype} with K {inputs} in groups of {group}: not bytes")
    width = scales_of_row(weight)
    if inputs % group or tuple(scale.shape) != (*codes.shape[:-1], width):
        raise ValueError(f"scale {tuple(scale.shape)} does not fit {(*codes.shape[:-1], width)}")


def scales_of_row(weight: Int4Matrix | Mxfp4Matrix) -> int:
    """Scales that a row holds in memory."""
    groups = weight.in_features // weight.group
    return groups if weight.order == "pairs" else -(-groups // SCALES_PADDED) * SCALES_PADDED


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """Four-bit integers: value = (code - zero) * scale, code and zero in 0..15.

    codes uint8 [..., N, K / 2], two a byte in `order`; scale bf16, fp16 or fp32
    [..., N, K / group]; zero uint8 of the scale's shape, or None where it is 8 throughout
    (symmetric). In "fragments" order rows of all three are padded, and `inputs` is K.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    group: int = 128
    order: Order = "pairs"
    inputs: int = 0

    def __post_init__(self) -> None:
        _check_nibbles(self)
        if self.zero is not None and (
            self.zero.dtype != torch.uint8 or self.zero.shape != self.scale.shape
        ):
            raise ValueError(f"zero {tuple(self.zero.shape)} {self.zero.dtype} does not fit")

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @property
    def in_features(self) -> int:
        return self.inputs or 2 * self.codes.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that this matrix occupies."""
        return (
            self.codes.nbytes
            + self.scale.nbytes
            + (self.zero.nbytes if self.zero is not None else 0)
        )

    def expert(self, index: int) -> Int4Matrix:
        """Matrix `index` of a stack [E, N, K]."""
        zero = None if self.zero is None else self.zero[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], zero=zero)

    def to(self, device: torch.device) -> Int4Matrix:
        """The matrix on `device`."""
        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=None if self.zero is None else self.zero.to(device),
        )


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """OCP MXFP4: value = e2m1(code) * 2^(scale - 127), one scale for 32 values along K.

    codes uint8 [..., N, K / 2], two a byte in `order`; scale uint8 (e8m0) [..., N, K / 32]. In
    "fragments" order rows of both are padded, and `inputs` is K.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    order: Order = "pairs"
    inputs: int = 0

    @property
    def group(self) -> int:
        return 32

    def __post_init__(self) -> None:
        _check_nibbles(self)
        if self.scale.dtype != torch.uint8:
            raise ValueError(f"scale must be e8m0 codes in uint8, not {self.scale.dtype}")

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @property
    def in_features(self) -> int:
        return self.inputs or 2 * self.codes.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that this matrix occupies."""
        return self.codes.nbytes + self.scale.nbytes

    def expert(self, index: int) -> Mxfp4Matrix:
        """Matrix `index` of a stack [E, N, K]."""
        return replace(self, codes=self.codes[index], scale=self.scale[index])

    def to(self, device: torch.device) -> Mxfp4Matrix:
        """The matrix on `device`."""
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device))


Matrix = PlainMatrix | Fp8BlockMatrix | Int4Matrix | Mxfp4Matrix | HummingMatrix
