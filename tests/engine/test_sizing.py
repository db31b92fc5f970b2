"""Pool sizes from a memory budget."""

from __future__ import annotations

import pytest
import torch

from services.engine.cache.sizing import pool_sizes
from services.engine.cache.spec import CacheGroup, CacheTensor
from services.engine.config import CoreConfig

KV = CacheGroup("kv", "paged", (CacheTensor("k", (64,), torch.int8),), 16)
KEYS = CacheGroup("keys", "paged", (CacheTensor("k", (16,), torch.int8),), 32, stride=4)
WIN = CacheGroup("win", "window", (CacheTensor("k", (8,), torch.int8),), 8, window_tokens=128)
STATE = CacheGroup("state", "state", (CacheTensor("s", (4096,), torch.int8),))
GROUPS = (KV, KEYS, WIN, STATE)


def total_bytes(sizes: dict[str, int]) -> int:
    return sum(sizes[g.name] * g.page_bytes for g in GROUPS)


@pytest.mark.parametrize("budget", [3 << 20, 16 << 20, 256 << 20])
def test_the_budget_is_used_and_not_exceeded(budget: int) -> None:
    config = CoreConfig(max_model_len=4096, kv_cache_memory_bytes=budget)
    used = total_bytes(pool_sizes(GROUPS, config))
    assert 0.98 * budget < used <= budget


def test_paged_groups_hold_the_same_number_of_tokens() -> None:
    sizes = pool_sizes(GROUPS, CoreConfig(max_model_len=4096))
    assert abs(sizes["kv"] * 16 - sizes["keys"] * 32) < 32


def test_states_hold_every_sequence_twice_when_memory_allows() -> None:
    sizes = pool_sizes(GROUPS, CoreConfig(max_model_len=4096, max_num_seqs=32))
    assert sizes["state"] == 64
    bounded = CoreConfig(max_model_len=1024, max_num_seqs=512, kv_cache_memory_bytes=1 << 20)
    sizes = pool_sizes(GROUPS, bounded)
    assert sizes["state"] * 4096 + sizes["win"] * 64 <= 1 << 19


def test_explicit_sizes_win() -> None:
    config = CoreConfig(
        max_model_len=512, num_kv_tokens=1024, state_slots=5, pool_sizes={"keys": 17}
    )
    sizes = pool_sizes(GROUPS, config)
    assert (sizes["kv"], sizes["keys"], sizes["state"]) == (64, 17, 5)


def test_too_little_memory_names_the_group_and_the_need() -> None:
    with pytest.raises(ValueError, match=r"kv gets \d+ .* needs 4096 of 1024 bytes"):
        pool_sizes(GROUPS, CoreConfig(max_model_len=65536, kv_cache_memory_bytes=1 << 20))


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ValueError, match="vk"):
        pool_sizes(GROUPS, CoreConfig(max_model_len=64, pool_sizes={"vk": 3}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_num_batched_tokens": 63}, "max_num_seqs"),
        ({"prefix_cache_retention_interval": 100}, "multiple of unit_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoreConfig(**({"max_model_len": 64} | change))
