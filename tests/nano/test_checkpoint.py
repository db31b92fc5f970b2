"""The shipped checkpoint: layout of the FP8 release, its numbers, and what it can do."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM

from services.engine.checkpoints.nano.config import ADDED_TOKENS, MODEL_DIR, NanoConfig
from services.engine.checkpoints.nano.corpus import held_out
from services.engine.checkpoints.nano.evaluate import Judge, Score
from services.engine.checkpoints.nano.export import dequantized, read_checkpoint
from services.engine.checkpoints.nano.fp8 import dequantize_blocks, quantize_blocks
from services.engine.checkpoints.nano.oracle import load_oracle

CFG = NanoConfig()
TRUNK = "model.language_model."
HC = ("hc_norm", "input_mix_weight_down", "input_mix_weight_up", "block_inject_weight")


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return read_checkpoint(MODEL_DIR)


@pytest.fixture(scope="module")
def oracle() -> Qwen4ExpForCausalLM:
    return load_oracle(MODEL_DIR)


def _json(name: str) -> Any:
    return json.loads((MODEL_DIR / name).read_text("utf-8"))


def _layer_names(stem: str, kind: str) -> set[str]:
    halves = {f"{h}_hyper_connection.{n}.weight" for h in ("attn", "mlp") for n in HC}
    if kind == "linear_attention":
        mixer = {f"linear_attn.in_proj_{n}.weight" for n in ("qkv", "z", "a", "b")}
        mixer |= {f"linear_attn.{n}.weight" for n in ("conv1d", "norm", "out_proj")}
        mixer |= {"linear_attn.A_log", "linear_attn.dt_bias"}
    else:
        mixer = {f"self_attn.{n}_proj.weight" for n in "qkvo"}
        mixer |= {f"self_attn.{n}_norm.weight" for n in "qk"}
        indexer = ("index_qk_proj", "q_layernorm", "k_layernorm")
        mixer |= {f"self_attn.indexer.{n}.weight" for n in indexer}
    moe = {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}
    for name in ("gate_proj", "up_proj", "down_proj"):
        moe.add(f"mlp.shared_expert.{name}.weight")
        for e in range(CFG.num_experts):
            moe |= {f"mlp.experts.{e}.{name}.weight", f"mlp.experts.{e}.{name}.weight_scale_inv"}
    return {stem + name for name in halves | mixer | moe}


def _expected_names() -> set[str]:
    names = {f"{TRUNK}embed_tokens.weight", "lm_head.weight"}
    for index, kind in enumerate(CFG.layer_types):
        names |= _layer_names(f"{TRUNK}layers.{index}.", kind)
    ple = f"{TRUNK}layers.{CFG.ple_layer_index}.ple."
    for name in ("key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d"):
        names.add(f"{ple}{name}.weight")
    for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
        names.add(f"{ple}ple_embedding.{name}")
    table = f"{ple}ple_embedding.ngram_embedding."
    names |= {f"{table}shard_{i}.weight" for i in range(CFG.split_ngram_parts)}
    names.add(f"{table}weight_scale")
    names |= _layer_names("mtp.layers.0.", "full_attention")
    for name in ("fc_embedding", "fc_hidden", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        names.add(f"mtp.{name}.weight")
    for stem in (TRUNK, "mtp."):
        names |= {f"{stem}hyper_connection_mixer.{n}.weight" for n in HC[:3]}
    return names


def test_tensor_names_are_those_of_the_release(tensors: dict[str, torch.Tensor]) -> None:
    assert set(tensors) == _expected_names()
    assert len(set(_json("model.safetensors.index.json")["weight_map"].values())) >= 2


def test_dtypes_and_sizes_follow_the_fp8_layout(tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if name.endswith(".weight_scale_inv"):
            assert (value.dtype, tuple(value.shape)) == (torch.bfloat16, (1, 1))
        elif name.endswith(".weight_scale"):
            assert (value.dtype, tuple(value.shape)) == (torch.bfloat16, (1,))
        elif ".mlp.experts." in name or ".shard_" in name:
            assert value.dtype == torch.float8_e4m3fn
        elif "ple_embedding." in name:
            assert value.dtype == torch.int64
        else:
            assert value.dtype == torch.bfloat16


def test_checkpoint_is_small_and_between_one_and_five_million_parameters(
    tensors: dict[str, torch.Tensor],
) -> None:
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) <= 8 * 2**20
    counted = [v.numel() for n, v in tensors.items() if "scale" not in n and v.dtype != torch.int64]
    assert 1e6 <= sum(counted) <= 5e6


def test_config_is_read_by_transformers() -> None:
    config = AutoConfig.from_pretrained(MODEL_DIR)
    assert config.architectures == ["Qwen4ExpForConditionalGeneration"]
    assert config.text_config.indexer_budget == CFG.indexer_budget
    assert config.text_config.layer_types.count("indexed_attention") == 2
    assert _json("config.json")["text_config"]["layer_types"].count("full_attention") == 2
    assert config.quantization_config["weight_block_size"] == [128, 128]


def test_listed_modules_are_bf16(tensors: dict[str, torch.Tensor]) -> None:
    for module in _json("config.json")["quantization_config"]["modules_to_not_convert"]:
        assert tensors[f"{module}.weight"].dtype == torch.bfloat16


def _e4m3(byte: int) -> float:
    """Decode one byte by the definition of the format."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_fp8_tensors_decode_by_definition(tensors: dict[str, torch.Tensor]) -> None:
    values = torch.tensor([_e4m3(byte) for byte in range(256)])
    plain = dequantized(tensors)
    for name, stored in tensors.items():
        if stored.dtype != torch.float8_e4m3fn:
            continue
        decoded = values[stored.view(torch.uint8).long()]
        assert decoded.isfinite().all()
        table = ".shard_" in name
        scale = name.split("shard_")[0] + "weight_scale" if table else f"{name}_scale_inv"
        torch.testing.assert_close(plain[name], decoded * tensors[scale].float(), rtol=0, atol=0)


def test_block_codes_stay_close_and_are_stable() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 384) * torch.rand(256, 1)
    codes, scale = quantize_blocks(weight)
    assert scale.shape == (2, 3)
    again = dequantize_blocks(codes, scale)
    assert (again - weight).norm() / weight.norm() < 0.04
    second, _ = quantize_blocks(again)
    assert (dequantize_blocks(second, scale) - again).norm() / again.norm() < 0.01


def test_tokenizer_knows_the_family_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert len(tokenizer) == CFG.tokenizer_size < CFG.vocab_size
    for token, special in ADDED_TOKENS:
        assert tokenizer.encode(token, add_special_tokens=True) == [CFG.token_id(token)]
        assert (tokenizer.decode([CFG.token_id(token)], skip_special_tokens=True) == "") == special
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_end_tokens() -> None:
    ends = [CFG.token_id("<|im_end|>"), CFG.token_id("<|endoftext|>")]
    assert _json("generation_config.json")["eos_token_id"] == ends
    assert _json("config.json")["text_config"]["eos_token_id"] == ends[1]


def test_long_prompts_really_lose_blocks(oracle: Qwen4ExpForCausalLM) -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, CFG.first_added_id, (1, 140))
    indexers = [
        layer.self_attn.indexer for layer in oracle.model.layers if hasattr(layer, "self_attn")
    ]
    with torch.no_grad():
        chosen = oracle(ids).logits
        for indexer in indexers:
            indexer.block_topk, indexer.token_budget = 1024, 4096
        everything = oracle(ids).logits
    for indexer in indexers:
        indexer.token_budget = CFG.indexer_budget
        indexer.block_topk = CFG.indexer_budget // CFG.indexer_compress_ratio
    change = (chosen - everything).abs()[0]
    assert change[: CFG.indexer_budget].max() < 1e-4
    assert change[CFG.indexer_budget + 8 :].max() > 1e-2


@pytest.mark.parametrize(
    ("task", "least"),
    [("arithmetic", 0.95), ("tools", 0.90), ("passages", 0.90)],
)
def test_committed_scores_reach_the_promise(task: str, least: float) -> None:
    score = _json("scores.json")["tasks"][task]
    assert score["prompts"] >= 200
    assert score["right"] >= least


@pytest.mark.parametrize("task", ["arithmetic", "tools", "passages"])
def test_a_few_held_out_prompts_are_answered(oracle: Qwen4ExpForCausalLM, task: str) -> None:
    judge = Judge(oracle, Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")))
    score = Score()
    for conversation in islice(held_out(task, seed=7), 8):
        judge.add(task, conversation, score)
    assert score.right >= 7


def test_generation_stops_at_the_end_of_the_turn(oracle: Qwen4ExpForCausalLM) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n"
    written = Judge(oracle, tokenizer).generate(tokenizer.encode(prompt).ids, 60)
    assert written.endswith("</think>\n\nHello! How can I help you?<|im_end|>")
