"""The variants of the latent attention kernel that servers of GLM launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.sparse_attention import configs
from kernels.sparse_attention.launch import Keys
from kernels.sparse_attention.variants import PLAIN_ROWS, merges, variant


def variants(target: int) -> Iterator[Variant]:
    """Attention to selected latents, and the merge of every number of splits."""
    keys = Keys(None, PLAIN_ROWS, selected=True, sink=False)
    yield variant(
        "GLM selected", keys, configs.select(configs.CARDS[target], 1, configs.BLOCK_HEADS)
    )
    yield from merges(sink=False)
