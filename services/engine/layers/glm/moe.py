"""Mixture of experts with sigmoid scores, expert groups and a plain shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.moe import ExpertWeights, routed_experts
from kernels.router import route_scores
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.linear import Linear
from services.engine.layers.mlp import DenseMlp
from services.engine.models.base import Collectives

# Legend: T tokens, E experts, k experts of a token.

_WEIGHT_EPS = 1e-20  # added to the sum of the chosen scores


@dataclass(frozen=True, slots=True)
class GlmMoeConfig:
    """Sizes of a sparse layer; `limit` clamps routed and shared experts."""

    hidden: int
    experts: int
    top_k: int
    groups: int
    top_groups: int
    intermediate: int
    shared_intermediate: int
    normalise: bool
    scale: float
    limit: float


@dataclass(frozen=True, slots=True)
class GlmMoe:
    """Routed experts, times `scale`, plus a shared one: [T, hidden] to fp32 [T, hidden].

    A rank holds whole routed experts and a share of the shared one; one sum over ranks.
    """

    config: GlmMoeConfig
    router: Linear
    bias_E: torch.Tensor
    experts: ExpertWeights
    shared: DenseMlp
    collectives: Collectives

    @classmethod
    def load(cls, reader: WeightReader, config: GlmMoeConfig, collectives: Collectives) -> GlmMoe:
        c = config
        shared = reader.at("shared_experts")
        sizes = (c.hidden, c.shared_intermediate, collectives)
        return cls(
            config=config,
            router=Linear.replicated(reader, "gate", (c.experts, c.hidden)),
            bias_E=reader.tensor("gate.e_score_correction_bias", (c.experts,)),
            experts=reader.at("experts").experts(c.experts, c.hidden, c.intermediate),
            shared=DenseMlp.load(shared, *sizes, limit=c.limit),
            collectives=collectives,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        ids_Tk, weights_Tk = route_scores(
            self.router(x.float(), torch.float32),
            scoring="sigmoid",
            bias_E=self.bias_E.float(),
            top_k=c.top_k,
            normalise=c.normalise,
            eps=_WEIGHT_EPS,
            scale=c.scale,
            groups=c.groups,
            top_groups=c.top_groups,
        )
        y = routed_experts(x, ids_Tk, weights_Tk, self.experts, limit=c.limit)
        return self.collectives.all_reduce(y + self.shared.partial(x))
