"""Pooling and selection against the indexer of `transformers`; ties; few-bit keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers.cache_utils import Cache
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from kernels.index_pool import KeyPool, pool_keys, select_pools, write_pools
from tests.kernels.test_row_independence import assert_rows_independent

HEADS, WIDTH, HIDDEN, RANK = 8, 32, 48, 40
PER_PAGE = 4  # pools


@dataclass
class Setting:
    """Keys and gates of a sequence of `tokens`, its pools in shuffled pages, and the oracle."""

    tokens: int
    ratio: int
    budget: int

    def __post_init__(self) -> None:
        config = Glm5NextTextConfig(
            hidden_size=HIDDEN,
            q_lora_rank=RANK,
            index_n_heads=HEADS,
            index_head_dim=WIDTH,
            index_topk=self.budget,
            index_kpool=self.ratio,
        )
        self.indexer = Glm5NextTextIndexer(config, layer_idx=0)
        for name, parameter in self.indexer.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise * 0.1 + 1 if name == "k_norm.weight" else noise * 0.3)
        self.x, self.latent = torch.randn(self.tokens, HIDDEN), torch.randn(self.tokens, RANK)
        self.keys = self.indexer.k_norm(self.indexer.wk(self.x))
        self.gates = self.x @ self.indexer.index_kpool_compress_gate.t()
        self.q = self.indexer.wq_b(self.latent).view(-1, HEADS, WIDTH)
        self.weights = self.indexer.weights_proj(self.x) * HEADS**-0.5

    def expected(self) -> list[set[int]]:
        """Positions that the oracle selects for each token."""
        mask = torch.ones(1, self.tokens, dtype=torch.bool)
        no_cache: Cache | None = None
        rows = self.indexer(self.x[None], self.latent[None], mask, no_cache)[0]
        return [set(row[row >= 0].tolist()) for row in rows]

    def pooled(self) -> torch.Tensor:
        """Key of the pool that each token would complete, [T, WIDTH]."""
        first = torch.arange(self.tokens)[:, None] - torch.arange(self.ratio).flip(0)
        rows = first.clamp_min(0)
        bias = self.indexer.index_kpool_compress_ape
        return pool_keys(self.keys[rows], self.gates[rows], bias)

    def at(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pages = -(-self.tokens // (self.ratio * PER_PAGE))
        table = torch.arange(pages).flip(0)[None] + 1
        return table, torch.zeros(self.tokens, dtype=torch.int64), torch.arange(self.tokens)

    def empty(self, *, coded: bool = False) -> KeyPool:
        shape = (-(-self.tokens // (self.ratio * PER_PAGE)) + 1, PER_PAGE)
        if not coded:
            return KeyPool(torch.full((*shape, WIDTH), float("nan")))
        codes = torch.full((*shape, WIDTH), 0x7F, dtype=torch.uint8)
        return KeyPool(codes, torch.full((*shape, 1), float("nan")))

    def select(self, pool: KeyPool) -> torch.Tensor:
        write_pools(self.pooled(), pool, *self.at(), self.ratio)
        sizes = {"ratio": self.ratio, "budget": self.budget}
        return select_pools(self.q, self.weights, pool, *self.at(), **sizes)


@pytest.mark.parametrize(("ratio", "budget"), [(4, 16), (2, 8), (16, 32)])
@pytest.mark.parametrize("tokens", [5, 77])
def test_selected_positions_equal_transformers(ratio: int, budget: int, tokens: int) -> None:
    setting = Setting(tokens, ratio, budget)
    rows = setting.select(setting.empty())
    assert rows.shape == (tokens, budget + ratio - 1)
    for t, (row, expected) in enumerate(zip(rows, setting.expected(), strict=True)):
        positions = row[row >= 0].tolist()
        assert positions == sorted(expected), t
        assert row[len(positions) :].eq(-1).all()


def test_pooled_keys_written_out() -> None:
    keys, gates, bias = torch.randn(9, 4, 6), torch.randn(9, 4, 6), torch.randn(4, 6)
    shares = torch.softmax((gates + bias).double(), dim=1)
    expected = (shares * keys.double()).sum(1).float()
    torch.testing.assert_close(pool_keys(keys, gates, bias), expected, rtol=1e-5, atol=1e-6)


def test_the_tail_is_always_selected_and_a_complete_pool_is_not() -> None:
    setting = Setting(80, 4, 16)
    rows = setting.select(setting.empty())
    for position in range(20, 80):
        complete = (position + 1) // 4 * 4
        assert set(range(complete, position + 1)) <= set(rows[position].tolist())
    own_pool = [int(p) in rows[p].tolist() for p in range(23, 80, 4)]
    assert any(own_pool) and not all(own_pool)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_pools_that_all_score_zero_are_taken_from_the_first_on(sign: float) -> None:
    """No head is above zero; a weight below zero makes it a negative zero."""
    setting = Setting(47, 4, 16)
    keys = torch.rand(setting.tokens, WIDTH)
    pool = setting.empty()
    write_pools(keys, pool, *setting.at(), 4)
    q = -torch.rand(setting.tokens, HEADS, WIDTH)
    weights = torch.full((setting.tokens, HEADS), sign)
    weights[:, ::2] *= -1
    rows = select_pools(q, weights, pool, *setting.at(), ratio=4, budget=16)
    for position in range(20, 47):
        tail = list(range((position + 1) // 4 * 4, position + 1))
        assert rows[position][: 16 + len(tail)].tolist() == [*range(16), *tail]


def test_codes_are_the_nearest_e4m3_of_the_rotated_key() -> None:
    setting = Setting(64, 4, 16)
    pool = setting.empty(coded=True)
    write_pools(setting.pooled(), pool, *setting.at(), 4)
    sylvester = torch.ones(1, 1)
    for _ in range(5):
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), sylvester)
    rotated = setting.pooled()[3::4] @ sylvester * WIDTH**-0.5
    table = setting.at()[0][0]
    assert pool.scale is not None
    codes = pool.values[table].flatten(0, 1).view(torch.float8_e4m3fn).float()
    scale = pool.scale[table].flatten(0, 1)
    assert torch.equal(scale.log2(), scale.log2().round())
    peak = rotated.abs().amax(1, keepdim=True)
    assert (peak / scale <= 448).all() and (peak / scale > 223).all()
    error = (codes * scale - rotated).abs()
    assert (error <= rotated.abs() / 16 + scale * 2**-9 + 1e-6).all()


def test_coded_keys_select_nearly_the_same() -> None:
    setting = Setting(200, 4, 32)
    exact, coded = setting.select(setting.empty()), setting.select(setting.empty(coded=True))
    assert torch.equal(coded[:35], exact[:35])
    kept = [
        len(set(a.tolist()) & set(b.tolist())) / len(set(a.tolist()))
        for a, b in zip(exact, coded, strict=True)
    ]
    assert sum(kept) / len(kept) > 0.95


def test_a_pool_completed_by_a_rejected_draft_is_replaced() -> None:
    setting = Setting(8, 4, 4)
    pool, (table, sequence, positions) = setting.empty(), setting.at()
    write_pools(torch.ones(8, WIDTH), pool, table, sequence, positions, 4)
    last = slice(7, 8)
    write_pools(torch.zeros(1, WIDTH), pool, table, sequence[last], positions[last], 4)
    entries = pool.values[table[0, 0]]
    assert entries[0].eq(1).all() and entries[1].eq(0).all() and entries[2:].isnan().all()


def test_codes_need_a_scale() -> None:
    with pytest.raises(ValueError, match="codes and a scale go together"):
        KeyPool(torch.zeros(1, 2, 4, dtype=torch.uint8))


@pytest.mark.parametrize("coded", [False, True])
def test_rows_are_independent(coded: bool) -> None:
    setting = Setting(50, 4, 16)
    pool = setting.empty(coded=coded)
    write_pools(setting.pooled(), pool, *setting.at(), 4)
    table, sequence, _ = setting.at()

    def select(rows: torch.Tensor) -> torch.Tensor:
        q, weights = setting.q[rows], setting.weights[rows]
        return select_pools(q, weights, pool, table, sequence[rows], rows, ratio=4, budget=16)

    assert_rows_independent(select, torch.arange(50))
    packed = torch.randn(33, 2, 4, WIDTH)
    bias = torch.randn(4, WIDTH)
    assert_rows_independent(lambda p: pool_keys(p[:, 0], p[:, 1], bias), packed)
