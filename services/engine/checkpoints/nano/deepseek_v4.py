"""Seeded nano checkpoints of DeepSeek-V4 in the native layout, every mechanism at work.

`python -m services.engine.checkpoints.nano.deepseek_v4 --out FOLDER --variant 0731`

Weights are random; what is degenerate by default (sinks, position and router biases, mixing
bases and scales, expert tables) is drawn as well, so that no part of the model is idle. A tensor
depends on the seed and its name alone: variants share their common part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from services.common.cli.base import say
from services.engine.checkpoints.nano.deepseek_bpe import train_tokenizer, write_tokenizer
from services.engine.checkpoints.nano.drawn import (
    Drawing,
    Form,
    linear,
    norm,
    stored_tensors,
    tower,
)

Variant = Literal["preview", "0731", "vision"]
VARIANTS: tuple[Variant, ...] = ("preview", "0731", "vision")
DSPARK_STAGES = 3

_BASE: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 544,  # beyond the tokenizer's entries: the ids of an image's places
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 96,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
_DSPARK: dict[str, Any] = {
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_markov_rank": 32,
    "dspark_noise_token_id": 540,
    "dspark_target_layer_ids": [3, 4, 5],
}
_VISION: dict[str, Any] = {
    "rms_norm_eps": 1e-20,
    "vision_n_layers": 2,
    "vision_dim": 64,
    "vision_n_heads": 2,
    "vision_inter_dim": 96,
    "vision_patch_size": 14,
    "vision_downsample_ratio": 3,
    "vision_rope_theta": 10000,
    "vision_max_n_token": 64,
    "vision_min_pixels": 7056,
    "vision_max_wh_ratio": 8,
}
_EXTRA: dict[Variant, dict[str, Any]] = {
    "preview": {},
    "0731": _DSPARK,
    "vision": {**_DSPARK, **_VISION},
}


def nano_config(variant: Variant, **changes: object) -> dict[str, Any]:
    """config.json of a variant with single fields changed."""
    return {**_BASE, **_EXTRA[variant], **changes}


@dataclass(frozen=True, slots=True)
class _Inventory:
    """All tensors of a config, by the names of the release."""

    config: Mapping[str, Any]

    def __iter__(self) -> Iterator[Drawing]:
        c = self.config
        vocab, hidden = c["vocab_size"], c["hidden_size"]
        yield Drawing("embed.weight", (vocab, hidden))
        yield linear("head", vocab, hidden, "bf16", 4.0)
        yield norm("norm", hidden)
        yield from self._streams("hc_head", c["hc_mult"], 1)
        for index in range(c["num_hidden_layers"]):
            ratio = c["compress_ratios"][index]
            hashed = index < c["num_hash_layers"]
            yield from self._layer(f"layers.{index}", ratio, hashed=hashed)
        if c.get("dspark_block_size"):
            yield from self._dspark()
        else:
            yield from self._mtp()
        if c.get("vision_n_layers"):
            yield from _vision(c)

    def _streams(self, name: str, values: int, scales: int) -> Iterator[Drawing]:
        width = self.config["hc_mult"] * self.config["hidden_size"]
        yield Drawing(f"{name}_fn", (values, width), "f32", width**-0.5)
        yield Drawing(f"{name}_base", (values,), "f32", 0.5)
        yield Drawing(f"{name}_scale", (scales,), "f32", 0.2, 1.0)

    def _layer(self, name: str, ratio: int, *, hashed: bool) -> Iterator[Drawing]:
        c = self.config
        n = c["hc_mult"]
        for part in ("attn", "ffn"):
            yield norm(f"{name}.{part}_norm", c["hidden_size"])
            yield from self._streams(f"{name}.hc_{part}", (2 + n) * n, 3)
        yield from self._attention(f"{name}.attn", ratio)
        yield from self._experts(f"{name}.ffn", hashed=hashed)

    def _attention(self, name: str, ratio: int) -> Iterator[Drawing]:
        c = self.config
        hidden, heads, width = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
        rank, out = c["q_lora_rank"], c["o_groups"] * c["o_lora_rank"]
        yield Drawing(f"{name}.attn_sink", (heads,), "f32")
        yield linear(f"{name}.wq_a", rank, hidden)
        yield norm(f"{name}.q_norm", rank)
        yield linear(f"{name}.wq_b", heads * width, rank)
        yield linear(f"{name}.wkv", width, hidden)
        yield norm(f"{name}.kv_norm", width)
        yield linear(f"{name}.wo_a", out, heads * width // c["o_groups"])
        yield linear(f"{name}.wo_b", hidden, out)
        if ratio:
            yield from self._compressor(f"{name}.compressor", width, ratio)
        if ratio == 4:
            index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
            yield linear(f"{name}.indexer.wq_b", index_heads * index_dim, rank)
            yield linear(f"{name}.indexer.weights_proj", index_heads, hidden, "bf16")
            yield from self._compressor(f"{name}.indexer.compressor", index_dim, ratio)

    def _compressor(self, name: str, width: int, ratio: int) -> Iterator[Drawing]:
        channels = 2 * width if ratio == 4 else width
        hidden = self.config["hidden_size"]
        yield linear(f"{name}.wkv", channels, hidden, "bf16")
        yield linear(f"{name}.wgate", channels, hidden, "bf16", 2.0)
        yield Drawing(f"{name}.ape", (ratio, channels), "f32")
        yield norm(f"{name}.norm", width)

    def _experts(self, name: str, *, hashed: bool) -> Iterator[Drawing]:
        c = self.config
        hidden, inner, experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
        has_images = bool(c.get("vision_n_layers"))
        yield linear(f"{name}.gate", experts, hidden, "bf16", 2.0)
        if hashed:
            shape = (c["vocab_size"], c["num_experts_per_tok"])
            yield Drawing(f"{name}.gate.tid2eid", shape, "experts")
        if has_images or not hashed:
            yield Drawing(f"{name}.gate.bias", (experts,), "f32", 0.5)
        if has_images:
            yield Drawing(f"{name}.gate.bias_vl", (experts,), "f32", 0.5)
        yield from self._mlp(f"{name}.shared_experts", inner * c["n_shared_experts"], "fp8")
        for expert in range(experts):
            yield from self._mlp(f"{name}.experts.{expert}", inner, "mxfp4")

    def _mlp(self, name: str, inner: int, form: Form) -> Iterator[Drawing]:
        hidden = self.config["hidden_size"]
        yield linear(f"{name}.w1", inner, hidden, form, 2.0)
        yield linear(f"{name}.w3", inner, hidden, form, 2.0)
        yield linear(f"{name}.w2", hidden, inner, form)

    def _mtp(self) -> Iterator[Drawing]:
        hidden = self.config["hidden_size"]
        yield from self._layer("mtp.0", 0, hashed=False)
        yield from (linear(f"mtp.0.{p}_proj", hidden, hidden) for p in "eh")
        yield from (norm(f"mtp.0.{which}", hidden) for which in ("enorm", "hnorm", "norm"))
        yield from self._streams("mtp.0.hc_head", self.config["hc_mult"], 1)

    def _dspark(self) -> Iterator[Drawing]:
        c = self.config
        vocab, hidden, rank = c["vocab_size"], c["hidden_size"], c["dspark_markov_rank"]
        last = f"mtp.{DSPARK_STAGES - 1}"
        for stage in range(DSPARK_STAGES):
            yield from self._layer(f"mtp.{stage}", 0, hashed=False)
        yield linear("mtp.0.main_proj", hidden, len(c["dspark_target_layer_ids"]) * hidden)
        yield norm("mtp.0.main_norm", hidden)
        yield norm(f"{last}.norm", hidden)
        yield from self._streams(f"{last}.hc_head", c["hc_mult"], 1)
        yield Drawing(f"{last}.markov_head.markov_w1.weight", (vocab, rank))
        yield linear(f"{last}.markov_head.markov_w2", vocab, rank, "bf16")
        yield linear(f"{last}.confidence_head.proj", 1, hidden + rank, "bf16")


def _vision(config: Mapping[str, Any]) -> Iterator[Drawing]:
    yield from tower(
        hidden=config["hidden_size"],
        width=config["vision_dim"],
        inner=config["vision_inter_dim"],
        layers=config["vision_n_layers"],
        patch=config["vision_patch_size"],
        unfold=config["vision_downsample_ratio"],
        roles=("start", "pad", "newline", "end"),
    )


def nano_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """All tensors of a checkpoint as stored."""
    return stored_tensors(_Inventory(config), config, seed)


def build_nano(folder: Path, variant: Variant, *, seed: int = 0, **changes: object) -> Path:
    """Write config.json and model.safetensors to `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    config = nano_config(variant, **changes)
    text = json.dumps(config, indent=1) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(nano_tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def add_tokenizer(folder: Path, *, seed: int = 0) -> None:
    """Write what a folder needs besides to be served: tokenizer and generation config."""
    write_tokenizer(train_tokenizer(seed), folder, _BASE["max_position_embeddings"])
    generation = {key: _BASE[key] for key in ("bos_token_id", "eos_token_id")}
    text = json.dumps(generation, indent=1) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description="Write a nano DeepSeek-V4 checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--variant", choices=VARIANTS, default="0731")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = build_nano(arguments.out, arguments.variant, seed=arguments.seed)
    add_tokenizer(folder, seed=arguments.seed)
    say(f"wrote {folder}")


if __name__ == "__main__":
    main()
