"""What every stored form of a matrix offers, and how parts of one fall on its units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from kernels.quant_linear import (
    Fp8BlockMatrix,
    HummingMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    PlainMatrix,
    scale_values,
)
from services.common.checkpoint import CheckpointError, TensorInfo
from services.engine.checkpoints.tensors import Slice, TensorReader

# Of multipliers: the first as most releases name them, the second as DeepSeek does.
SCALE_SUFFIXES = (".weight_scale_inv", ".scale")


class MatrixFormat(Protocol):
    """One way to store a matrix [N, K] under a module name."""

    def matches(self, tensors: TensorReader, module: str) -> bool:
        """Whether `module` is stored this way, judged by its tensors."""
        ...

    def check(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> tuple[str, ...]:
        """Names of the tensors of `module`; CheckpointError where one does not fit `shape`."""
        ...

    def read(
        self, tensors: TensorReader, module: str, shape: tuple[int, int], part: Slice | None
    ) -> Matrix:
        """The matrix of full `shape`, or the `part` of it that this rank holds.

        CheckpointError where values cannot be served or `part` cuts a unit of the format.
        """
        ...

    def stack(self, matrices: Sequence[Matrix], joined: int, name: str) -> Matrix:
        """Matrices [N, K] of one form as one stack [len / joined, joined * N, K].

        `name` stands for them in an error.
        """
        ...


M = TypeVar("M", PlainMatrix, Fp8BlockMatrix, Int4Matrix, Mxfp4Matrix)


def all_of(kind: type[M], matrices: Sequence[Matrix]) -> list[M]:
    """`matrices`, which must all be of one kind."""
    chosen = [m for m in matrices if isinstance(m, kind)]
    if len(chosen) != len(matrices):
        raise TypeError(f"a stack of {kind.__name__} got {len(matrices) - len(chosen)} others")
    return chosen


def form_of(matrix: Matrix) -> str:
    """What must be equal for matrices to lie in one stack, in words."""
    match matrix:
        case PlainMatrix(data):
            return str(data.dtype)
        case Fp8BlockMatrix(_, scale, block_n, block_k):
            return f"e4m3 in blocks of {block_n} x {block_k} with scales in {scale.dtype}"
        case Int4Matrix(_, scale, zero, group):
            points = "without" if zero is None else "with"
            return f"INT4 in groups of {group} {points} zero points, scales in {scale.dtype}"
        case Mxfp4Matrix():
            return "MXFP4"
        case HummingMatrix():
            return matrix.table.form


def joined_rows(tensors: Sequence[torch.Tensor], joined: int) -> torch.Tensor:
    """[rows, columns] each, as [len / joined, joined * rows, columns]."""
    stacked = torch.stack(list(tensors))
    return stacked.view(-1, joined * stacked.shape[1], stacked.shape[2])


def in_units(
    part: Slice | None,
    dim: int,
    unit: int,
    info: TensorInfo,
    size: int,
    what: str = "quantisation block",
) -> Slice | None:
    """`part` of a matrix of `size` along `dim`, counted in units of `unit` along `dim`.

    Unchanged where it cuts the other dimension. A last unit may be partial. CheckpointError names
    the tensor `info` where a range begins or ends inside a unit.
    """
    if part is None or part.dim != dim:
        return part
    for start, stop in part.ranges:
        if start % unit or (stop % unit and stop != size):
            raise CheckpointError(
                f"{start}:{stop} of {size} along dimension {dim} cuts a {what} of {unit}; "
                "use fewer tensor-parallel ranks",
                file=info.file,
                tensor=info.name,
            )
    return Slice(dim, tuple((start // unit, -(-stop // unit)) for start, stop in part.ranges))


def check_scales(scale: torch.Tensor, largest: float, info: TensorInfo) -> None:
    """CheckpointError where a scale, or the scale times the `largest` code, is not finite."""
    if not bool(torch.isfinite(scale_values(scale) * largest).all()):
        raise CheckpointError("scale is not finite", file=info.file, tensor=info.name)


def scale_name(tensors: TensorReader, module: str) -> str:
    """The tensor of a module's multipliers; where there is none, what this checkpoint calls it."""
    for suffix in SCALE_SUFFIXES:
        if f"{module}{suffix}" in tensors:
            return f"{module}{suffix}"
    names = tensors.names()
    used = [s for s in SCALE_SUFFIXES if any(name.endswith(s) for name in names)]
    return f"{module}{(used or SCALE_SUFFIXES)[0]}"
