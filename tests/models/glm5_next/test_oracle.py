"""Logits equal those of `transformers` on the decoded weights, however a prompt is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.checkpoints.nano.glm import LAYOUTS, Layout, build_nano
from tests.models.glm5_next import oracle
from tests.models.glm5_next.conftest import GetNano, load, prompt
from tests.models.runner import Live, Part, Runner

TOKENS = 90  # 22 pools and a tail of 2; the best 4 pools are attended to
SEED = 3
TOLERANCE = 1e-4  # absolute, fp32; logits have a standard deviation of 1


@pytest.fixture(scope="module")
def expected(get_nano: GetNano) -> Callable[[Layout], torch.Tensor]:
    found: dict[Layout, torch.Tensor] = {}

    def get(layout: Layout) -> torch.Tensor:
        if layout not in found:
            model = oracle.oracle_of(get_nano(layout))
            found[layout] = oracle.logits(model, prompt(TOKENS, SEED))
        return found[layout]

    return get


@pytest.mark.parametrize("chunk", [TOKENS, 1, 7, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_transformers(
    get_nano: GetNano, expected: Any, layout: Layout, chunk: int
) -> None:
    count = TOKENS if chunk > 1 else 50
    found = Runner([load(get_nano(layout))]).run(prompt(TOKENS, SEED)[:count], chunk)
    assert expected(layout).std() > 0.5
    torch.testing.assert_close(found, expected(layout)[:count], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("first", [20, 21, 22, 23])
def test_every_phase_of_a_pool_continues_token_by_token(
    get_nano: GetNano, expected: Any, first: int
) -> None:
    runner, ids = Runner([load(get_nano("bf16"))]), prompt(TOKENS, SEED)
    live = Live()
    found = runner.step([Part(live, ids[:first])])[0]
    found += [runner.step([Part(live, [token])])[0][0] for token in ids[first:48]]
    torch.testing.assert_close(torch.cat(found), expected("bf16")[:48], rtol=0, atol=TOLERANCE)


GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
SOFTPLUS = {
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 3,
        "gate_lower_bound": None,
        "safe_gate": False,
    }
}
PLAIN_ROUTER = {"norm_topk_prob": False, "routed_scaling_factor": 0.7, "n_shared_experts": 2}
POOLS_OF_16 = {"index_kpool": 16, "index_topk": 32, "hc_mult": 2, "hc_sinkhorn_iters": 3}

# Large enough that one in the place of the other shows.
LARGE_EPS = {"rms_norm_eps": 0.1, "hc_eps": 0.02}


@pytest.mark.parametrize("text", [GROUPED, SOFTPLUS, PLAIN_ROUTER, POOLS_OF_16, LARGE_EPS])
def test_other_settings_equal_transformers(tmp_path: Path, text: dict[str, Any]) -> None:
    folder, ids = build_nano(tmp_path, "bf16", **text), prompt(TOKENS, seed=2)
    found = Runner([load(folder)]).run(ids, 31)
    expected = oracle.logits(oracle.oracle_of(folder), ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


MOVED: dict[str, Any] = {
    "index_topk": 32,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.0,
    "swiglu_limit": 2.0,
    "hc_sinkhorn_iters": 1,
    "rms_norm_eps": 1e-2,
    "n_group": 4,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -1.0,
    },
}


def test_every_mechanism_moves_the_logits(get_nano: GetNano, tmp_path: Path) -> None:
    """The oracle comparison would notice a mechanism that was left out."""
    ids = prompt(61, SEED)
    base = Runner([load(get_nano("bf16"))]).run(ids, 61)
    for file in get_nano("bf16").glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    for field, value in MOVED.items():
        text = {**config["text_config"], field: value}
        (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
        moved = (Runner([load(tmp_path)]).run(ids, 61) - base).abs().max()
        assert moved > 10 * TOLERANCE, field


def test_folder_written_by_save_pretrained_is_served(get_nano: GetNano, tmp_path: Path) -> None:
    """Names, layer types and the fields that are left out, as `transformers` writes them."""
    model = oracle.oracle_of(get_nano("bf16"))
    model.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert "indexed_attention" in text["layer_types"] and "scoring_func" not in text
    ids = prompt(40, seed=4)
    stage = load(tmp_path)
    assert stage.weights.parts.draft is None
    found = Runner([stage]).run(ids, 13)
    torch.testing.assert_close(found, oracle.logits(model, ids), rtol=0, atol=TOLERANCE)


def test_bf16_activations_stay_close_to_fp32(get_nano: GetNano) -> None:
    """A random model this small is chaotic: most of the choice survives, not every digit."""
    ids = prompt(60, seed=5)
    fp32, bf16 = (
        Runner([load(get_nano("fp8"), dtype=dtype)]).run(ids, 60)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert (bf16 - fp32).norm() / fp32.norm() < 0.3
    assert (bf16.argmax(1) == fp32.argmax(1)).float().mean() > 0.7
