"""The stored formats that humming's kernels read, by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quant_linear.matrix import Fp8BlockMatrix, Int4Matrix, Mxfp4Matrix

StoredMatrix = Fp8BlockMatrix | Int4Matrix | Mxfp4Matrix
# Rows that one scale covers in humming's blocks; smaller blocks become groups of single rows.
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Form:
    """A format: bits of a code, inputs and outputs that share a scale, zero points or none."""

    name: str
    bits: int
    group: int
    block_n: int = 1
    zero: bool = False

    @property
    def schema(self) -> dict[str, object]:
        """Arguments of humming's HummingWeightSchema, types by name."""
        types = {"mxfp4": ("float4e2m1", "float8e8m0"), "int4": ("uint4", "bfloat16")}
        codes, scales = types.get(self.name.split("-")[0], ("float8e4m3", "float8e8m0"))
        found: dict[str, object] = {"b_dtype": codes, "weight_scale_group_size": self.group}
        if self.block_n > 1:
            return found | {"weight_scale_group_size_n": self.block_n}
        return found | {"bs_dtype": scales, "has_zero_point": self.zero}


FORMS = {
    form.name: form
    for form in (
        Form("mxfp4", 4, 32),
        Form("int4-g128", 4, 128),
        Form("int4-g32", 4, 32),
        Form("int4-g128-zero", 4, 128, zero=True),
        Form("int4-g32-zero", 4, 32, zero=True),
        Form("fp8-b128", 8, BLOCK, BLOCK),
        Form("fp8-g32", 8, 32),
    )
}


def form_of(weight: StoredMatrix) -> Form | None:
    """The form of a matrix in checkpoint order, or None where humming has none for it.

    fp8 blocks of 128 x 128 keep their scales, in fp32; those of 32 x 32 with e8m0 scales become
    groups of 32 inputs. INT4 needs bf16 scales, which the kernels multiply in bf16.
    """
    match weight:
        case Mxfp4Matrix(_, _, order):
            return FORMS["mxfp4"] if order == "pairs" else None
        case Int4Matrix(_, scale, zero, group, order):
            name = f"int4-g{group}{'' if zero is None else '-zero'}"
            fits = order == "pairs" and scale.dtype == torch.bfloat16
            return FORMS.get(name) if fits else None
        case Fp8BlockMatrix(_, scale, block_n, block_k):
            whole = weight.out_features % BLOCK == 0 and weight.in_features % BLOCK == 0
            if (block_n, block_k) == (BLOCK, BLOCK) and whole:
                return FORMS["fp8-b128"]
            small = (block_n, block_k) == (32, 32) and scale.dtype == torch.uint8
            return FORMS["fp8-g32"] if small and whole else None
