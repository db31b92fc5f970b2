"""Which back end a matrix goes to, once, when weights load."""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from kernels.humming.forms import StoredMatrix, form_of
from kernels.humming.manifest import Gemm, ManifestError
from kernels.humming.matrix import HummingMatrix, KernelTable
from kernels.humming.repack import repack
from kernels.humming.runtime import Library, library, new_locks

BackEnd = Literal["auto", "triton", "humming"]
VARIABLE = "WARHORSE_GEMM"
TABLE = Path(__file__).with_name("select.json")

logger = logging.getLogger(__name__)


def back_end() -> BackEnd:
    """What the environment asks for, "auto" where it is silent. ValueError for another word."""
    found = os.environ.get(VARIABLE) or "auto"
    if found not in get_args(BackEnd):
        raise ValueError(f"{VARIABLE} is {found!r}, not one of {', '.join(get_args(BackEnd))}")
    return cast(BackEnd, found)


def prepared(weight: StoredMatrix, wanted: BackEnd | None = None) -> HummingMatrix | None:
    """The matrix in humming's order, or None where it goes to Triton.

    A matrix on a card goes to humming where its package is installed and its prebuilt kernels are
    in order and have the shape; the log says once where they are not. With "auto" select.json must
    choose it for the size too. With "humming" RuntimeError says what keeps the package from use.
    ValueError for codes that would be decoded wrongly.
    """
    wanted = wanted or back_end()
    device = weight.codes.device
    if wanted == "triton" or not weight.codes.is_cuda or form_of(weight) is None:
        return None
    found = library(torch.device(device.type, device.index or 0))
    if isinstance(found, ManifestError):
        if wanted == "humming":
            raise RuntimeError(str(found)) from found
        return None
    return _in_order(weight, found, wanted)


@cache
def table() -> tuple[dict[str, Any], ...]:
    """The rows of select.json, in order."""
    rows: list[dict[str, Any]] = json.loads(TABLE.read_text())["rows"]
    return tuple(rows)


def chosen(gemm: Gemm, weights: int) -> BackEnd:
    """What a server takes for a matrix of so many weights, by the first row with room for it.

    Experts have those of one gate-up matrix, so that both their stacks go the same way.
    """
    rows = (row for row in table() if row["gemm"] == gemm)
    row = next(row for row in rows if weights <= (row["weights_up_to"] or weights))
    return cast(BackEnd, row["back_end"])


def _in_order(weight: StoredMatrix, found: Library, wanted: BackEnd) -> HummingMatrix | None:
    form = form_of(weight)
    assert form is not None
    gemm: Gemm = "stack" if weight.codes.dim() == 3 else "dense"
    shape = (gemm, form.name, weight.out_features, weight.in_features)
    if wanted == "auto" and chosen(gemm, found.weights(*shape)) == "triton":
        return None
    if not found.has(*shape):
        _say_missing(*shape)
        return None
    from kernels.humming.launch import warm_up

    codes, scale, zero = repack(weight, form)
    locks = new_locks(codes.device)
    matrix = HummingMatrix(codes, scale, zero, locks, found.table(*shape))
    warm_up(matrix)
    return matrix


def row_parts(matrix: HummingMatrix, parts: int) -> tuple[HummingMatrix, ...]:
    """Equal runs of a matrix' rows, in new memory. LookupError where a part has no kernels."""
    device, table = matrix.weight.device, matrix.table
    found = library(torch.device(device.type, device.index or 0))
    assert not table.stack and not isinstance(found, ManifestError)
    rows = table.out_features // parts
    if not found.has("dense", table.form, rows, table.in_features):
        raise LookupError(f"no prebuilt kernel for dense {table.form} {rows} x {table.in_features}")
    part_table = found.table("dense", table.form, rows, table.in_features)
    tensors = (matrix.weight, matrix.scale, matrix.zero)
    runs = [[None] * parts if t is None else t.chunk(parts, dim=1) for t in tensors]
    return tuple(
        _of_runs(weight, scale, zero, part_table) for weight, scale, zero in zip(*runs, strict=True)
    )


def _of_runs(
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    table: KernelTable,
) -> HummingMatrix:
    assert weight is not None and scale is not None
    zero = None if zero is None else zero.contiguous()
    locks = new_locks(weight.device)
    return HummingMatrix(weight.contiguous(), scale.contiguous(), zero, locks, table)


@cache
def _say_missing(gemm: str, form: str, n: int, k: int) -> None:
    logger.info("no prebuilt humming kernel for %s %s %d x %d: Triton", gemm, form, n, k)
