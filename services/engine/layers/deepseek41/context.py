"""What the layers of DeepSeek-V4.1 hand to each other in one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

from kernels.lightning_index import Candidates
from services.engine.cache.spec import CachePools
from services.engine.layers.deepseek.context import DeepseekContext, DeepseekContextMaker
from services.engine.runtime.batch import StepBatch

# Legend: T packed tokens, n streams, S selected entries, D width of an entry or key.


@dataclass(slots=True)
class Published:
    """What a source layer has added to its cache in this pass, before any rounding.

    fp32 [T, D]; rows of tokens that close no window have no meaning.
    """

    entries_TD: torch.Tensor
    keys_TD: torch.Tensor | None


@dataclass(slots=True)
class Carry:
    """The values that later layers of the pass read; the layers write them in order.

    None until the first layer that sets them.
    """

    pre_Tn: torch.Tensor | None = None  # collapse weights for the next sublayer
    selected_TS: torch.Tensor | None = None  # of the last index source
    candidates: Candidates | None = None  # of the candidate source
    published: Published | None = None  # of the last source layer


@dataclass(frozen=True, slots=True)
class SharingContext(DeepseekContext):
    """A pass and what its layers share."""

    carry: Carry = field(default_factory=Carry, kw_only=True)


@dataclass(frozen=True, slots=True)
class SharingContextMaker:
    """Makes the context of a forward pass."""

    base: DeepseekContextMaker

    def __call__(self, batch: StepBatch, pools: CachePools) -> SharingContext:
        made = self.base(batch, pools)
        return SharingContext(**{f.name: getattr(made, f.name) for f in fields(made)})
