"""Rows of the cache: values of the compute type, or quantised."""

from __future__ import annotations

import torch

from kernels.cache_rows import RowFormat, encode_rows
from services.engine.cache.spec import CacheTensor


def row_tensor(name: str, width: int, dtype: torch.dtype, form: RowFormat | None) -> CacheTensor:
    """The cache tensor of rows of `width` values, of type `dtype` without a form."""
    if form is None:
        return CacheTensor(name, (width,), dtype)
    return CacheTensor(name, (form.row_bytes(width),), torch.uint8)


def stored(values: torch.Tensor, form: RowFormat | None) -> torch.Tensor:
    """Values as they go into a pool."""
    return values if form is None else encode_rows(values, form)
