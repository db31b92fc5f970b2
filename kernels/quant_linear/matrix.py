"""Weight matrices as stored: what a kernel needs to know to read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


@dataclass(frozen=True, slots=True)
class Fp8BlockMatrix:
    """e4m3 codes uint8 [..., N, K]; value = code * scale of its block.

    scale [..., ceil(N / block_n), ceil(K / block_k)] in bf16 or fp32; the last blocks may be
    partial.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    block_n: int = 128
    block_k: int = 128

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
        return self.codes.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that this matrix occupies."""
        return self.codes.nbytes + self.scale.nbytes

    def expert(self, index: int) -> Fp8BlockMatrix:
        """Matrix `index` of a stack [E, N, K]."""
        return Fp8BlockMatrix(self.codes[index], self.scale[index], self.block_n, self.block_k)


Matrix = PlainMatrix | Fp8BlockMatrix
