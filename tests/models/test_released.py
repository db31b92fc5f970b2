"""Folders of the released sizes: every tensor is counted, and the command prints their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.engine.cache.accounting import main
from services.engine.checkpoints.nano import deepseek_v4, deepseek_v41, glm
from tests.models.deepseek_v4.test_loading import RELEASED as V4
from tests.models.deepseek_v41.test_memory import RELEASED as V41
from tests.models.glm5_next.test_cache import PUBLISHED as GLM
from tests.models.released import Entry, entries, write_sparse

GLM_LAYERS = 45


def sums(printed: str) -> list[str]:
    """Bytes per token and per request of all groups together."""
    return next(line.split()[1:] for line in printed.splitlines() if line.startswith("all"))


def test_deepseek_v4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = deepseek_v4.nano_config("0731", **V4)
    found = list(entries(deepseek_v4._Inventory(config), 128))
    assert len(found) == 72_317  # of the published index
    assert 166.8e9 < write_sparse(tmp_path, config, found) < 166.9e9
    assert main(["--model", str(tmp_path), "--kv-cache-dtype", "fp8_ds_mla"]) == 0
    per_token, per_request = sums(capsys.readouterr().out)
    assert (per_token, per_request) == ("3,514.25", f"{3_214_336 + 606_720:,}")


def glm_config() -> dict[str, Any]:
    config = glm.nano_config("fp8")
    kinds = ["linear_attention"] * 3 + ["deepseek_sparse_attention"]
    config["text_config"] |= GLM | {
        "layer_types": (kinds * 12)[:GLM_LAYERS],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "indexer_types": ["full"] * GLM_LAYERS,
        "linear_attn_config": {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4},
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "v_head_dim": 256,
        "num_key_value_heads": 64, "index_n_heads": 32, "index_topk": 2048,
        "num_experts_per_tok": 8,
    }  # fmt: skip
    config["vision_config"] |= {
        "depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096,
        "out_hidden_size": 4096, "projection_intermediate_size": 10240,
    }  # fmt: skip
    return config


def test_glm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = glm_config()
    found: list[Entry] = list(entries(glm._Inventory(config), 128, "weight_scale_inv", "F32"))
    assert sum(f".layers.{GLM_LAYERS}." in name for name, _, _ in found) == 1_760
    assert sum(name.startswith("model.visual.") for name, _, _ in found) == 347
    assert 305.0 < write_sparse(tmp_path, config, found) / 2**30 < 307.0
    assert main(["--model", str(tmp_path)]) == 0
    per_token, _ = sums(capsys.readouterr().out)
    assert per_token == f"{11 * (512 * 2 + 128 * 2 / 4):,.2f}"  # index keys in two bytes
    assert main(["--model", str(tmp_path), "--kv-cache-dtype", "fp8"]) == 0
    assert sums(capsys.readouterr().out)[0] == "11,627.00"


def test_deepseek_v41() -> None:
    """Engram tables are most of its bytes: 264 for each of their rows."""
    text = deepseek_v41._TEXT | V41["text_config"] | {
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384_006_168, 384_016_682],
        "engram_head_dim": 256, "engram_n_heads": 8, "engram_max_ngram_size": 4,
        "dspark_markov_rank": 256, "dspark_target_layer_ids": [37, 38, 39],
        "dspark_n_routed_experts": 128,
    }  # fmt: skip
    vision = deepseek_v41._VISION | {
        "num_hidden_layers": 32, "hidden_size": 1024, "intermediate_size": 2816,
    }  # fmt: skip
    found = list(entries(deepseek_v41._Inventory(text, vision), 32))
    assert len(found) == 96_085  # of the published index
    tables = [shape for name, _, shape in found if ".engram.embed." in name]
    assert sum(rows * columns for rows, columns in tables) == (384_006_168 + 384_016_682) * 264
