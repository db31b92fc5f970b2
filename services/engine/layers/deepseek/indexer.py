"""Lightning indexer: which compressed entries a token attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cache_rows import RowFormat, rounded
from kernels.hadamard import hadamard
from kernels.lightning_index import select_entries
from kernels.rotary import rotate_tail_pairs
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.compressor import Compressor, CompressorConfig
from services.engine.layers.deepseek.context import DeepseekContext
from services.engine.layers.linear import Linear

# Legend: T tokens, H index heads, D index head dim, S = top_k.

INDEX_GROUP = "index"


def index_name(layer: str) -> str:
    """Name of the key compressor of a layer."""
    return f"{layer}.index"


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """`heads` queries of width `head_dim` from the low-rank query; `top_k` entries are kept.

    With `form`, keys are stored so, and queries and keys are Hadamard-rotated and rounded to it.
    """

    hidden: int
    query_rank: int
    heads: int
    head_dim: int
    top_k: int
    ratio: int
    eps: float
    form: RowFormat | None = None

    @property
    def keys(self) -> CompressorConfig:
        """Of the compressor that makes the keys."""
        return CompressorConfig(
            hidden=self.hidden,
            width=self.head_dim,
            ratio=self.ratio,
            overlap=True,
            eps=self.eps,
            form=self.form,
            rotated=self.form is not None,
        )


@dataclass(frozen=True, slots=True)
class LightningIndexer:
    """Low-rank queries and x to the entries of each token. On every rank whole."""

    config: IndexerConfig
    query: Linear
    weights: Linear
    keys: Compressor

    @classmethod
    def load(cls, reader: WeightReader, name: str, config: IndexerConfig) -> LightningIndexer:
        c = config
        return cls(
            config=config,
            query=Linear.replicated(reader, "wq_b", (c.heads * c.head_dim, c.query_rank)),
            weights=Linear.replicated(reader, "weights_proj", (c.heads, c.hidden)),
            keys=Compressor.load(reader.at("compressor"), index_name(name), c.keys),
        )

    def __call__(self, qr: torch.Tensor, x: torch.Tensor, ctx: DeepseekContext) -> torch.Tensor:
        """int64 [T, top_k], ascending, -1 behind the last."""
        c = self.config
        keys = self.keys(x, ctx, INDEX_GROUP)
        angles = ctx.compressed_angles
        q_THD = self.query(qr).view(-1, c.heads, c.head_dim)
        q_THD = rotate_tail_pairs(q_THD, angles.cos_TF, angles.sin_TF)
        weights_TH = self.weights(x).float() * (c.head_dim**-0.5 * c.heads**-0.5)
        if c.form is not None:
            q_THD = rounded(hadamard(q_THD), c.form)
        at = (keys.pages, ctx.sequence_T, ctx.visible(c.ratio))
        return select_entries(q_THD, weights_TH, keys.pool, *at, top_k=c.top_k, form=keys.form)
