"""Bytes per token and per snapshot, and the index cache in few bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.common.checkpoint import Checkpoint
from services.engine.cache.spec import CacheGroup, CacheTensor
from services.engine.models import glm5_next
from services.engine.models.base import NoCollectives, Shard
from services.engine.models.glm5_next_config import GlmConfig, parse_config
from tests.models.glm5_next.conftest import CPU, GetNano, Model, load, prompt
from tests.models.runner import Runner

# Of the published config.json; what is left out has the same values there.
PUBLISHED: dict[str, Any] = {
    "vocab_size": 154880,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "n_routed_experts": 288,
    "index_kpool": 4,
    "num_nextn_predict_layers": 1,
}
LATENT = 512 * 2  # bytes of a token and layer
INDEX = 128 + 4  # bytes of a pool of four tokens and layer
RECURRENT = 64 * 128 * 128 * 4
CONVOLUTION = 3 * 64 * 128 * 3 * 2
TAIL = 3 * 2 * 128 * 2  # three keys and gates


@pytest.fixture(scope="module")
def published() -> GlmConfig:
    return parse_config(PUBLISHED, quantised_cache=True)


def token_bytes(groups: tuple[CacheGroup, ...]) -> float:
    return sum(g.page_bytes / g.page_tokens for g in groups if g.kind == "paged")


def state_bytes(groups: tuple[CacheGroup, ...]) -> int:
    return sum(g.page_bytes for g in groups if g.kind == "state")


def test_bytes_per_token_of_the_release(published: GlmConfig) -> None:
    groups = glm5_next.cache_groups(published, range(45), torch.bfloat16)
    assert token_bytes(groups) == 11 * (LATENT + INDEX / 4) == 11_627
    exact = glm5_next.cache_groups(parse_config(PUBLISHED), range(45), torch.bfloat16)
    assert token_bytes(exact) == 11 * (LATENT + 2 * 128 / 4)


def test_bytes_per_token_with_the_draft_layer(published: GlmConfig) -> None:
    tensors = glm5_next.layer_tensors(published, 45, torch.bfloat16)
    sizes = {name: sum(t.entry_bytes for t in kept) for name, kept in tensors.items()}
    assert sizes == {"kv": LATENT, "index": INDEX, "state": TAIL}
    assert 11_627 + sizes["kv"] + sizes["index"] / 4 == 12_684


@pytest.mark.parametrize("ranks", [1, 4])
def test_bytes_of_a_snapshot_of_the_release(published: GlmConfig, ranks: int) -> None:
    """Heads are split over ranks; latents, pools and the tail of a pool are on every rank."""
    groups = glm5_next.cache_groups(published, range(45), torch.bfloat16, ranks)
    recurrent = 34 * (RECURRENT + CONVOLUTION) // ranks
    assert state_bytes(groups) == recurrent + 11 * TAIL
    assert 147.6e6 < 34 * (RECURRENT + CONVOLUTION) < 147.7e6
    assert token_bytes(groups) == 11_627


def test_groups_of_the_nano_model(nano: Model) -> None:
    kv, index, state = nano.groups
    assert (kv.name, kv.kind, kv.page_tokens, kv.stride) == ("kv", "paged", 16, 1)
    assert (index.name, index.kind, index.page_tokens, index.stride) == ("index", "paged", 64, 4)
    assert (state.name, state.kind) == ("state", "state")
    fp32 = torch.float32
    assert kv.tensors == tuple(CacheTensor(f"layers.{i}.latent", (128,), fp32) for i in (1, 3))
    assert index.tensors == tuple(CacheTensor(f"layers.{i}.index", (128,), fp32) for i in (1, 3))
    assert CacheTensor("layers.1.index_tail", (3, 256), fp32) in state.tensors
    assert CacheTensor("layers.4.conv", (3, 384), fp32) in state.tensors
    assert CacheTensor("layers.4.delta", (4, 32, 32), fp32) in state.tensors
    assert len(state.tensors) == 3 * 2 + 2


def test_state_of_the_recurrence_is_fp32_whatever_is_computed_in(get_nano: GetNano) -> None:
    kv, _, state = load(get_nano("bf16"), dtype=torch.bfloat16).groups
    dtypes = {t.name.split(".")[-1]: t.dtype for t in (*kv.tensors, *state.tensors)}
    assert dtypes.pop("delta") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def coded(get_nano: GetNano) -> Any:
    with Checkpoint.open(get_nano("fp8")) as checkpoint:
        return glm5_next.load(
            checkpoint,
            device=CPU,
            compute_dtype=torch.float32,
            shard=Shard(),
            collectives=NoCollectives(),
            quantised_cache=True,
        )


def test_a_coded_index_changes_nothing_while_all_pools_fit(get_nano: GetNano, nano: Model) -> None:
    """Up to position 18 the best four pools are all there are."""
    model, ids = coded(get_nano), prompt(60, seed=6)
    exact, found = Runner([nano]).run(ids, 60), Runner([model]).run(ids, 60)
    assert torch.equal(found[:19], exact[:19])
    assert found.isfinite().all()


def test_a_coded_index_is_the_same_bits_however_it_is_cut(get_nano: GetNano) -> None:
    model, ids = coded(get_nano), prompt(60, seed=6)
    assert torch.equal(Runner([model]).run(ids, 7), Runner([model], seed=5).run(ids, 60))
