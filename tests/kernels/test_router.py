"""Expert choice against the router of `transformers` and against scores written out."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextTopkRouter

from kernels.router import route_scores, weights_of
from tests.kernels.test_row_independence import assert_rows_independent

EPS = 1e-20


def by_transformers(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, **sizes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids in ascending order and their weights; the router's matrix is the identity."""
    experts = logits_TE.shape[1]
    config = Glm5NextTextConfig(hidden_size=experts, n_routed_experts=experts, **sizes)
    router = Glm5NextTextTopkRouter(config)
    router.weight.copy_(torch.eye(experts))
    router.e_score_correction_bias.copy_(bias_E)
    _, weights, ids = router(logits_TE)
    order = ids.argsort(dim=1)
    return ids.gather(1, order), weights.gather(1, order)


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_sigmoid_routing_equals_transformers(groups: int, top_groups: int, top_k: int) -> None:
    logits, bias = torch.randn(50, 32), torch.randn(32) * 0.3
    ids, weights = route_scores(
        logits,
        scoring="sigmoid",
        bias_E=bias,
        top_k=top_k,
        normalise=True,
        eps=EPS,
        scale=2.5,
        groups=groups,
        top_groups=top_groups,
    )
    sizes = {"n_group": groups, "topk_group": top_groups, "num_experts_per_tok": top_k}
    expected_ids, expected = by_transformers(logits, bias, **sizes)
    order = ids.argsort(dim=1)
    assert torch.equal(ids.gather(1, order), expected_ids)
    torch.testing.assert_close(weights.gather(1, order), expected, rtol=1e-6, atol=0)


def test_square_root_softplus_scores_written_out() -> None:
    logits, bias = torch.randn(40, 16) * 3, torch.randn(16)
    scores = torch.log1p(logits.double().exp()).sqrt()
    expected_ids = (scores + bias).topk(4).indices
    chosen = scores.gather(1, expected_ids)
    ids, weights = route_scores(
        logits,
        scoring="sqrtsoftplus",
        bias_E=bias,
        top_k=4,
        normalise=True,
        eps=0.0,
        scale=1.5,
    )
    assert torch.equal(ids, expected_ids)
    expected = (chosen / chosen.sum(1, keepdim=True) * 1.5).float()
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=0)


def test_among_equal_scores_the_lower_id_is_taken() -> None:
    logits = torch.tensor([[0.5, 1.0, 1.0, 0.5, 1.0, 0.5]])
    settings = {"normalise": True, "eps": EPS, "scale": 1.0, "scoring": "sigmoid"}
    ids, weights = route_scores(logits, bias_E=torch.zeros(6), top_k=4, **settings)
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3]
    groups = {"groups": 3, "top_groups": 2}
    ids, _ = route_scores(torch.zeros(1, 6), bias_E=torch.zeros(6), top_k=3, **settings, **groups)
    assert ids.tolist() == [[0, 1, 2]]


def test_a_bias_of_each_token_chooses_and_does_not_weigh() -> None:
    logits = torch.zeros(3, 4)
    bias_TE = torch.eye(4)[:3] * 5
    ids, weights = route_scores(
        logits,
        scoring="sigmoid",
        bias_E=bias_TE,
        top_k=1,
        normalise=False,
        eps=EPS,
        scale=1.0,
    )
    assert ids.flatten().tolist() == [0, 1, 2]
    assert weights.flatten().tolist() == [0.5] * 3


def test_weights_of_given_experts() -> None:
    """Of a layer that takes its experts from a table."""
    logits = torch.randn(9, 8)
    ids = torch.randint(8, (9, 2))
    found = weights_of(logits, ids, scoring="sqrtsoftplus", normalise=False, eps=0.0, scale=2.0)
    expected = torch.nn.functional.softplus(logits).sqrt().gather(1, ids) * 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_biased_scores_below_zero_never_lose_to_a_closed_group() -> None:
    bias = torch.full((8,), -9.0)
    ids, _ = route_scores(
        torch.randn(20, 8),
        scoring="sigmoid",
        bias_E=bias,
        top_k=2,
        normalise=True,
        eps=EPS,
        scale=1.0,
        groups=4,
        top_groups=1,
    )
    assert (ids // 2).diff(dim=1).eq(0).all()


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [1, 4])
def test_rows_are_independent(scoring: str, groups: int) -> None:
    bias = torch.randn(288)
    for part in (0, 1):
        assert_rows_independent(
            lambda x, part=part: route_scores(
                x,
                scoring=scoring,  # type: ignore[arg-type]
                bias_E=bias,
                top_k=8,
                normalise=True,
                eps=EPS,
                scale=2.5,
                groups=groups,
                top_groups=1,
            )[part],
            torch.randn(39, 288),
        )
