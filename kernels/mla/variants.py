"""The variants of the latent attention kernel that servers of GLM launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.sparse_attention.launch import Keys
from kernels.sparse_attention.variants import PLAIN_ROWS, merges, of_keys


def variants(target: int) -> Iterator[Variant]:
    """Attention to selected latents, and the merge of every number of splits."""
    keys = Keys(None, PLAIN_ROWS, selected=True, sink=False)
    yield from of_keys(target, "GLM selected", keys)
    yield from merges(sink=False)
