"""Four-bit layouts of published checkpoints: written by their documents, read by other decoders.

compressed-tensors: `compressed_tensors.compressors.pack_quantized` unpacks. AutoAWQ: the order of
`awq.utils.packing_utils`, in which nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """`group` inputs share a scale; AutoAWQ always has zero points."""

    packing: Literal["ct", "awq"]
    group: int
    asymmetric: bool

    @classmethod
    def of(cls, name: str) -> Int4Layout | None:
        """Of a name like "ct-sym-g128", "ct-asym-g32" or "awq-g32"; None for other layouts."""
        packing, *rest = name.split("-")
        if packing not in ("ct", "awq"):
            return None
        return cls(packing, int(rest[-1].removeprefix("g")), rest[0] != "sym")

    def config(self) -> dict[str, Any]:
        """quantization_config, whose lists name the wrong modules, as some releases' do."""
        if self.packing == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": ["gate_proj"],
            }
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": not self.asymmetric,
            "strategy": "group",
            "group_size": self.group,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["re:.*gate_proj.*"],
        }

    def tensors(self, name: str, w_NK: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the matrix `name`, or the matrix in bf16 where groups do not fit."""
        base = name.removesuffix(".weight")
        if w_NK.shape[1] % self.group:
            yield name, w_NK.bfloat16()
            return
        dtype = torch.float16 if self.packing == "awq" else torch.bfloat16
        codes, scale, zero = quantise(w_NK, self.group, dtype, asymmetric=self.asymmetric)
        if self.packing == "awq":
            yield f"{base}.qweight", pack(codes.t(), AWQ_ORDER)
            yield f"{base}.qzeros", pack(zero.t(), AWQ_ORDER)
            yield f"{base}.scales", scale.t().contiguous()
            return
        yield f"{base}.weight_packed", pack(codes, range(8))
        yield f"{base}.weight_scale", scale
        yield f"{base}.weight_shape", torch.tensor(w_NK.shape)
        if self.asymmetric:
            yield f"{base}.weight_zero_point", pack(zero.t(), range(8)).t().contiguous()


def quantise(
    w_NK: torch.Tensor, group: int, dtype: torch.dtype, *, asymmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0..15 int64 [N, K], scales [N, G], zero points 0..15 int64 [N, G]."""
    groups = w_NK.float().unflatten(1, (-1, group))
    if asymmetric:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, 15)
    else:
        scale = (groups.abs().amax(-1) / 7.5).to(dtype)
        zero = torch.full_like(scale, 8, dtype=torch.float32)
    codes = (groups / scale.float()[..., None]).round() + zero[..., None]
    return codes.clamp(0, 15).flatten(1).long(), scale, zero.long()


def pack(codes: torch.Tensor, order: Any) -> torch.Tensor:
    """int32 [R, C / 8] of codes [R, C]; nibble i of a word holds column order[i] of eight."""
    words = sum(codes[:, column::8] << (4 * i) for i, column in enumerate(order))
    return words.to(torch.int32).contiguous()


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int64 [R, C] of int32 [R, C / 8]."""
    codes = torch.empty(words.shape[0], 8 * words.shape[1], dtype=torch.int64)
    for i, column in enumerate(AWQ_ORDER):
        codes[:, column::8] = (words.long() >> (4 * i)) & 15
    return codes


def int4_value(name: str, stored: Tensors) -> torch.Tensor | None:
    """fp32 value of the matrix `name`; None where it is not stored in four bits."""
    base = name.removesuffix(".weight")
    if f"{base}.qweight" in stored:
        return _awq_value(*(stored[f"{base}.{n}"] for n in ("qweight", "qzeros", "scales")))
    if f"{base}.weight_packed" not in stored:
        return None
    shape = torch.Size(stored[f"{base}.weight_shape"].tolist())
    values = unpack_from_int32(stored[f"{base}.weight_packed"], 4, shape).float()
    scale = stored[f"{base}.weight_scale"].float()
    zero = stored.get(f"{base}.weight_zero_point")
    group = shape[1] // scale.shape[1]
    if zero is not None:
        rows = unpack_from_int32(zero, 4, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
        values -= rows.float().repeat_interleave(group, 1)
    return values * scale.repeat_interleave(group, 1)


def _awq_value(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    group = qweight.shape[0] // scales.shape[0]
    zero = unpack_awq(qzeros).repeat_interleave(group, 0)
    values = (unpack_awq(qweight) - zero).float() * scales.float().repeat_interleave(group, 0)
    return values.t().contiguous()
