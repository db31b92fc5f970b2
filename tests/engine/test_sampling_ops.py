"""Sampling operations against transformers' processors, published vectors and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sampling import apply_penalties, greedy, philox_uniform, sample, token_logprobs
from kernels.sampling.reference import philox

VOCAB = 83
GRID = 6_000

# counter, key, output of philox4x32-10: the known answers of the Random123 distribution.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * scale


def full(rows: int, value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full((rows,), value, dtype=dtype)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    words = philox(
        (torch.tensor([key[0]]), torch.tensor([key[1]])),
        tuple(torch.tensor([c]) for c in counter),
    )
    assert tuple(int(w) for w in words) == output


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    positions = torch.arange(40_000)
    a = philox_uniform(torch.full_like(positions, 7), positions)
    b = philox_uniform(torch.full_like(positions, -(1 << 63)), positions)
    assert float(a.min()) >= 0.0 and float(a.max()) < 1.0
    counts, _ = np.histogram(a.numpy(), bins=100, range=(0, 1))
    chi2 = ((counts - 400.0) ** 2 / 400.0).sum()
    assert chi2 < 148.2  # 99.9 % quantile of chi-square with 99 degrees of freedom
    assert abs(float(np.corrcoef(a.numpy(), b.numpy())[0, 1])) < 0.02
    assert abs(float(np.corrcoef(a[1:].numpy(), a[:-1].numpy())[0, 1])) < 0.02
    assert torch.equal(a[123:124], philox_uniform(torch.tensor([7]), torch.tensor([123])))


def oracle(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    scores = row.double()[None]
    ids = torch.zeros(1, 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.3, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 7, 1.0, 0.0),
        (1.0, 1000, 1.0, 0.0),
        (1.0, 0, 0.5, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (1.0, 0, 1.0, 0.07),
        (1.0, 0, 1.0, 1.0),
        (0.8, 20, 0.95, 0.02),
    ],
)
def test_distribution_equals_the_oracle(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Inversion on a grid of random numbers hits each token as often as its probability says."""
    row = logits(1)
    expected = oracle(row[0], temperature, top_k, top_p, min_p).numpy()
    chosen = []
    for block in torch.arange(GRID, dtype=torch.float64).split(2000):
        n = len(block)
        chosen.append(
            sample(
                row.expand(n, -1),
                top_k,
                full(n, temperature),
                full(n, top_p),
                full(n, min_p),
                (block + 0.5) / GRID,
            )
        )
    counts = np.bincount(torch.cat(chosen).numpy(), minlength=VOCAB)
    np.testing.assert_allclose(counts / GRID, expected, atol=1.01 / GRID + 1e-6)


def test_seeded_draws_follow_the_distribution() -> None:
    row = logits(1, seed=4, scale=1.0)
    n = 10_000
    uniform = philox_uniform(torch.full((n,), 99), torch.arange(n))
    tokens = torch.cat(
        [
            sample(
                row.expand(len(u), -1),
                0,
                full(len(u), 1.0),
                full(len(u), 1.0),
                full(len(u), 0.0),
                u,
            )
            for u in uniform.split(3000)
        ]
    )
    expected = row[0].double().softmax(-1).numpy() * n
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 127.4  # 99.9 % quantile of chi-square with 82 degrees of freedom


def test_banned_tokens_are_never_drawn() -> None:
    row = logits(1)
    row[0, 1:] = -torch.inf
    edge = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    drawn = sample(row.expand(3, -1), 0, full(3, 1.0), full(3, 1.0), full(3, 0.0), edge)
    assert drawn.tolist() == [0, 0, 0]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    rows = torch.zeros(3, VOCAB)
    rows[1, [5, 9]] = 2.0
    rows[2, 82] = 0.1
    assert greedy(rows).tolist() == [0, 5, 82]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_equals_the_oracle(penalty: float) -> None:
    rows, seen_ids = logits(1), [3, 5, 5, 80]
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, seen_ids] = True
    got = apply_penalties(
        rows,
        seen,
        torch.zeros(1, VOCAB, dtype=torch.int32),
        full(1, 0.0),
        full(1, 0.0),
        full(1, penalty),
    )
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen_ids]), rows)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_presence_and_frequency_follow_their_formula() -> None:
    rows = logits(2)
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    counts[0, 4], counts[1, [4, 6]] = 3, torch.tensor([1, 2], dtype=torch.int32)
    got = apply_penalties(
        rows,
        counts > 0,
        counts,
        torch.tensor([0.5, -1.0]),
        torch.tensor([0.25, 2.0]),
        full(2, 1.0),
    )
    c = counts.numpy().astype(np.float64)
    expected = rows.numpy() - np.array([[0.5], [-1.0]]) * (c > 0) - np.array([[0.25], [2.0]]) * c
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


def test_logprobs_equal_log_softmax_in_double_precision() -> None:
    rows = logits(5)
    tokens = torch.tensor([0, 82, 7, int(rows[3].argmax()), int(rows[4].argmin())])
    logprob, rank, top_ids, top = token_logprobs(rows, tokens, 4)
    expected = torch.log_softmax(rows.double(), -1)
    chosen = expected.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), chosen, rtol=0, atol=2e-6)
    assert rank[3] == 1 and rank[4] == VOCAB
    best = expected.topk(4)
    assert torch.equal(top_ids, best.indices)
    torch.testing.assert_close(top.double(), best.values, rtol=0, atol=2e-6)
    assert token_logprobs(rows, tokens, 0)[2].shape == (5, 0)
    assert token_logprobs(rows, tokens, 1000)[2].shape == (5, VOCAB)


@pytest.mark.parametrize("top_k", [0, 1, 13])
@pytest.mark.parametrize("vocab", [1, 7, 83, 1000, 4099])
def test_a_row_does_not_depend_on_its_neighbours(vocab: int, top_k: int) -> None:
    rows = 33
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(rows, vocab, generator=generator) * 4
    settings = (
        torch.rand(rows, generator=generator).double() + 0.1,
        torch.rand(rows, generator=generator).double() * 0.9 + 0.1,
        torch.rand(rows, generator=generator).double() * 0.1,
        torch.rand(rows, generator=generator, dtype=torch.float64),
    )
    together = sample(x, top_k, *settings)
    scores = token_logprobs(x, together, 5)
    for r in range(rows):
        one = slice(r, r + 1)
        own = sample(x[one].clone(), top_k, *(s[one] for s in settings))
        assert torch.equal(own, together[one])
        alone = token_logprobs(x[one].clone(), together[one], 5)
        assert all(torch.equal(a, s[one]) for a, s in zip(alone, scores, strict=True))
