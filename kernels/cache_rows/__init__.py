"""Cache rows in few bits: what attention keeps of a token, quantised in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels import backend
from kernels.cache_rows import reference

# Legend: D values of a row, B bytes of a stored row.


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row of D values is stored: its codes, then one scale byte per `group` values.

    Codes are e4m3 (one byte) or e2m1 (two a byte, the even index in the low half). Scales are
    ue8m0 (2^(byte - 127)) or, of e2m1 codes alone, e4m3; else ValueError. The last `plain` values
    of a row have no codes: they lie between codes and scales in `plain_type`. `pad` bytes of zero
    end a row.
    """

    codes: Literal["e4m3", "e2m1"]
    group: int
    scale: Literal["ue8m0", "e4m3"]
    plain: int = 0
    plain_type: torch.dtype = torch.bfloat16
    pad: int = 0

    def __post_init__(self) -> None:
        if self.codes == self.scale == "e4m3":
            raise ValueError("e4m3 codes have no e4m3 scales: e2m1 codes or ue8m0 scales")

    @property
    def plain_bytes(self) -> int:
        """Bytes of the values without codes."""
        return self.plain * self.plain_type.itemsize

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values."""
        coded = width - self.plain
        if coded < 0 or coded % self.group or coded % 2:
            raise ValueError(f"{coded} values with codes are no whole groups of {self.group}")
        codes = coded // (2 if self.codes == "e2m1" else 1)
        return codes + self.plain_bytes + coded // self.group + self.pad

    def row_values(self, nbytes: int) -> int:
        """Values of a row of `nbytes`; ValueError where no row has that size."""
        per_group = self.group // (2 if self.codes == "e2m1" else 1) + 1
        coded = nbytes - self.plain_bytes - self.pad
        if coded < 0 or coded % per_group:
            raise ValueError(f"a row of {nbytes} bytes has no whole groups of {per_group} bytes")
        return coded // per_group * self.group + self.plain


# Source: cache quantisation of DeepSeek-V4.1 (window rows, compressed entries, index keys).
WINDOW_ROWS = RowFormat("e4m3", 32, "ue8m0")
COMPRESSED_ROWS = RowFormat("e2m1", 16, "e4m3")
INDEX_ROWS = RowFormat("e2m1", 32, "ue8m0")


def latent_rows(width: int, rope: int) -> RowFormat:
    """Window rows and entries of DeepSeek-V4 ("fp8_ds_mla"): 584 bytes for 512 values.

    All but the `rope` rotated values at the end are e4m3 in groups of 64; those stay bf16. The
    scale bytes are filled up to a multiple of 8.
    """
    return RowFormat("e4m3", 64, "ue8m0", plain=rope, pad=-((width - rope) // 64) % 8)


def encode_rows(values: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """uint8 [..., B] of values [..., D] of any float type; a group's scale is of its largest.

    With a = max |x| of the group, codes are x / s rounded to nearest, ties to even:
    e4m3 codes: s = 2^ceil(log2(max(a, 1e-4) / 448));
    e2m1 codes, ue8m0 scale: s = 2^ceil(log2(max(a, 6 * 2^-126) / 6));
    e2m1 codes, e4m3 scale: s = e4m3(clamp(a / 6, 2^-9, 448)).
    """
    assert (values.shape[-1] - form.plain) % form.group == 0
    if not backend.uses_triton(values):
        return reference.encode_rows(values, form)
    from kernels.cache_rows import launch

    return launch.encode_rows(values, form)


def decode_rows(rows: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """fp32 [..., D] of rows uint8 [..., B]: code * scale, exact."""
    assert rows.dtype == torch.uint8
    if not backend.uses_triton(rows):
        return reference.decode_rows(rows, form)
    from kernels.cache_rows import launch

    return launch.decode_rows(rows, form)


def rounded(values: torch.Tensor, form: RowFormat | None) -> torch.Tensor:
    """What a row is after a way through the cache, in the type of `values`; itself without form."""
    if form is None:
        return values
    return decode_rows(encode_rows(values, form), form).to(values.dtype)
