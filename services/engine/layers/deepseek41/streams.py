"""Single-pass hyper-connections: a sublayer collapses with the weights of the one before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.mhc import mhc_collapse, mhc_expand
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.deepseek.streams import HyperMixer, MhcConfig
from services.engine.layers.norm import RmsNorm

# Legend: T tokens, n streams, D hidden.


@dataclass(frozen=True, slots=True)
class SinglePassSublayer:
    """X'[j] = post[j] block(norm(sum_i pre[i] X[i])) + sum_i comb[i, j] X[i].

    `post` and `comb` are this sublayer's, `pre` is the one that the sublayer before has made: its
    mixing values and the collapse read the streams in one pass.
    """

    mixer: HyperMixer
    norm: RmsNorm

    @classmethod
    def load(cls, reader: WeightReader, name: str, config: MhcConfig) -> SinglePassSublayer:
        """The sublayer `name`: "attn" or "ffn"."""
        norm = RmsNorm.load(
            reader, f"{name}_norm", config.hidden, config.norm_eps, zero_centred=False
        )
        return cls(HyperMixer.load(reader, f"hc_{name}", config), norm)

    def around(
        self,
        x_TnD: torch.Tensor,
        pre_Tn: torch.Tensor,
        block: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The streams after `block`, and the weights of the next collapse, fp32 [T, n].

        `block` maps [T, D] of the type of the streams to [T, D].
        """
        mixes = self.mixer(x_TnD)
        y_TD = block(self.norm(mhc_collapse(x_TnD, pre_Tn).to(x_TnD.dtype)))
        out_TnD = mhc_expand(x_TnD, y_TD.to(x_TnD.dtype), mixes.post_Tn, mixes.comb_Tnn)
        return out_TnD.to(x_TnD.dtype), mixes.pre_Tn


def first_weights(tokens: int, streams: int, device: torch.device) -> torch.Tensor:
    """Collapse weights of the first sublayer: the first stream alone. fp32 [T, n]."""
    pre_Tn = torch.zeros(tokens, streams, device=device)
    pre_Tn[:, 0] = 1.0
    return pre_Tn
