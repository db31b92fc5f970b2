"""Seeded nano checkpoint of DeepSeek-V4.1-Flash in the native layout, every mechanism at work.

`python -m services.engine.checkpoints.nano.deepseek_v41 --out FOLDER`

Text decoder, Engram tables, DSpark stages, vision tower and a tokenizer with the family's special
tokens. Weights are random; what is degenerate by default (sinks, router biases, mixing bases and
scales) is drawn as well, so that no part of the model is idle.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from services.common.cli.base import say
from services.common.ngram_table import engram_parameters
from services.engine.checkpoints.nano.deepseek_bpe import (
    BOS,
    EOS,
    IMAGE,
    NOISE,
    PAD,
    train_tokenizer,
    write_tokenizer,
)
from services.engine.checkpoints.nano.drawn import (
    Drawing,
    Form,
    linear,
    norm,
    stored_tensors,
    tower,
)
from services.engine.models.token_map import token_keys

DSPARK_STAGES = 3
VOCAB = 512

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 4,
    "hidden_act": "silu",
    "swiglu_limit": 1.5,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 6,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 197,
    "engram_n_heads": 3,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": DSPARK_STAGES,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 7056,
    "max_wh_ratio": None,
}
_QUANTISATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
    "expert_dtype": "fp4",
}


def nano_config(
    token_ids: Mapping[str, int], compressed_ids: int, **changes: Any
) -> dict[str, Any]:
    """config.json for a tokenizer, with single fields of the text part changed.

    `token_ids` are those of special tokens; `compressed_ids` is the number of distinct
    normalised tokens.
    """
    text = {
        **_TEXT,
        "engram_pad_token_id": token_ids[PAD],
        "engram_compressed_vocab_size": compressed_ids,
        "dspark_noise_token_id": token_ids[NOISE],
        **changes,
    }
    config: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": token_ids[BOS],
        "eos_token_id": token_ids[EOS],
        "pad_token_id": token_ids[PAD],
        "image_token_id": token_ids[IMAGE],
        "dtype": "bfloat16",
        "quantization_config": _QUANTISATION,
        "text_config": text,
        "vision_config": _VISION,
    }
    tables = engram_parameters({**text, "image_token_id": token_ids[IMAGE]})
    text["engram_num_embeddings"] = [sum(t.head_sizes) for t in tables.values()]
    return config


@dataclass(frozen=True, slots=True)
class _Inventory:
    """All tensors of a config, by the names of the release."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]

    def __iter__(self) -> Iterator[Drawing]:
        c = self.text
        vocab, hidden = c["vocab_size"], c["hidden_size"]
        yield Drawing("embed.weight", (vocab, hidden))
        yield linear("head", vocab, hidden, "bf16", 4.0)
        yield norm("norm", hidden)
        for index in range(c["num_hidden_layers"]):
            yield from self._layer(f"layers.{index}", c["n_routed_experts"])
            yield from self._shared(f"layers.{index}.attn", index)
        for layer, rows in zip(c["engram_layer_ids"], c["engram_num_embeddings"], strict=True):
            yield from self._engram(f"layers.{layer}.engram", rows)
        yield from self._dspark()
        v = self.vision
        yield from tower(
            hidden=hidden,
            width=v["hidden_size"],
            inner=v["intermediate_size"],
            layers=v["num_hidden_layers"],
            patch=v["patch_size"],
            unfold=v["downsample_ratio"],
            roles=("start", "newline", "end"),
        )

    def _layer(self, name: str, experts: int) -> Iterator[Drawing]:
        c = self.text
        n, hidden = c["hc_mult"], c["hidden_size"]
        for part in ("attn", "ffn"):
            yield norm(f"{name}.{part}_norm", hidden)
            values, width = (2 + n) * n, n * hidden
            yield Drawing(f"{name}.hc_{part}_fn", (values, width), "f32", width**-0.5)
            yield Drawing(f"{name}.hc_{part}_base", (values,), "f32", 0.5)
            yield Drawing(f"{name}.hc_{part}_scale", (3,), "f32", 0.2, 1.0)
        yield from self._attention(f"{name}.attn")
        yield linear(f"{name}.ffn.gate", experts, hidden, "bf16", 2.0)
        yield Drawing(f"{name}.ffn.gate.bias", (experts,), "f32", 0.5)
        yield Drawing(f"{name}.ffn.gate.bias_vl", (experts,), "f32", 0.5)
        yield from self._mlp(f"{name}.ffn.shared_experts", "fp8")
        for expert in range(experts):
            yield from self._mlp(f"{name}.ffn.experts.{expert}", "mxfp4")

    def _attention(self, name: str) -> Iterator[Drawing]:
        c = self.text
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

    def _shared(self, name: str, index: int) -> Iterator[Drawing]:
        """What sources have beyond the other layers."""
        c = self.text
        hidden, width, keys = c["hidden_size"], c["head_dim"], c["index_head_dim"]
        if index in c["kv_source_layer_ids"]:
            yield linear(f"{name}.compressor.wkv", width, hidden, "bf16")
            if c["compress_ratios"][index] > 1:
                yield linear(f"{name}.compressor.wgate", width, hidden, "bf16", 2.0)
            yield norm(f"{name}.compressor.norm", width)
            yield linear(f"{name}.indexer.wk", keys, width, "bf16")
            yield norm(f"{name}.indexer.k_norm", keys)
        if index in c["index_source_layer_ids"]:
            yield linear(f"{name}.indexer.wq_b", c["index_n_heads"] * keys, c["q_lora_rank"])
            yield linear(f"{name}.indexer.weights_proj", c["index_n_heads"], hidden, "bf16")

    def _mlp(self, name: str, form: Form) -> Iterator[Drawing]:
        hidden, inner = self.text["hidden_size"], self.text["moe_intermediate_size"]
        yield linear(f"{name}.w1", inner, hidden, form, 2.0)
        yield linear(f"{name}.w3", inner, hidden, form, 2.0)
        yield linear(f"{name}.w2", hidden, inner, form)

    def _engram(self, name: str, rows: int) -> Iterator[Drawing]:
        c = self.text
        n, hidden, width = c["hc_mult"], c["hidden_size"], c["engram_head_dim"]
        heads = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]
        yield Drawing(f"{name}.embed.weight", (rows, width), "rows")
        yield linear(f"{name}.wkv", (n + 1) * hidden, heads * width)
        yield Drawing(f"{name}.q_weight", (n, hidden), std=0.5, mean=1.0)
        yield Drawing(f"{name}.k_weight", (n, hidden), std=0.5, mean=1.0)

    def _dspark(self) -> Iterator[Drawing]:
        c = self.text
        vocab, hidden, rank = c["vocab_size"], c["hidden_size"], c["dspark_markov_rank"]
        last = f"mtp.{DSPARK_STAGES - 1}"
        for stage in range(DSPARK_STAGES):
            yield from self._layer(f"mtp.{stage}", c["dspark_n_routed_experts"])
        yield linear("mtp.0.main_proj", hidden, len(c["dspark_target_layer_ids"]) * hidden)
        yield norm("mtp.0.main_norm", hidden)
        yield norm(f"{last}.norm", hidden)
        yield Drawing(f"{last}.markov_head.embed.weight", (vocab, rank))
        yield linear(f"{last}.markov_head.head", vocab, rank, "bf16")
        yield linear(f"{last}.confidence_head.proj", 1, hidden + rank, "bf16")


def nano_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """All tensors of a checkpoint as stored."""
    return stored_tensors(_Inventory(config["text_config"], config["vision_config"]), config, seed)


def build_nano(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write config, weights and tokenizer to `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(seed)
    ids = tokenizer.get_vocab()
    config = nano_config(ids, len(set(token_keys(tokenizer))), **changes)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(tokenizer, folder, config["text_config"]["max_position_embeddings"])
    save_file(nano_tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description="Write a nano DeepSeek-V4.1-Flash checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    say(f"wrote {build_nano(arguments.out, seed=arguments.seed)}")


if __name__ == "__main__":
    main()
