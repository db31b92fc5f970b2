"""`transformers` in fp32, loaded from the same native files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

from kernels.quant_linear import dequantize
from services.common.checkpoint import Checkpoint
from services.engine.checkpoints.loader import make_readers
from services.engine.models.base import Shard
from tests.models.deepseek_v4.conftest import CPU, GetNano, Model, prompt
from tests.models.runner import Live, Part, Runner

TOLERANCE = 1e-4  # absolute, fp32; logits have a standard deviation of 4
TOKENS = 300  # two HCA entries, 75 CSA entries of which 8 are chosen, many windows


@pytest.fixture(scope="module")
def oracle(get_nano: GetNano) -> Any:
    """Some weights stay bf16 after a quantised load, hence the second conversion."""
    model = DeepseekV4ForCausalLM.from_pretrained(
        get_nano("0731"), dtype=torch.float32, attn_implementation="eager"
    )
    return model.float().eval()


@pytest.fixture(scope="module")
def expected(oracle: Any) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([prompt(TOKENS, seed=3)])).logits[0]


def test_one_shot_logits(expected: torch.Tensor, runner: Runner) -> None:
    found = runner.run(prompt(TOKENS, seed=3), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(found.argmax(1), expected.argmax(1))


def test_logits_in_chunks_of_odd_sizes(expected: torch.Tensor, runner: Runner) -> None:
    ids, live, found = prompt(TOKENS, seed=3), Live(), []
    for size in (7, 1, 1, 5, 131, 155):
        start = len(live.ids)
        found.append(runner.step([Part(live, ids[start : start + size])])[0][0])
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("first", "last"), [(0, 20), (122, 132), (294, 300)])
def test_logits_token_by_token(
    expected: torch.Tensor, runner: Runner, first: int, last: int
) -> None:
    """From the start; over the first HCA entry; at the end."""
    ids, live = prompt(TOKENS, seed=3), Live()
    if first:
        runner.step([Part(live, ids[:first])])
    found = torch.cat([runner.step([Part(live, [t])])[0][0] for t in ids[first:last]])
    torch.testing.assert_close(found, expected[first:last], rtol=0, atol=TOLERANCE)


def test_bf16_stays_near_fp32(expected: torch.Tensor, get_nano: GetNano) -> None:
    """Streams and activations in bf16: the logits' errors are a few hundredths of their spread."""
    from tests.models.deepseek_v4.conftest import load

    found = Runner([load(get_nano("0731"), dtype=torch.bfloat16)]).run(prompt(16, seed=3), 16)
    error = (found - expected[:16]).abs().mean() / expected[:16].std()
    assert 1e-4 < error < 0.1


RENAMED = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^layers\.", "model.layers."),
    (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"attn_sink$", "sinks"),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"(compressor.*)\.wkv\.", r"\1.kv_proj."),
    (r"(compressor.*)\.wgate\.", r"\1.gate_proj."),
    (r"(compressor.*)\.ape$", r"\1.position_bias"),
    (r"(compressor.*)\.norm\.", r"\1.kv_norm."),
    (r"self_attn\.(q_a|q_b|kv|o_a|o_b)_?proj", r"self_attn.\1_proj"),
    (r"self_attn\.wq_a\.", "self_attn.q_a_proj."),
    (r"self_attn\.wq_b\.", "self_attn.q_b_proj."),
    (r"self_attn\.wkv\.", "self_attn.kv_proj."),
    (r"self_attn\.wo_a\.", "self_attn.o_a_proj."),
    (r"self_attn\.wo_b\.", "self_attn.o_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"gate\.bias$", "gate.e_score_correction_bias"),
    (r"shared_experts\.w1\.", "shared_experts.gate_proj."),
    (r"shared_experts\.w2\.", "shared_experts.down_proj."),
    (r"shared_experts\.w3\.", "shared_experts.up_proj."),
)


def their_name(ours: str) -> str:
    for pattern, name in RENAMED:
        ours = re.sub(pattern, name, ours)
    return ours


def theirs(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Their tensor for a native name; experts lie in stacks, the gate rows before the up rows."""
    expert = re.fullmatch(r"(layers\.\d+)\.ffn\.experts\.(\d+)\.w([123])\.weight", name)
    if expert is None:
        return state[their_name(name)]
    layer, number, which = expert.groups()
    if which == "2":
        return state[f"model.{layer}.mlp.experts.down_proj"][int(number)]
    stack = state[f"model.{layer}.mlp.experts.gate_up_proj"][int(number)]
    return stack.chunk(2)[0 if which == "1" else 1]


def our_values(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint as our formats read it, drafts left out."""
    values = {}
    with Checkpoint.open(folder) as checkpoint:
        reader = make_readers(checkpoint, CPU, Shard())[1]
        for name in checkpoint.names():
            if name.startswith("mtp.") or name.endswith(".scale"):
                continue
            info = checkpoint.info(name)
            if name.endswith(".weight") and len(info.shape) == 2:
                packed = 2 if info.dtype == "I8" else 1
                shape = (info.shape[0], info.shape[1] * packed)
                values[name] = dequantize(reader.matrix(name.removesuffix(".weight"), shape))
            else:
                values[name] = reader.tensor(name, info.shape, dtypes=(info.dtype,))
    return values


def test_every_native_tensor_equals_their_loaders(oracle: Any, get_nano: GetNano) -> None:
    state = oracle.state_dict()
    values = our_values(get_nano("0731"))
    assert len(values) > 200
    for name, value in values.items():
        their_value = theirs(state, name)
        assert torch.equal(value.to(their_value.dtype), their_value), name


def test_names_of_the_oracle_are_all_met(oracle: Any, get_nano: GetNano) -> None:
    """The other way round: no tensor of theirs is left without one of ours."""
    ours = {their_name(n) for n in our_values(get_nano("0731")) if ".experts." not in n}
    left = {n for n in oracle.state_dict() if n not in ours}
    assert all(re.search(r"experts\.(gate_up|down)_proj$", n) or "inv_freq" in n for n in left), (
        left
    )


def test_no_mechanism_is_idle(nano: Model, runner: Runner) -> None:
    """Removing any one of them moves the logits by far more than the tolerance."""
    from dataclasses import replace

    ids = prompt(150, seed=5)
    whole = runner.run(ids, 150)

    def change(layer_change: Any) -> float:
        layers = tuple(layer_change(layer) for layer in nano.weights.parts.layers)
        weights = replace(nano.weights, parts=replace(nano.weights.parts, layers=layers))
        stage = type(nano)(weights, nano.groups, nano.vocab_size, nano.max_positions, nano.context)
        return float((Runner([stage]).run(ids, 150) - whole).abs().max())

    def without_sinks(layer: Any) -> Any:
        heads = layer.attn.heads
        heads = replace(heads, sinks_H=torch.full_like(heads.sinks_H, -torch.inf))
        return replace(layer, attn=replace(layer.attn, heads=heads))

    def without_bias(layer: Any) -> Any:
        router = layer.ffn.router
        if router.bias_E is None:
            return layer
        plain = replace(router, bias_E=torch.zeros_like(router.bias_E))
        return replace(layer, ffn=replace(layer.ffn, router=plain))

    def without_position_bias(layer: Any) -> Any:
        if layer.attn.compressor is None:
            return layer
        compressor = layer.attn.compressor
        plain = replace(compressor, ape_rX=torch.zeros_like(compressor.ape_rX))
        return replace(layer, attn=replace(layer.attn, compressor=plain))

    def without_limit(layer: Any) -> Any:
        shared = replace(layer.ffn.shared, limit=None)
        return replace(layer, ffn=replace(layer.ffn, shared=shared))

    def all_entries(layer: Any) -> Any:
        if layer.attn.indexer is None:
            return layer
        indexer = layer.attn.indexer
        wide = replace(indexer, config=replace(indexer.config, top_k=64))
        return replace(layer, attn=replace(layer.attn, indexer=wide))

    def one_round(layer: Any) -> Any:
        mixer = layer.attn_streams.mixer
        short = replace(mixer, config=replace(mixer.config, iterations=1))
        return replace(layer, attn_streams=replace(layer.attn_streams, mixer=short))

    for removed in (
        without_sinks,
        without_bias,
        without_position_bias,
        without_limit,
        all_entries,
        one_round,
    ):
        assert change(removed) > 0.1, removed.__name__
