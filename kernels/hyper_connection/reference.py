from __future__ import annotations

import torch

from kernels.activation.reference import sigmoid, silu
from kernels.quant_linear.matrix import Matrix
from kernels.quant_linear.reference import linear
from kernels.rms_norm.reference import rms_norm


def hyper_read(
    streams_TX: torch.Tensor,
    norm_X: torch.Tensor,
    down: Matrix,
    up: Matrix,
    inject: Matrix | None,
    count: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    hidden = norm_X.shape[0] // count
    normed = rms_norm(streams_TX, norm_X, eps, hidden, zero_centred=True)
    gate = sigmoid(linear(silu(linear(normed, down).div_(count)), up))
    x_TH = sum_of_streams(gate.mul_(normed), count).div_(count)
    if inject is None:
        return x_TH, None
    return x_TH, sigmoid(linear(normed, inject).div_(count)).mul_(2.0)


def sum_of_streams(x_TX: torch.Tensor, count: int) -> torch.Tensor:
    first, *others = x_TX.chunk(count, dim=-1)
    total = first.clone()
    for stream in others:
        total.add_(stream)
    return total


def hyper_write(
    streams_TX: torch.Tensor, y_TH: torch.Tensor, inject_TC: torch.Tensor
) -> torch.Tensor:
    injected = y_TH.float()[:, None, :] * inject_TC[..., None]
    return injected.flatten(1).add_(streams_TX)
