"""Seeded nano checkpoints of GLM-5.3-Flash in the layouts of the releases, every mechanism at work.

`python -m services.engine.checkpoints.nano.glm --out FOLDER --layout fp8`

Weights are random; what is degenerate by default (pool biases and gates, decays, mixing bases and
scales, router biases) is drawn as well. A tensor depends on the seed and its name alone, so all
layouts hold the same model, rounded differently. The draft layer lies in a file of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.common.cli.base import say
from services.engine.checkpoints.nano.drawn import Drawing, biased, generator_for
from services.engine.checkpoints.nano.fp8 import quantize_blocks
from services.engine.checkpoints.nano.glm_bpe import train_tokenizer, write_tokenizer

Layout = Literal["bf16", "fp8", "awq"]
LAYOUTS: tuple[Layout, ...] = ("bf16", "fp8", "awq")
INT4_GROUP = 128
_TEXT_PREFIX = "model.language_model."

_TEXT: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 5,
    "layer_types": [
        "linear_attention",
        "deepseek_sparse_attention",
        "linear_attention",
        "deepseek_sparse_attention",
        "linear_attention",
    ],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 0,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "index_kpool": 4,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "indexer_types": ["full"] * 5,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "swiglu_limit": 1.0,
    "mhc": True,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "eos_token_id": [1],
}
_VISION: dict[str, Any] = {
    "model_type": "glm5_next_vision",
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 128,
    "projection_intermediate_size": 64,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "image_size": 448,
    "swiglu_limit": 1.0,
    "attention_bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
_OUTER: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "tie_word_embeddings": False,
    "image_token_id": 500,
    "video_token_id": 501,
    "image_start_token_id": 502,
    "image_end_token_id": 503,
    "video_start_token_id": 504,
    "video_end_token_id": 505,
}
_QUANTIZATION: dict[Layout, dict[str, Any]] = {
    "bf16": {},
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "awq": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*mlp\\.experts\\..*"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": INT4_GROUP,
                },
            }
        },
        "ignore": ["re:.*layers\\.5\\..*"],
    },
}


def nano_config(layout: Layout, **text: object) -> dict[str, Any]:
    """config.json of a layout with single fields of its text_config changed."""
    config = {**_OUTER, "text_config": {**_TEXT, **text}, "vision_config": dict(_VISION)}
    if quantization := _QUANTIZATION[layout]:
        config["quantization_config"] = quantization
    return config


def _linear(name: str, rows: int, columns: int, *, fp8: bool = False) -> Drawing:
    form: Literal["fp8", "bf16"] = "fp8" if fp8 else "bf16"
    return Drawing(f"{name}.weight", (rows, columns), form, columns**-0.5)


def _norm(name: str, width: int) -> Drawing:
    return Drawing(f"{name}.weight", (width,), std=0.1, mean=1.0)


@dataclass(frozen=True, slots=True)
class _Inventory:
    """All tensors of a config, by the names of the release; "fp8" where that release has codes."""

    config: Mapping[str, Any]

    def __iter__(self) -> Iterator[Drawing]:
        text = self.config["text_config"]
        vocab, hidden = text["vocab_size"], text["hidden_size"]
        layers = text["num_hidden_layers"]
        yield Drawing(f"{_TEXT_PREFIX}embed_tokens.weight", (vocab, hidden))
        yield _norm(f"{_TEXT_PREFIX}norm", hidden)
        yield _linear("lm_head", vocab, hidden)
        for index in range(layers):
            name = f"{_TEXT_PREFIX}layers.{index}"
            yield from self._streams(name)
            if text["layer_types"][index] == "linear_attention":
                yield from self._kda(f"{name}.self_attn")
            else:
                yield from self._attention(f"{name}.self_attn")
            yield from self._layer(name, sparse=text["mlp_layer_types"][index] == "sparse")
        for index in range(layers, layers + text["num_nextn_predict_layers"]):
            yield from self._draft(f"{_TEXT_PREFIX}layers.{index}")
        yield from _tower(self.config["vision_config"])

    def _streams(self, name: str) -> Iterator[Drawing]:
        text = self.config["text_config"]
        count = text["hc_mult"]
        values = (2 + count) * count
        for site in ("attn", "ffn"):
            shape = (values, count * text["hidden_size"])
            yield Drawing(f"{name}.hc_{site}_fn", shape, "f32", 0.05)
            yield Drawing(f"{name}.hc_{site}_base", (values,), "f32", 0.5)
            yield Drawing(f"{name}.hc_{site}_scale", (3,), "f32", 0.3, 1.0)

    def _layer(self, name: str, *, sparse: bool) -> Iterator[Drawing]:
        text = self.config["text_config"]
        hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
        yield _norm(f"{name}.input_layernorm", hidden)
        yield _norm(f"{name}.post_attention_layernorm", hidden)
        if not sparse:
            yield from self._mlp(f"{name}.mlp", text["intermediate_size"])
            return
        experts = text["n_routed_experts"]
        yield _linear(f"{name}.mlp.gate", experts, hidden)
        yield Drawing(f"{name}.mlp.gate.e_score_correction_bias", (experts,), "f32", 0.3)
        yield from self._mlp(f"{name}.mlp.shared_experts", inner * text["n_shared_experts"])
        for expert in range(experts):
            yield from self._mlp(f"{name}.mlp.experts.{expert}", inner)

    def _mlp(self, name: str, inner: int) -> Iterator[Drawing]:
        hidden = self.config["text_config"]["hidden_size"]
        yield _linear(f"{name}.gate_proj", inner, hidden, fp8=True)
        yield _linear(f"{name}.up_proj", inner, hidden, fp8=True)
        yield _linear(f"{name}.down_proj", hidden, inner, fp8=True)

    def _kda(self, name: str) -> Iterator[Drawing]:
        text = self.config["text_config"]
        linear, hidden = text["linear_attn_config"], text["hidden_size"]
        heads, head_dim = linear["num_heads"], linear["head_dim"]
        width, taps = heads * head_dim, linear["short_conv_kernel_size"]
        for which in "qkv":
            yield _linear(f"{name}.{which}_proj", width, hidden)
            yield Drawing(f"{name}.{which}_conv1d.weight", (width, 1, taps), std=taps**-0.5)
        yield _linear(f"{name}.b_proj", heads, hidden)
        for which in "fg":
            yield _linear(f"{name}.{which}_a_proj", head_dim, hidden)
            yield _linear(f"{name}.{which}_b_proj", width, head_dim)
        yield Drawing(f"{name}.A_log", (heads,), "f32", 0.5)
        yield Drawing(f"{name}.dt_bias", (width,), "f32")
        yield _norm(f"{name}.o_norm", head_dim)
        yield _linear(f"{name}.o_proj", hidden, width)

    def _attention(self, name: str) -> Iterator[Drawing]:
        text = self.config["text_config"]
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        keys, values = text["qk_nope_head_dim"], text["v_head_dim"]
        rank, latent = text["q_lora_rank"], text["kv_lora_rank"]
        yield _linear(f"{name}.q_a_proj", rank, hidden, fp8=True)
        yield _norm(f"{name}.q_a_layernorm", rank)
        yield _linear(f"{name}.q_b_proj", heads * keys, rank, fp8=True)
        yield _linear(f"{name}.kv_a_proj_with_mqa", latent, hidden, fp8=True)
        yield _norm(f"{name}.kv_a_layernorm", latent)
        yield _linear(f"{name}.kv_b_proj", heads * (keys + values), latent)
        yield _linear(f"{name}.o_proj", hidden, heads * values, fp8=True)
        yield from self._indexer(f"{name}.indexer")

    def _indexer(self, name: str) -> Iterator[Drawing]:
        text = self.config["text_config"]
        hidden, heads, width = text["hidden_size"], text["index_n_heads"], text["index_head_dim"]
        yield _linear(f"{name}.wq_b", heads * width, text["q_lora_rank"])
        yield _linear(f"{name}.wk", width, hidden)
        yield _norm(f"{name}.k_norm", width)
        yield Drawing(f"{name}.k_norm.bias", (width,), std=0.1)
        yield _linear(f"{name}.weights_proj", heads, hidden)
        yield Drawing(f"{name}.index_kpool_compress_gate", (width, hidden), std=0.1)
        yield Drawing(f"{name}.index_kpool_compress_ape", (text["index_kpool"], width), "f32", 0.5)

    def _draft(self, name: str) -> Iterator[Drawing]:
        hidden = self.config["text_config"]["hidden_size"]
        for which in ("enorm", "hnorm", "shared_head.norm"):
            yield _norm(f"{name}.{which}", hidden)
        yield _linear(f"{name}.eh_proj", hidden, 2 * hidden)
        yield from self._attention(f"{name}.self_attn")
        yield from self._layer(name, sparse=True)


def _tower(vision: Mapping[str, Any]) -> Iterator[Drawing]:
    name, width, inner = "model.visual", vision["hidden_size"], vision["intermediate_size"]
    patch = (3, vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    hidden, side = vision["out_hidden_size"], vision["spatial_merge_size"]
    yield Drawing(f"{name}.patch_embed.proj.weight", (width, *patch), std=0.03)
    yield Drawing(f"{name}.patch_embed.proj.bias", (width,), std=0.1)
    for index in range(vision["depth"]):
        block = f"{name}.blocks.{index}"
        yield from (_norm(f"{block}.norm{i}", width) for i in (1, 2))
        yield from biased(f"{block}.attn.qkv", 3 * width, width)
        yield from biased(f"{block}.attn.proj", width, width)
        yield from (
            _norm(f"{block}.attn.{which}_norm", width // vision["num_heads"]) for which in "qk"
        )
        yield from biased(f"{block}.mlp.gate_proj", inner, width)
        yield from biased(f"{block}.mlp.up_proj", inner, width)
        yield from biased(f"{block}.mlp.down_proj", width, inner)
    yield _norm(f"{name}.post_layernorm", width)
    yield Drawing(f"{name}.downsample.weight", (hidden, width, side, side), std=0.1)
    yield Drawing(f"{name}.downsample.bias", (hidden,), std=0.1)
    merger, projection = f"{name}.merger", vision["projection_intermediate_size"]
    yield _linear(f"{merger}.proj", hidden, hidden)
    yield _norm(f"{merger}.post_projection_norm", hidden)
    yield Drawing(f"{merger}.post_projection_norm.bias", (hidden,), std=0.1)
    yield _linear(f"{merger}.gate_proj", projection, hidden)
    yield _linear(f"{merger}.up_proj", projection, hidden)
    yield _linear(f"{merger}.down_proj", hidden, projection)


def pack_int4(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Suffix and tensor of a matrix [N, K] in compressed-tensors' symmetric pack-quantized form.

    Codes are round(w / s) + 8 with s = amax / 7.5 of a group; eight to an int32, the first lowest.
    """
    rows, columns = weight.shape
    groups = weight.float().unflatten(1, (-1, INT4_GROUP))
    scale = (groups.abs().amax(-1) / 7.5).clamp_min(1e-8).to(torch.bfloat16)
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int64) + 8
    shifts = torch.arange(0, 32, 4)
    words = (codes.unflatten(1, (-1, 8)) << shifts).sum(-1)
    yield "weight_packed", torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    yield "weight_scale", scale
    yield "weight_shape", torch.tensor([rows, columns])


def nano_tensors(config: Mapping[str, Any], layout: Layout, seed: int = 0) -> dict[str, Tensor]:
    """All tensors of a checkpoint as stored."""
    draft = f"{_TEXT_PREFIX}layers.{config['text_config']['num_hidden_layers']}."
    tensors: dict[str, Tensor] = {}
    for drawing in _Inventory(config):
        noise = torch.randn(drawing.shape, generator=generator_for(drawing.name, seed))
        values = noise * drawing.std + drawing.mean
        packed = layout == "awq" and ".experts." in drawing.name
        if packed and not drawing.name.startswith(draft):
            module = drawing.name.removesuffix("weight")
            tensors |= {module + suffix: tensor for suffix, tensor in pack_int4(values)}
        elif drawing.form == "fp8" and layout == "fp8":
            codes, scale = quantize_blocks(values)
            tensors |= {drawing.name: codes, f"{drawing.name}_scale_inv": scale}
        else:
            tensors[drawing.name] = values if drawing.form == "f32" else values.to(torch.bfloat16)
    return tensors


def build_nano(folder: Path, layout: Layout, *, seed: int = 0, **text: object) -> Path:
    """Write config.json, the tensors and their index to `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    config = nano_config(layout, **text)
    write_checkpoint(folder, config, nano_tensors(config, layout, seed))
    return folder


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """The draft layer goes to a file of its own, as in the releases."""
    draft = f"{_TEXT_PREFIX}layers.{config['text_config']['num_hidden_layers']}."
    files = {
        name: "model-nextn-00001-of-00001.safetensors"
        if name.startswith(draft)
        else "model-00001-of-00001.safetensors"
        for name in sorted(tensors)
    }
    for file in sorted(set(files.values())):
        held = {name: tensors[name] for name, its in files.items() if its == file}
        save_file(held, folder / file, {"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    generation = {"eos_token_id": config["text_config"]["eos_token_id"], "pad_token_id": 0}
    for file, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("model.safetensors.index.json", index),
    ):
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")


def add_tokenizer(folder: Path, *, seed: int = 0) -> None:
    """Write what a folder needs besides to be served."""
    tokenizer = train_tokenizer(_OUTER["image_token_id"], seed)
    write_tokenizer(tokenizer, folder, _TEXT["max_position_embeddings"])


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description="Write a nano GLM-5.3-Flash checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layout", choices=LAYOUTS, default="fp8")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = build_nano(arguments.out, arguments.layout, seed=arguments.seed)
    add_tokenizer(folder, seed=arguments.seed)
    say(f"wrote {folder}")


if __name__ == "__main__":
    main()
