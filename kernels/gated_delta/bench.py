"""The benchmark of the gated delta rule's prefill: a layer of Qwen3.8 on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from kernels import gated_delta
from kernels.bench.case import Case
from kernels.gated_delta import prefill, reference


def cases() -> Iterator[Case]:
    yield from prefill.cases(LAYER)


def _decay(x: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.softplus(x)


def _peer() -> Callable[..., Any]:
    rule: Callable[..., Any] = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return rule


LAYER = prefill.Layer(
    operation="gated_delta",
    key_heads=16,
    heads=48,
    channel_decay=False,
    decay=_decay,
    rule=gated_delta.gated_delta,
    reference=reference.gated_delta,
    peer=_peer,
)
