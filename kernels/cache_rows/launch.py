"""Launches of the Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.cache_rows.decode import E2M1, E4M3
from kernels.cache_rows.triton import decode, encode

if TYPE_CHECKING:
    from kernels.cache_rows import RowFormat

FORMS = {"e4m3": E4M3, "e2m1": E2M1}
ELEMENTS = 1024  # of a program
WARPS, STAGES = 2, 1


def encode_rows(values: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """See the package. No host synchronisation; can be captured in a CUDA graph."""
    values = values.contiguous()
    width = values.shape[-1]
    shape = (*values.shape[:-1], form.row_bytes(width))
    out = torch.empty(shape, dtype=torch.uint8, device=values.device)
    _launch(encode, (values, out, tail_view(out, form)), out, width, form)
    return out


def decode_rows(rows: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """See the package. No host synchronisation; can be captured in a CUDA graph."""
    rows = rows.contiguous()
    width = form.row_values(rows.shape[-1])
    out = torch.empty((*rows.shape[:-1], width), dtype=torch.float32, device=rows.device)
    _launch(decode, (rows, tail_view(rows, form), out), rows, width, form)
    return out


def _launch(  # type: ignore[no-untyped-def]
    kernel, tensors: tuple[torch.Tensor, ...], rows: torch.Tensor, width: int, form: RowFormat
) -> None:
    count = rows.numel() // max(rows.shape[-1], 1)
    if count == 0:
        return
    values = constants(width, form) | {"R": rows_of_program(width)}
    grid = (-(-count // int(values["R"])),)
    kernel[grid](*tensors, count, **values, num_warps=WARPS, num_stages=STAGES)


def rows_of_program(width: int) -> int:
    """Rows of `width` values that a program takes."""
    return max(1, ELEMENTS // padded(width))


def padded(width: int) -> int:
    return 1 << (width - 1).bit_length()


def tail_view(rows: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Rows in the type of their plain values; themselves where there are none."""
    return rows.view(form.plain_type) if form.plain else rows


def constants(width: int, form: RowFormat) -> dict[str, int | bool]:
    """The constants of `store_rows` and of both kernels, but R, for rows of `width` values."""
    row, item = form.row_bytes(width), form.plain_type.itemsize if form.plain else 1
    coded = width - form.plain
    codes = coded if form.codes == "e4m3" else coded // 2
    assert row % item == 0 and codes % item == 0, "plain values must be aligned"
    assert form.group & (form.group - 1) == 0, "a group is a power of two"
    return {
        "D": width,
        "DP": max(padded(width), form.group),
        "TAIL": form.plain,
        "FORM": FORMS[form.codes],
        "ROW": row,
        "GROUP": form.group,
        "E8M0": form.scale == "ue8m0",
        "ITEM": item,
        "PAD": form.pad,
    }
