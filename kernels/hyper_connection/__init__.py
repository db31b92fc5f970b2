"""Gated hyper-connections: several residual streams, one block input, weighted injection."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.hyper_connection import reference
from kernels.quant_linear.matrix import Matrix, PlainMatrix

# Legend: T tokens, C streams, H hidden, L low rank.


def hyper_read(
    streams_TX: torch.Tensor,
    norm_X: torch.Tensor,
    down: Matrix,
    up: Matrix,
    inject: Matrix | None,
    *,
    count: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Block input [T, H] and injection weights [T, C] (None without `inject`), both fp32.

    streams fp32 [T, C * H], stream-major; norm [C * H] zero-centred, one mean per stream; down
    [L, C * H], up [C * H, L], inject [C, C * H]. With n = norm(streams):
    x = mean over streams of sigmoid(up silu(down n / C)) * n; weights = 2 sigmoid(inject n / C).
    On a GPU the matrices are plain. Beyond 64 tokens the number of tokens and the card pick the
    parts of a sum; among steps alike in these a token's result does not depend on the others.
    Source: Qwen4-Exp gated residual.
    """
    assert streams_TX.shape[1] == norm_X.shape[0] and norm_X.shape[0] % count == 0
    if not backend.uses_triton(streams_TX):
        return reference.hyper_read(streams_TX, norm_X, down, up, inject, count, eps)
    from kernels.hyper_connection import launch

    assert isinstance(down, PlainMatrix) and isinstance(up, PlainMatrix)
    assert inject is None or isinstance(inject, PlainMatrix)
    injected = None if inject is None else inject.data
    return launch.read(streams_TX, norm_X, down.data, up.data, injected, count, eps)


def hyper_write(
    streams_TX: torch.Tensor, y_TH: torch.Tensor, inject_TC: torch.Tensor
) -> torch.Tensor:
    """streams[c] + y * inject[c] for every stream c: fp32 [T, C * H]."""
    assert streams_TX.shape[1] == y_TH.shape[1] * inject_TC.shape[1]
    if not backend.uses_triton(streams_TX):
        return reference.hyper_write(streams_TX, y_TH, inject_TC)
    from kernels.hyper_connection import launch

    return launch.write(streams_TX, y_TH, inject_TC)
