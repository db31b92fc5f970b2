"""Makes humming plan and compile for a card that this machine need not have.

It has no argument for that: everything that decides reads its DeviceInfo, and the assembler's
target its KernelRuntime. For processes that build, never for a server.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kernels.backend import SHARED_KIB
from kernels.cards import KIB
from kernels.humming.cards import MIB, Card


def install(card: Card, cache: Path, compiler: str | None) -> None:
    """Before humming's first use. `cache` keeps what it compiles; `compiler` "nvcc" or "nvrtc",
    or the one that is found."""
    os.environ["HUMMING_CACHE_DIR"] = str(cache)
    os.environ["HUMMING_TMP_DIR"] = str(cache)
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: 0
        torch.cuda.device = lambda *_: nullcontext()  # type: ignore[misc,assignment]
    os.environ["HUMMING_COMPILER"] = compiler or _compiler()
    device: Any = import_module("humming.device")
    device._get_device_info_extension = lambda: SimpleNamespace(
        _DeviceInfo=lambda _: device_info(card)
    )
    import_module("humming.jit.runtime").KernelRuntime.init_sm_version = _sm_version(card)
    import_module("humming.kernel.humming").HummingKernel.register_kernel = lambda _: None


def _compiler() -> str:
    """nvcc where it is found: its cubins are a tenth of NVRTC's."""
    found = import_module("humming.utils.cuda").find_all_cuda_paths()
    return "nvcc" if any("nvcc" in toolkit["binaries"] for toolkit in found) else "nvrtc"


def _sm_version(card: Card) -> Any:
    def init_sm_version(runtime: Any) -> None:
        runtime.sm_version = card.target
        runtime.sm_version_str = card.assembler

    return init_sm_version


def device_info(card: Card) -> SimpleNamespace:
    """The fields that humming's device extension has."""
    rates = {"float16": card.rate, "bfloat16": card.rate}
    eight = dict.fromkeys(("int8", "float8e4m3", "float8e5m2"), 2 * card.rate)
    return SimpleNamespace(
        index=0, name=card.name, is_ppu=False, sm_count=card.multiprocessors,
        sm_version=card.target, sm_major=card.target // 10, sm_minor=card.target % 10,
        max_threads_per_block=1024, max_threads_per_sm=2048, max_registers_per_sm=65536,
        l2_cache_size=card.l2 * MIB, l2_cache_size_mb=float(card.l2),
        default_smem_size=48 * KIB, max_smem_size=SHARED_KIB[card.target] * KIB,
        max_smem_size_kb=float(SHARED_KIB[card.target]),
        memory_bandwidth_gbps=card.bandwidth, tensorcore_tops=rates | eight,
    )  # fmt: skip
