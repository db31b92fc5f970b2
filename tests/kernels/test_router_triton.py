"""The routers' kernels against double precision: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import backend
from kernels.router import launch
from kernels.router.triton import SOFTMAX

DEVICE = "cpu" if backend.interpreted() else "cuda"
EPS, SCALE = 1e-20, 2.5
RTOL = 5e-6  # fp32 exponentials of logits to 30
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": lambda logits: 1 / (1 + torch.exp(-logits)),
    "sqrtsoftplus": lambda logits: torch.log1p(torch.exp(logits)).sqrt(),
    "softmax": lambda logits: logits.softmax(1),
}
CODES = launch.SCORING | {"softmax": SOFTMAX}


def best(values: torch.Tensor, count: int) -> list[int]:
    """Numbers of the largest, the lower among equals first: by a plain sort."""
    return sorted(range(len(values)), key=lambda i: (-float(values[i]), i))[:count]


def expected(
    logits: torch.Tensor, bias: torch.Tensor, scoring: str, top_k: int, groups: int, open_: int
) -> tuple[list[list[int]], torch.Tensor]:
    """ids and weights in fp64, token by token."""
    scores = SCORES[scoring](logits.double().cpu())
    ids, weights = [], []
    for own, biased in zip(scores, scores + bias.double().cpu(), strict=True):
        members = biased.view(groups, -1)
        if groups > 1:
            sums = members.topk(2).values.sum(1)
            closed = sorted(set(range(groups)) - set(best(sums, open_)))
            members[closed] = -torch.inf
        chosen = best(biased, top_k)
        ids.append(chosen)
        weights.append(own[chosen] / (own[chosen].sum() + EPS) * SCALE)
    return ids, torch.stack(weights)


def run(
    logits: torch.Tensor,
    bias: torch.Tensor,
    scoring: str,
    top_k: int,
    groups: int = 1,
    open_: int = 1,
    *,
    normalise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    values = launch.constants(logits.shape[1], CODES[scoring], top_k, normalise, groups, open_)
    return launch.route_scores(logits.to(DEVICE), bias.to(DEVICE), values, EPS, SCALE)


@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "open_"),
    [(1, 1, 1, 1), (63, 3, 1, 1), (65, 7, 1, 1), (256, 6, 8, 4), (288, 8, 4, 1), (512, 10, 1, 1)],
)
def test_choice_and_weights_agree_with_double_precision(
    scoring: str, experts: int, top_k: int, groups: int, open_: int
) -> None:
    logits = torch.randn(3, experts) * 3
    softmax = scoring == "softmax"
    if softmax and groups > 1:
        groups = open_ = 1
    bias = torch.zeros(3, experts) if softmax else torch.randn(experts) * 0.3
    ids, weights = run(logits, bias, scoring, top_k, groups, open_)
    expected_ids, expected_weights = expected(logits, bias, scoring, top_k, groups, open_)
    assert ids.tolist() == expected_ids
    torch.testing.assert_close(weights.cpu().double(), expected_weights, rtol=RTOL, atol=0)


@pytest.mark.parametrize("scoring", SCORES)
def test_among_equals_the_lower_id_comes_first(scoring: str) -> None:
    logits = torch.randint(0, 3, (4, 70)).float()
    bias = torch.zeros(4, 70)
    ids, _ = run(logits, bias, scoring, 9)
    assert ids.tolist() == expected(logits, bias, scoring, 9, 1, 1)[0]


def test_equal_groups_open_from_the_lower() -> None:
    ids, _ = run(torch.zeros(2, 24), torch.zeros(24), "sigmoid", 4, 6, 2)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


def test_negative_choices_stay_within_the_open_groups() -> None:
    logits, bias = torch.randn(3, 16), torch.full((16,), -9.0)
    ids, _ = run(logits, bias, "sigmoid", 4, 4, 1)
    assert ids.tolist() == expected(logits, bias, "sigmoid", 4, 4, 1)[0]


def test_a_bias_of_each_token_chooses_and_does_not_weigh() -> None:
    bias = torch.eye(3, 5) * 5
    ids, weights = run(torch.zeros(3, 5), bias, "sigmoid", 1, normalise=False)
    assert ids.flatten().tolist() == [0, 1, 2]
    assert weights.flatten().tolist() == [0.5 * SCALE] * 3


def test_small_scores_keep_their_order() -> None:
    logits = torch.linspace(-30, -10, 40)[None]
    ids, weights = run(logits, torch.zeros(40), "sqrtsoftplus", 5)
    expected_ids, expected_weights = expected(logits, torch.zeros(40), "sqrtsoftplus", 5, 1, 1)
    assert ids.tolist() == expected_ids
    torch.testing.assert_close(weights.cpu().double(), expected_weights, rtol=RTOL, atol=0)


def test_nan_logits_choose_experts_that_exist() -> None:
    ids, _ = run(torch.full((2, 5), torch.nan), torch.zeros(5), "sigmoid", 3)
    assert bool(((ids >= 0) & (ids < 5)).all())


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalise", [True, False])
def test_weights_of_given_experts(scoring: str, normalise: bool) -> None:
    logits, ids = torch.randn(5, 33), torch.randint(33, (5, 6))
    found = launch.weights_of(logits.to(DEVICE), ids.to(DEVICE), scoring, normalise, EPS, SCALE)
    scores = SCORES[scoring](logits.double()).gather(1, ids)
    if normalise:
        scores = scores / (scores.sum(1, keepdim=True) + EPS)
    torch.testing.assert_close(found.cpu().double(), scores * SCALE, rtol=RTOL, atol=0)


def test_ids_of_no_expert_weigh_nothing() -> None:
    ids = torch.tensor([[2, -1, 2**40, 4]], device=DEVICE)
    found = launch.weights_of(torch.zeros(1, 4, device=DEVICE), ids, "sigmoid", False, EPS, 1.0)
    assert found.tolist() == [[0.5, 0.0, 0.0, 0.0]]


def test_no_tokens() -> None:
    ids, weights = run(torch.zeros(0, 8), torch.zeros(8), "sigmoid", 2)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.gpu
def test_a_replayed_graph_routes_new_logits() -> None:
    logits, bias = torch.randn(40, 256, device=DEVICE), torch.randn(256, device=DEVICE)
    run(logits, bias, "sqrtsoftplus", 6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = run(logits, bias, "sqrtsoftplus", 6)
    for _ in range(2):
        logits.copy_(torch.randn(40, 256))
        graph.replay()
        expected_ids, expected_weights = expected(logits, bias, "sqrtsoftplus", 6, 1, 1)
        assert ids.tolist() == expected_ids
        torch.testing.assert_close(weights.cpu().double(), expected_weights, rtol=RTOL, atol=0)
