"""Feed-forward halves: dense SwiGLU and sparse mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.activation import sigmoid, silu_and_mul
from kernels.moe import ExpertWeights, route, routed_experts
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.linear import Linear, RowLinear
from services.engine.models.base import Collectives

# Legend: T tokens, E experts, H hidden, I intermediate.


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(silu(gate x) * up x): [T, H] to fp32 [T, H]; I is split over ranks.

    `limit` as in `kernels.activation.silu_and_mul`.
    """

    gate: Linear
    up: Linear
    down: RowLinear
    limit: float | None = None

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        hidden: int,
        intermediate: int,
        collectives: Collectives,
        *,
        limit: float | None = None,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> DenseMlp:
        """`names` are those of the gate, up and down matrices."""
        gate, up, down = names
        shape = (intermediate, hidden)
        return cls(
            gate=Linear.by_outputs(reader, gate, shape),
            up=Linear.by_outputs(reader, up, shape),
            down=RowLinear.by_inputs(reader, down, (hidden, intermediate), collectives),
            limit=limit,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._hidden(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, fp32 [T, H]."""
        return self.down.partial(self._hidden(x))

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(self.gate(x), self.up(x), self.limit)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of a sparse layer; `normalise` divides the weights of the chosen by their sum."""

    hidden: int
    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    normalise: bool


@dataclass(frozen=True, slots=True)
class SparseMoe:
    """Routed experts plus a gated shared expert: [T, H] to fp32 [T, H].

    A rank holds whole routed experts and a share of the shared one; one sum over ranks.
    """

    config: MoeConfig
    router: Linear
    experts: ExpertWeights
    shared: DenseMlp
    shared_gate: Linear
    collectives: Collectives

    @classmethod
    def load(cls, reader: WeightReader, config: MoeConfig, collectives: Collectives) -> SparseMoe:
        hidden, shared = config.hidden, config.shared_intermediate
        experts = reader.at("experts")
        return cls(
            config=config,
            router=Linear.replicated(reader, "gate", (config.experts, hidden)),
            experts=experts.experts(config.experts, hidden, config.intermediate),
            shared=DenseMlp.load(reader.at("shared_expert"), hidden, shared, collectives),
            shared_gate=Linear.replicated(reader, "shared_expert_gate", (1, hidden)),
            collectives=collectives,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits_TE = self.router(x, torch.float32)
        ids, weights = route(logits_TE, self.config.top_k, normalise=self.config.normalise)
        y = routed_experts(x, ids, weights.to(x.dtype).float(), self.experts)
        shared_gate = sigmoid(self.shared_gate(x, torch.float32))
        y = y + shared_gate * self.shared.partial(x)
        return self.collectives.all_reduce(y)
