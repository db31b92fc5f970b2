"""Seeded nano checkpoints of DeepSeek-V4 in the native layout, every mechanism at work.

`python -m services.engine.checkpoints.nano.deepseek_v4 --out FOLDER --variant 0731`

Weights are random; what is degenerate by default (sinks, position and router biases, mixing
bases and scales, expert tables) is drawn as well, so that no part of the model is idle. A tensor
depends on the seed and its name alone: variants share their common part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.common.cli.base import say
from services.engine.checkpoints.nano.mx import quantize_fp8, quantize_mxfp4

Variant = Literal["preview", "0731", "vision"]
Form = Literal["fp8", "mxfp4", "bf16", "f32", "experts"]
VARIANTS: tuple[Variant, ...] = ("preview", "0731", "vision")
DSPARK_STAGES = 3

_BASE: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
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
    "index_head_dim": 32,
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
    "dspark_noise_token_id": 480,
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
class Drawing:
    """How a tensor is stored and drawn: normal values around `mean`."""

    name: str
    shape: tuple[int, ...]
    form: Form = "bf16"
    std: float = 1.0
    mean: float = 0.0


def _linear(name: str, rows: int, columns: int, form: Form = "fp8", gain: float = 1.0) -> Drawing:
    return Drawing(f"{name}.weight", (rows, columns), form, gain * columns**-0.5)


def _norm(name: str, width: int) -> Drawing:
    return Drawing(f"{name}.weight", (width,), std=0.2, mean=1.0)


@dataclass(frozen=True, slots=True)
class _Inventory:
    """All tensors of a config, by the names of the release."""

    config: Mapping[str, Any]

    def __iter__(self) -> Iterator[Drawing]:
        c = self.config
        vocab, hidden = c["vocab_size"], c["hidden_size"]
        yield Drawing("embed.weight", (vocab, hidden))
        yield _linear("head", vocab, hidden, "bf16", 4.0)
        yield _norm("norm", hidden)
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
            yield from self._vision()

    def _streams(self, name: str, values: int, scales: int) -> Iterator[Drawing]:
        width = self.config["hc_mult"] * self.config["hidden_size"]
        yield Drawing(f"{name}_fn", (values, width), "f32", width**-0.5)
        yield Drawing(f"{name}_base", (values,), "f32", 0.5)
        yield Drawing(f"{name}_scale", (scales,), "f32", 0.2, 1.0)

    def _layer(self, name: str, ratio: int, *, hashed: bool) -> Iterator[Drawing]:
        c = self.config
        n = c["hc_mult"]
        for part in ("attn", "ffn"):
            yield _norm(f"{name}.{part}_norm", c["hidden_size"])
            yield from self._streams(f"{name}.hc_{part}", (2 + n) * n, 3)
        yield from self._attention(f"{name}.attn", ratio)
        yield from self._experts(f"{name}.ffn", hashed=hashed)

    def _attention(self, name: str, ratio: int) -> Iterator[Drawing]:
        c = self.config
        hidden, heads, width = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
        rank, out = c["q_lora_rank"], c["o_groups"] * c["o_lora_rank"]
        yield Drawing(f"{name}.attn_sink", (heads,), "f32")
        yield _linear(f"{name}.wq_a", rank, hidden)
        yield _norm(f"{name}.q_norm", rank)
        yield _linear(f"{name}.wq_b", heads * width, rank)
        yield _linear(f"{name}.wkv", width, hidden)
        yield _norm(f"{name}.kv_norm", width)
        yield _linear(f"{name}.wo_a", out, heads * width // c["o_groups"])
        yield _linear(f"{name}.wo_b", hidden, out)
        if ratio:
            yield from self._compressor(f"{name}.compressor", width, ratio)
        if ratio == 4:
            index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
            yield _linear(f"{name}.indexer.wq_b", index_heads * index_dim, rank)
            yield _linear(f"{name}.indexer.weights_proj", index_heads, hidden, "bf16")
            yield from self._compressor(f"{name}.indexer.compressor", index_dim, ratio)

    def _compressor(self, name: str, width: int, ratio: int) -> Iterator[Drawing]:
        channels = 2 * width if ratio == 4 else width
        hidden = self.config["hidden_size"]
        yield _linear(f"{name}.wkv", channels, hidden, "bf16")
        yield _linear(f"{name}.wgate", channels, hidden, "bf16", 2.0)
        yield Drawing(f"{name}.ape", (ratio, channels), "f32")
        yield _norm(f"{name}.norm", width)

    def _experts(self, name: str, *, hashed: bool) -> Iterator[Drawing]:
        c = self.config
        hidden, inner, experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
        has_images = bool(c.get("vision_n_layers"))
        yield _linear(f"{name}.gate", experts, hidden, "bf16", 2.0)
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
        yield _linear(f"{name}.w1", inner, hidden, form, 2.0)
        yield _linear(f"{name}.w3", inner, hidden, form, 2.0)
        yield _linear(f"{name}.w2", hidden, inner, form)

    def _mtp(self) -> Iterator[Drawing]:
        hidden = self.config["hidden_size"]
        yield from self._layer("mtp.0", 0, hashed=False)
        yield from (_linear(f"mtp.0.{p}_proj", hidden, hidden) for p in "eh")
        yield from (_norm(f"mtp.0.{which}", hidden) for which in ("enorm", "hnorm", "norm"))
        yield from self._streams("mtp.0.hc_head", self.config["hc_mult"], 1)

    def _dspark(self) -> Iterator[Drawing]:
        c = self.config
        vocab, hidden, rank = c["vocab_size"], c["hidden_size"], c["dspark_markov_rank"]
        last = f"mtp.{DSPARK_STAGES - 1}"
        for stage in range(DSPARK_STAGES):
            yield from self._layer(f"mtp.{stage}", 0, hashed=False)
        yield _linear("mtp.0.main_proj", hidden, len(c["dspark_target_layer_ids"]) * hidden)
        yield _norm("mtp.0.main_norm", hidden)
        yield _norm(f"{last}.norm", hidden)
        yield from self._streams(f"{last}.hc_head", c["hc_mult"], 1)
        yield Drawing(f"{last}.markov_head.markov_w1.weight", (vocab, rank))
        yield _linear(f"{last}.markov_head.markov_w2", vocab, rank, "bf16")
        yield _linear(f"{last}.confidence_head.proj", 1, hidden + rank, "bf16")

    def _vision(self) -> Iterator[Drawing]:
        c = self.config
        hidden, width, inner = c["hidden_size"], c["vision_dim"], c["vision_inter_dim"]
        for which in ("start", "pad", "newline", "end"):
            yield Drawing(f"image_{which}", (hidden,))
        yield from _biased("vision.patch_embed.proj", width, 3 * c["vision_patch_size"] ** 2)
        for index in range(c["vision_n_layers"]):
            block = f"vision.blocks.{index}"
            yield _norm(f"{block}.norm1", width)
            yield from _biased(f"{block}.attn.wqkv", 3 * width, width)
            yield from _biased(f"{block}.attn.wo", width, width)
            yield _norm(f"{block}.norm2", width)
            yield _linear(f"{block}.mlp.w1", 2 * inner, width, "bf16")
            yield _linear(f"{block}.mlp.w2", width, inner, "bf16")
        yield _norm("vision.norm", width)
        yield from _biased("aligner.w1", hidden, width * c["vision_downsample_ratio"] ** 2)
        yield from _biased("aligner.w2", hidden, hidden)


def _biased(name: str, rows: int, columns: int) -> Iterator[Drawing]:
    yield _linear(name, rows, columns, "bf16")
    yield Drawing(f"{name}.bias", (rows,), std=0.2)


def nano_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """All tensors of a checkpoint as stored."""
    block = config["quantization_config"]["weight_block_size"][0]
    tensors: dict[str, Tensor] = {}
    for drawing in _Inventory(config):
        tensors |= _stored(drawing, _generator(drawing.name, seed), config, block)
    return tensors


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _stored(
    drawing: Drawing, generator: torch.Generator, config: Mapping[str, Any], block: int
) -> dict[str, Tensor]:
    if drawing.form == "experts":
        return {drawing.name: _expert_table(drawing.shape, config["n_routed_experts"], generator)}
    values = torch.randn(drawing.shape, generator=generator) * drawing.std + drawing.mean
    scale_name = f"{drawing.name.removesuffix('.weight')}.scale"
    match drawing.form:
        case "fp8":
            codes, scale = quantize_fp8(values, block)
            return {drawing.name: codes, scale_name: scale}
        case "mxfp4":
            codes, scale = quantize_mxfp4(values)
            return {drawing.name: codes, scale_name: scale}
        case "bf16":
            return {drawing.name: values.to(torch.bfloat16)}
        case "f32":
            return {drawing.name: values}


def _expert_table(shape: tuple[int, ...], experts: int, generator: torch.Generator) -> Tensor:
    """int64 [vocab, k], each row distinct experts."""
    vocab, top_k = shape
    order = torch.rand(vocab, experts, generator=generator).argsort(dim=1)
    return order[:, :top_k].contiguous()


def build_nano(folder: Path, variant: Variant, *, seed: int = 0, **changes: object) -> Path:
    """Write config.json and model.safetensors to `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    config = nano_config(variant, **changes)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(nano_tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description="Write a nano DeepSeek-V4 checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--variant", choices=VARIANTS, default="0731")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = build_nano(arguments.out, arguments.variant, seed=arguments.seed)
    say(f"wrote {folder}")


if __name__ == "__main__":
    main()
