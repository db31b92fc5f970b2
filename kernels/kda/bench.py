"""The benchmark of the prefill of KDA: a layer of GLM-5.3 on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from kernels import kda
from kernels.bench.case import Case
from kernels.gated_delta import prefill
from kernels.kda import reference


def cases() -> Iterator[Case]:
    yield from prefill.cases(LAYER)


def _decay(x: torch.Tensor) -> torch.Tensor:
    return -5 * torch.sigmoid(x)


def _peer() -> Callable[..., Any]:
    rule: Callable[..., Any] = import_module("fla.ops.kda").chunk_kda
    return rule


LAYER = prefill.Layer(
    operation="kda",
    key_heads=64,
    heads=64,
    channel_decay=True,
    decay=_decay,
    rule=kda.kda,
    reference=reference.kda,
    peer=_peer,
    peer_options=(("safe_gate", True),),
)
