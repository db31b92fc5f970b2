"""Triton kernel: rows of a vocabulary table. Legend: T ids, V rows here, D columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "first"])
def embed(ids, table, out, rows, first, width, BLOCK: tl.constexpr):
    """out[t] = table[ids[t] - first], zeros where there is no such row. Grid (T, D / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(ids + token) - first
    known = (row >= 0) & (row < rows)
    value = tl.load(table + row * width + column, mask=inside & known, other=0.0)
    tl.store(out + token * width + column, value.to(out.dtype.element_ty), mask=inside)
