"""Cache bytes of the released sizes, which layers keep what, and angles at the last position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.rotary import rotary_angles
from services.engine.cache.accounting import group_bytes
from services.engine.cache.spec import CacheGroup, CacheTensor
from services.engine.layers.deepseek.rows import row_tensor
from services.engine.layers.deepseek41.source import QUANTISED, CacheForms
from services.engine.models.deepseek_v41 import cache_groups
from services.engine.models.deepseek_v41_config import DeepseekV41Config, parse_config
from services.engine.models.registry import load_model
from tests.models.deepseek_v41.conftest import load

RELEASED: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "text_config": {
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "compress_rope_theta": 160000,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-20,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2304,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
    },
}
LAST = 1_048_575


class Kept:
    """A layer as far as its cache goes."""

    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        self.config, self.layer = config, layer

    def __call__(self, hidden: torch.Tensor, ctx: Any, /) -> torch.Tensor:
        raise NotImplementedError

    def cache_tensors(self) -> dict[str, tuple[CacheTensor, ...]]:
        cache = self.config.role(self.layer).cache
        assert cache is not None
        return {cache.group: cache.tensors(torch.bfloat16)}


def released_groups(forms: CacheForms) -> tuple[CacheGroup, ...]:
    config = parse_config(RELEASED, forms)
    return cache_groups([Kept(config, i) for i in config.sharing.sources], config.window)


def test_bytes_per_token_of_the_released_model() -> None:
    """The published figure: three sources of ratio 2 and one of ratio 1, 288 + 68 bytes each."""
    groups = released_groups(QUANTISED)
    assert sum(group_bytes(g).per_token for g in groups) == 3 * (288 + 68) / 2 + 288 + 68 == 890
    plain = released_groups(CacheForms())
    assert sum(group_bytes(g).per_token for g in plain) == 2 * (512 + 128) * 2.5


def test_bytes_of_a_window_row_of_the_released_model() -> None:
    """512 e4m3 values and a scale byte for each group of 32."""
    width = RELEASED["text_config"]["head_dim"]
    assert row_tensor("kv", width, torch.bfloat16, QUANTISED.window).entry_bytes == 528
    assert row_tensor("kv", width, torch.bfloat16, None).entry_bytes == 1024


def test_only_sources_keep_entries_and_every_layer_a_window(quantised: Any) -> None:
    names = {g.name: [t.name for t in g.tensors] for g in quantised.groups}
    assert names["window"] == [f"layers.{i}.kv" for i in range(10)]
    assert names["entries"] == ["layers.6.entries", "layers.6.keys"]
    assert len(names["entries_2"]) == 4 and names["state"] == ["layers.2.pooled", "layers.4.pooled"]
    assert all(t.dtype == torch.uint8 for g in quantised.groups[:3] for t in g.tensors)


def test_sharing_of_the_released_model() -> None:
    sharing = parse_config(RELEASED, CacheForms()).sharing
    sources = [sharing.source_of(layer) for layer in range(40)]
    assert sources == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [sharing.index_source_of(i) for i in (7, 8, 23, 24, 39)] == [2, 8, 20, 24, 36]
    roles = [sharing.candidate_role(i) for i in (14, 20, 24, 36)]
    assert roles == ["none", "source", "limited", "limited"]


def test_a_cut_of_the_released_model_carries_what_is_shared() -> None:
    config = parse_config(RELEASED, CacheForms())
    assert config.cut(14).widths == (4, 0, 0, 0, 0)
    assert config.cut(5).widths == (4, 512, 0, 512, 0)  # no index source scores layer 2's keys
    assert config.cut(24).widths == (4, 0, 2048, 512, 128)
    assert config.cut(37).widths == (4, 512, 0, 512, 0)


@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_angles_are_exact_up_to_the_last_position(kind: str) -> None:
    rope = getattr(parse_config(RELEASED, CacheForms()).ropes, kind)
    assert rope.scaling == 1.0
    positions = torch.tensor([0, 131_071, 131_072, LAST])
    cos, sin = rotary_angles(positions, rope.inverse_F, rope.scaling)
    angles = (positions.float()[:, None] * rope.inverse_F).double()
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=2e-7)


def test_the_accounting_of_a_folder_reads_no_weight(nano: Any) -> None:
    meta = load_model(nano, device=torch.device("meta"), compute_dtype=torch.float32)
    assert meta.groups == load(nano).groups and meta.weight_bytes == 0
