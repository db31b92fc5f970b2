"""The benchmark of the routers: those of the served models, random logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.router import launch
from kernels.router.triton import SIGMOID, SOFTMAX
from kernels.router.variants import ROUTERS, Router

Route = Callable[[], tuple[torch.Tensor, torch.Tensor]]
TOKENS = (1, 2048)
BENCHED = ("DeepSeek-V4", "GLM-5.3", "Qwen3.8-Next")
MAX_ERROR = 1e-5
SETS = 4
EPS, SCALE = 1e-20, 1.5


def cases() -> Iterator[Case]:
    for router in ROUTERS:
        if router.model in BENCHED:
            for tokens in TOKENS:
                name = f"{router.model} {router.experts} experts top {router.top_k} T={tokens}"
                yield Case("router", name, partial(_work, router, tokens, "cuda"))


def _work(router: Router, tokens: int, device: str) -> Work:
    logits = [torch.randn(tokens, router.experts, device=device) * 2 for _ in range(SETS)]
    bias = torch.randn(router.experts, device=device) * 0.1
    if router.scoring == SOFTMAX:
        bias = torch.zeros_like(logits[0])
    values = launch.constants(router.experts, router.scoring, router.top_k, normalise=True)
    calls = [partial(launch.route_scores, x, bias, values, EPS, SCALE) for x in logits]
    nbytes = 4 * tokens * router.experts + 4 * router.experts + 12 * tokens * router.top_k
    return Work(calls, partial(error, router, logits[0], bias, calls[0]), MAX_ERROR, nbytes, 0.0)


def error(router: Router, logits: torch.Tensor, bias: torch.Tensor, call: Route) -> float:
    """Of the weights, and of the biased scores of the chosen against the largest: in fp64."""
    ids, weights = call()
    if bool(((ids < 0) | (ids >= router.experts)).any()) or bool(weights.isnan().any()):
        return float("inf")
    scores = _scores(router, logits.double())
    chosen = scores.gather(1, ids)
    exact = chosen / (chosen.sum(1, keepdim=True) + EPS) * SCALE
    biased = scores + bias.double()
    largest = biased.topk(router.top_k).values
    choice = (biased.gather(1, ids) - largest).norm() / largest.norm()
    return max(float((weights - exact).norm() / exact.norm()), float(choice))


def _scores(router: Router, logits: torch.Tensor) -> torch.Tensor:
    if router.scoring == SOFTMAX:
        return logits.softmax(1)
    if router.scoring == SIGMOID:
        return logits.sigmoid()
    return torch.nn.functional.softplus(logits).sqrt()
