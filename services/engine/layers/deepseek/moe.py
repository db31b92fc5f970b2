"""Mixture of experts with square-root-softplus scores, hash layers and a plain shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.moe import ExpertWeights, routed_experts
from kernels.router import Scoring, route_scores, weights_of
from services.common.checkpoint import CheckpointError
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.context import DeepseekContext
from services.engine.layers.linear import Linear
from services.engine.layers.mlp import DenseMlp
from services.engine.models.base import Collectives

# Legend: T tokens, E experts, k experts of a token, V vocabulary.

EXPERT_NAMES = ("w1", "w3", "w2")  # gate, up, down
_SCORING: Scoring = "sqrtsoftplus"


@dataclass(frozen=True, slots=True)
class DeepseekMoeConfig:
    """Sizes of a sparse layer; `vocab` rows of a hash layer's table; `limit` clamps the experts.

    The weights of the chosen are divided by their sum + `eps` where `normalise`.
    """

    hidden: int
    vocab: int
    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    scale: float
    limit: float | None
    normalise: bool = True
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Router:
    """Experts of each token, chosen by score + bias, or by token id on a hash layer.

    Tokens of images are chosen for by score + `image_bias` on every layer that has one.
    """

    config: DeepseekMoeConfig
    gate: Linear
    bias_E: torch.Tensor | None
    image_bias_E: torch.Tensor | None
    experts_Vk: torch.Tensor | None  # int64, of a hash layer

    @classmethod
    def load(cls, reader: WeightReader, config: DeepseekMoeConfig, *, hashed: bool) -> Router:
        """Read `gate`; `gate.bias` may be absent on a hash layer, `gate.bias_vl` on any."""
        experts = config.experts
        gate = reader.at("gate")

        def bias(name: str) -> torch.Tensor:
            return gate.tensor(name, (experts,)).float()

        return cls(
            config=config,
            gate=Linear.replicated(reader, "gate", (experts, config.hidden)),
            bias_E=bias("bias") if not hashed or gate.has("bias") else None,
            image_bias_E=bias("bias_vl") if gate.has("bias_vl") else None,
            experts_Vk=_expert_table(gate, config) if hashed else None,
        )

    def __call__(self, x: torch.Tensor, ctx: DeepseekContext) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [T, k] and weights fp32 [T, k]."""
        c = self.config
        logits_TE = self.gate(x.float(), torch.float32)
        if self.experts_Vk is None:
            return self._by_score(logits_TE, self._biases(ctx))
        ids_Tk = self.experts_Vk[ctx.batch.token_ids_T]
        if ctx.is_image_T is not None and self.image_bias_E is not None:
            of_images_Tk, _ = self._by_score(logits_TE, self.image_bias_E)
            ids_Tk = torch.where(ctx.is_image_T[:, None], of_images_Tk, ids_Tk)
        weights_Tk = weights_of(
            logits_TE, ids_Tk, scoring=_SCORING, normalise=c.normalise, eps=c.eps, scale=c.scale
        )
        return ids_Tk, weights_Tk

    def _biases(self, ctx: DeepseekContext) -> torch.Tensor:
        """[E], or [T, E] where tokens of images are among the others."""
        assert self.bias_E is not None
        if ctx.is_image_T is None or self.image_bias_E is None:
            return self.bias_E
        return torch.where(ctx.is_image_T[:, None], self.image_bias_E, self.bias_E)

    def _by_score(
        self, logits_TE: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        return route_scores(
            logits_TE,
            scoring=_SCORING,
            bias_E=bias,
            top_k=c.top_k,
            normalise=c.normalise,
            eps=c.eps,
            scale=c.scale,
        )


def _expert_table(gate: WeightReader, config: DeepseekMoeConfig) -> torch.Tensor:
    """Experts of every token id; CheckpointError where one is not an expert's number."""
    shape = (config.vocab, config.top_k)
    table_Vk = gate.tensor("tid2eid", shape, dtypes=("I64",))
    if bool(((table_Vk < 0) | (table_Vk >= config.experts)).any()):
        raise CheckpointError(
            f"an expert number is outside 0..{config.experts - 1}", tensor=gate.full_name("tid2eid")
        )
    return table_Vk


@dataclass(frozen=True, slots=True)
class DeepseekMoe:
    """Routed experts plus a shared one: [T, hidden] to fp32 [T, hidden].

    A rank holds whole routed experts and a share of the shared one; one sum over ranks.
    """

    router: Router
    experts: ExpertWeights
    shared: DenseMlp
    collectives: Collectives

    @classmethod
    def load(
        cls,
        reader: WeightReader,
        config: DeepseekMoeConfig,
        collectives: Collectives,
        *,
        hashed: bool,
    ) -> DeepseekMoe:
        c = config
        return cls(
            router=Router.load(reader, config, hashed=hashed),
            experts=reader.at("experts").experts(
                c.experts, c.hidden, c.intermediate, names=EXPERT_NAMES
            ),
            shared=DenseMlp.load(
                reader.at("shared_experts"),
                c.hidden,
                c.shared_intermediate,
                collectives,
                limit=c.limit,
                names=EXPERT_NAMES,
            ),
            collectives=collectives,
        )

    def __call__(self, x: torch.Tensor, ctx: DeepseekContext) -> torch.Tensor:
        limit = self.router.config.limit
        ids_Tk, weights_Tk = self.router(x, ctx)
        y = routed_experts(x, ids_Tk, weights_Tk, self.experts, limit=limit)
        return self.collectives.all_reduce(y + self.shared.partial(x))
