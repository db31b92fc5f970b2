"""How weight matrices are stored in checkpoints, and how a rank reads its part of one.

What a matrix is stored as is decided per tensor by its siblings, never by a list in the config: a
`<name>.weight_scale_inv` beside `<name>.weight` means FP8 blocks, nothing beside it means plain.
A further layout is one more class with the same three methods, added to `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from kernels.quant_linear import Fp8BlockMatrix, Matrix, PlainMatrix
from services.common.checkpoint import CheckpointError, TensorInfo
from services.engine.checkpoints.tensors import FLOAT_DTYPES, Slice, TensorReader

SCALE_SUFFIX = ".weight_scale_inv"


class MatrixFormat(Protocol):
    """One way to store a matrix [N, K] under a module name."""

    def matches(self, tensors: TensorReader, module: str) -> bool:
        """Whether `module` is stored this way, judged by its tensors."""
        ...

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        """Names of the tensors of `module`; CheckpointError where one does not fit `shape`."""
        ...

    def read(self, tensors: TensorReader, module: str, part: Slice | None) -> Matrix:
        """The matrix, or the `part` of it that this rank holds, in stored form."""
        ...

    def stack(self, matrices: Sequence[Matrix], joined: int) -> Matrix:
        """Equal matrices [N, K] as one stack [len / joined, joined * N, K]."""
        ...


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """bf16, fp16 or fp32 under `<module>.weight`."""

    def matches(self, tensors: TensorReader, module: str) -> bool:
        return f"{module}{SCALE_SUFFIX}" not in tensors

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        name = f"{module}.weight"
        tensors.expect(name, shape, FLOAT_DTYPES)
        return (name,)

    def read(self, tensors: TensorReader, module: str, part: Slice | None) -> Matrix:
        return PlainMatrix(tensors.read(f"{module}.weight", part))

    def stack(self, matrices: Sequence[Matrix], joined: int) -> Matrix:
        return PlainMatrix(_joined([m.data for m in _all_of(PlainMatrix, matrices)], joined))


@dataclass(frozen=True, slots=True)
class Fp8BlockFormat:
    """e4m3 under `<module>.weight`, one multiplier per block under `<module>.weight_scale_inv`."""

    block_n: int = 128
    block_k: int = 128

    def matches(self, tensors: TensorReader, module: str) -> bool:
        return f"{module}{SCALE_SUFFIX}" in tensors

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        weight, scale = f"{module}.weight", f"{module}{SCALE_SUFFIX}"
        tensors.expect(weight, shape, ("F8_E4M3",))
        grid = (-(-shape[0] // self.block_n), -(-shape[1] // self.block_k))
        tensors.expect(scale, grid, FLOAT_DTYPES)
        return (weight, scale)

    def read(self, tensors: TensorReader, module: str, part: Slice | None) -> Matrix:
        weight, scale = f"{module}.weight", f"{module}{SCALE_SUFFIX}"
        blocks = self._blocks(tensors.info(weight), part)
        codes = tensors.read(weight, part).view(torch.uint8)
        factors = tensors.read(scale, blocks)
        if not bool(torch.isfinite(factors.float()).all()):
            info = tensors.info(scale)
            raise CheckpointError("scale is not finite", file=info.file, tensor=info.name)
        return Fp8BlockMatrix(codes, factors, self.block_n, self.block_k)

    def stack(self, matrices: Sequence[Matrix], joined: int) -> Matrix:
        blocks = _all_of(Fp8BlockMatrix, matrices)
        if joined > 1 and blocks[0].out_features % self.block_n:
            raise CheckpointError(
                f"{blocks[0].out_features} rows of an expert are no multiple of the quantisation "
                f"block of {self.block_n}"
            )
        codes = _joined([m.codes for m in blocks], joined)
        scale = _joined([m.scale for m in blocks], joined)
        return Fp8BlockMatrix(codes, scale, self.block_n, self.block_k)

    def _blocks(self, info: TensorInfo, part: Slice | None) -> Slice | None:
        """The rows or columns of the scale grid that belong to `part` of the weight."""
        if part is None:
            return None
        block = (self.block_n, self.block_k)[part.dim]
        size = info.shape[part.dim]
        for start, stop in part.ranges:
            if start % block or (stop % block and stop != size):
                raise CheckpointError(
                    f"{start}:{stop} of dimension {part.dim} cuts a quantisation block of {block}; "
                    "use fewer tensor-parallel ranks",
                    file=info.file,
                    tensor=info.name,
                )
        ranges = tuple((start // block, -(-stop // block)) for start, stop in part.ranges)
        return Slice(part.dim, ranges)


_M = TypeVar("_M", PlainMatrix, Fp8BlockMatrix)


def _all_of(kind: type[_M], matrices: Sequence[Matrix]) -> list[_M]:
    chosen = [m for m in matrices if isinstance(m, kind)]
    if len(chosen) != len(matrices):
        raise TypeError(f"a stack of {kind.__name__} got {len(matrices) - len(chosen)} others")
    return chosen


def _joined(tensors: Sequence[torch.Tensor], joined: int) -> torch.Tensor:
    """[len / joined, joined * rows, columns]."""
    stacked = torch.stack(list(tensors))
    return stacked.view(-1, joined * stacked.shape[1], stacked.shape[2])


def formats_of(config: dict[str, object]) -> tuple[MatrixFormat, ...]:
    """The formats that a checkpoint may use; block sizes come from its `quantization_config`."""
    quantization = config.get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    fp8 = Fp8BlockFormat() if size is None else Fp8BlockFormat(*_block_size(size))
    return (fp8, PlainFormat())


def _block_size(value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value):
        return (value[0], value[1])
    raise CheckpointError(f"quantization_config.weight_block_size {value!r} is not [rows, columns]")
