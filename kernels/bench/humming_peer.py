"""humming-kernels as a peer, where it is installed: the same matrices in its own layout.

Its kernels follow the card. Under TRITON_OVERRIDE_ARCH=sm80 its view of the card is set to that
one too, so that both sides run Ampere's instructions; the assembler's target stays the real card.
Only this benchmark does so, in a process of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernels import backend
from kernels.quant_linear import Fp8BlockMatrix, Int4Matrix
from kernels.quant_linear.launch import QuantMatrix

SHARED_KIB = {80: 163, 86: 99, 89: 99}
LOCKS = 8192


def installed() -> bool:
    return backend.has_package("humming")


def follow_override() -> None:
    """Make humming plan for the overridden card, if one is set. Before its first use."""
    override = os.environ.get("TRITON_OVERRIDE_ARCH", "")
    if not override:
        return
    runtime_class = import_module("humming.jit.runtime").KernelRuntime
    version = int(override.removeprefix("sm"))
    real = "".join(map(str, torch.cuda.get_device_capability()))
    card = import_module("humming.device").DeviceInfo
    card.sm_version = property(lambda _: version)
    card.sm_major = property(lambda _: version // 10)
    card.sm_minor = property(lambda _: version % 10)
    card.max_smem_size = property(lambda _: SHARED_KIB[version] << 10)

    def init_sm_version(runtime: Any) -> None:
        runtime.sm_version = version
        runtime.sm_version_str = f"{real}a" if int(real) >= 90 else real

    runtime_class.init_sm_version = init_sm_version


def _schema(weights: str) -> Any:
    dtypes = import_module("humming").dtypes
    schema = import_module("humming.schema").HummingWeightSchema
    if weights == "fp8":
        return schema(
            b_dtype=dtypes.float8e4m3, weight_scale_group_size=128, weight_scale_group_size_n=128
        )
    if weights == "int4":
        return schema(b_dtype="uint4", bs_dtype=dtypes.bfloat16, weight_scale_group_size=128)
    return schema(b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e8m0, weight_scale_group_size=32)


class Layer:
    """The matrices of one shape, repacked by the peer."""

    def __init__(self, shape: tuple[str, int, int], matrices: list[QuantMatrix]) -> None:
        transform = import_module("humming.transform").prepare_and_transform_humming_tensors
        weights, n, k = shape
        self._sets = []
        for matrix in matrices:
            scale = matrix.scale.clone()
            if not isinstance(matrix, Fp8BlockMatrix | Int4Matrix):
                scale = scale.view(torch.float8_e8m0fnu)
            raw = {"weight": matrix.codes.clone().view(torch.int32), "weight_scale": scale}
            self._layer, tensors = transform(
                raw, n, k, _schema(weights), torch_dtype=torch.bfloat16
            )
            self._sets.append(tensors)
        self._locks = torch.zeros(LOCKS, dtype=torch.int32, device="cuda")

    def calls(self, x: torch.Tensor, out: torch.Tensor) -> list[Callable[[], object]]:
        """One call a matrix, by the peer's own choice of tiles for this number of rows."""
        forward = import_module("humming.forward").humming_forward
        choose = import_module("humming.tune").get_heuristics_config
        tiles = choose(self._layer, shape_m=len(x), gemm_type="dense")
        options = {
            "outputs": out,
            "locks": self._locks,
            "compute_config": json.dumps({"gemm_type": "dense"}),
            "tuning_config": json.dumps(tiles),
        }

        def call(tensors: dict[str, torch.Tensor]) -> object:
            weight, scale = tensors["weight"], tensors["weight_scale"]
            return forward(self._layer, x, weight, scale, **options)

        return [partial(call, tensors) for tensors in self._sets]
