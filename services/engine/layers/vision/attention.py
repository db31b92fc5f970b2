"""The attention half of a tower's block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rotary import apply_rotary
from kernels.vision_attention import vision_attention
from services.engine.checkpoints.loader import WeightReader
from services.engine.layers.norm import RmsNorm
from services.engine.layers.vision.parts import Affine

# Legend: P patches, D width of the tower, H heads, F half a head's width.


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and names of an attention. `head_eps` None: no norms of query and key heads."""

    width: int
    heads: int
    names: tuple[str, str]  # joint projection of queries, keys and values; output projection
    head_eps: float | None = None

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.width // self.heads


@dataclass(frozen=True, slots=True)
class VisionAttention:
    """x [P, D] to fp32 [P, D]: rotary attention among all patches of one image."""

    shape: AttentionShape
    qkv: Affine
    out: Affine
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None

    @classmethod
    def load(cls, reader: WeightReader, shape: AttentionShape) -> VisionAttention:
        """Read both projections, with biases, and the norms of the heads if there are any."""
        width, (qkv, out) = shape.width, shape.names

        def norm(name: str) -> RmsNorm | None:
            eps = shape.head_eps
            if eps is None:
                return None
            return RmsNorm.load(reader, name, shape.head_dim, eps, zero_centred=False)

        return cls(
            shape=shape,
            qkv=Affine.load(reader, qkv, (3 * width, width)),
            out=Affine.load(reader, out, (width, width)),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
        )

    def __call__(
        self, x_PD: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """`angles` are cos and sin, fp32 [P, F]."""
        parts = self.qkv(x_PD, x_PD.dtype).view(-1, 3, self.shape.heads, self.shape.head_dim)
        q, k, v = parts.unbind(1)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        o = vision_attention(apply_rotary(q, *angles), apply_rotary(k, *angles), v)
        return self.out(o.flatten(1), torch.float32)
