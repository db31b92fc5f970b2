"""Tiny checkpoints of both families with a `transformers` model that holds the same weights.

`save_tiny` writes a folder in the layout of the release (names, expert spelling, FP8 blocks, table
shards, vision and draft tensors included) and returns the fp32 oracle, whose weights are exactly
the stored ones. Nothing here uses the code under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForConditionalGeneration

from tests.models.int4 import Int4Layout, int4_value

Family = Literal["qwen4_exp", "qwen3_5"]
Layout = Literal[
    "fp32",
    "bf16",
    "fp8",
    "ct-sym-g32",
    "ct-sym-g128",
    "ct-asym-g32",
    "ct-asym-g128",
    "awq-g32",
    "awq-g128",
]
Experts = Literal["single", "fused"]

EOS = 7
_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
_BASE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "rope_parameters": _ROPE,
    **_DELTA,
}
FLASH_NEXT = {
    **_BASE,
    "model_type": "qwen4_exp_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": 128,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 500,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
QWEN_27B = {
    **_BASE,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "intermediate_size": 256,
    "num_attention_heads": 6,
    "output_gate_type": "swish",
    "attn_output_gate": True,
}
_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 128,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
_IDS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
_CLASSES = {
    "qwen4_exp": ("Qwen4ExpForConditionalGeneration", FLASH_NEXT),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", QWEN_27B),
}


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A saved folder and its oracle. `text` is the text_config that was saved."""

    folder: Path
    family: Family
    oracle: torch.nn.Module
    text: dict[str, Any]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Oracle logits fp32 [len(ids), vocab] of one prefill."""
        with torch.inference_mode():
            return self.oracle(input_ids=torch.tensor([ids])).logits[0]


def save_tiny(
    folder: Path,
    family: Family,
    layout: Layout = "fp32",
    *,
    seed: int = 0,
    experts: Experts = "single",
    prefix: str = "model.language_model",
    text: dict[str, Any] | None = None,
    mtp: bool = True,
    shards: int = 2,
) -> TinyCheckpoint:
    """Write a seeded tiny checkpoint. `text` overrides fields of its text_config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = composite_config(family, text or {}, layout)
    oracle = build_oracle(family, config, seed)
    state = {name: t.clone() for name, t in oracle.state_dict().items()}
    if mtp:
        state |= _draft_tensors(family, state, config["text_config"], seed)
    stored = dict(_stored(state, layout, experts, config["text_config"]))
    oracle.load_state_dict(_values(stored, state, oracle), strict=True)
    stored = {
        name.replace("model.language_model", prefix, 1): tensor for name, tensor in stored.items()
    }
    if prefix == "model":
        stored = {n: t for n, t in stored.items() if not n.startswith("model.visual.")}
    write_folder(folder, config, stored, shards)
    return TinyCheckpoint(folder, family, oracle, config["text_config"])


def composite_config(family: Family, text: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """config.json of a tiny checkpoint."""
    architecture, base = _CLASSES[family]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family,
        "tie_word_embeddings": False,
        "text_config": {**base, **text},
        "vision_config": {**_VISION, "model_type": f"{family}_vision"},
        **_IDS,
    }
    if family == "qwen3_5":
        config["vision_config"]["model_type"] = family
    if layout == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    if (int4 := Int4Layout.of(layout)) is not None:
        config["quantization_config"] = int4.config()
    return config


def build_oracle(family: Family, config: dict[str, Any], seed: int) -> torch.nn.Module:
    """The `transformers` model in fp32, every tensor random."""
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    torch.manual_seed(seed)
    model_class = {
        "qwen4_exp": Qwen4ExpForConditionalGeneration,
        "qwen3_5": Qwen3_5ForConditionalGeneration,
    }[family]
    model_config = AutoConfig.for_model(**json.loads(json.dumps(plain)))
    model_config._attn_implementation = "eager"
    model = model_class(model_config).float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter.shape, generator) * _scale(family, name))
    return model


def _scale(family: Family, name: str) -> float:
    """The deeper 27B oracle is 1e-5 off double precision for logits of size 1; keep them small."""
    return 0.25 if family == "qwen3_5" and name == "lm_head.weight" else 1.0


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        # Slow decay: with a memory of one token the output norm divides by a single, at times
        # tiny, dot product and any implementation in fp32 is a coarse one.
        return torch.rand(shape, generator=generator).mul(0.5).add(0.01).log()
    if name.endswith("linear_attn.norm.weight"):
        return noise * 0.2 + 1.0
    if len(shape) == 1:
        return noise * 0.3
    if "conv1d" in name or "embed" in name:
        return noise * 0.5
    return noise / math.sqrt(shape[-1])


def _draft_tensors(
    family: Family, state: dict[str, torch.Tensor], text: dict[str, Any], seed: int
) -> dict[str, torch.Tensor]:
    """Random `mtp.*` tensors; its layer has the shapes of the last layer (full attention)."""
    generator = torch.Generator().manual_seed(seed + 2)
    hidden = text["hidden_size"]
    source = f"model.language_model.layers.{text['num_hidden_layers'] - 1}."
    shapes = {
        f"mtp.layers.0.{name[len(source) :]}": t.shape
        for name, t in state.items()
        if name.startswith(source)
    }
    shapes["mtp.pre_fc_norm_embedding.weight"] = torch.Size([hidden])
    if family == "qwen3_5":
        shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
        shapes["mtp.pre_fc_norm_hidden.weight"] = torch.Size([hidden])
        shapes["mtp.norm.weight"] = torch.Size([hidden])
    else:
        shapes["mtp.fc_embedding.weight"] = torch.Size([hidden, hidden])
        shapes["mtp.fc_hidden.weight"] = torch.Size([hidden, hidden])
        shapes["mtp.pre_fc_norm_hidden.weight"] = torch.Size([hidden * text["hc_count"]])
        mixer = "hyper_connection_mixer."
        for name, t in state.items():
            if name.startswith(f"model.language_model.{mixer}"):
                shapes[f"mtp.{mixer}{name.split(mixer)[1]}"] = t.shape
    return {name: _random(name, shape, generator) for name, shape in sorted(shapes.items())}


def _stored(
    state: dict[str, torch.Tensor], layout: Layout, experts: Experts, text: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by release name, in stored types. The table is at most bf16 in every layout.

    fp8 and INT4: routed experts where there are some, as in the releases; else the projections.
    Drafts are in bf16 beside INT4.
    """
    dense = torch.float32 if layout == "fp32" else torch.bfloat16
    routed = any(".mlp.experts." in name for name in state)
    int4 = Int4Layout.of(layout)
    for name, tensor in state.items():
        if ".mlp.experts." in name:
            yield from _expert_tensors(name, tensor, layout, experts, dense)
        elif int4 and not routed and _is_dense_projection(name):
            yield from int4.tensors(name, tensor)
        elif layout == "fp8" and not routed and name.endswith(_DENSE_PROJECTIONS):
            yield from _fp8_tensors(name, tensor)
        elif name.endswith("ngram_embedding.weight"):
            yield from _table_tensors(name, tensor, layout, text["split_ngram_parts"])
        elif tensor.dtype == torch.int64:
            yield name, tensor
        else:
            yield name, tensor.to(dense)


def _expert_tensors(
    name: str, tensor: torch.Tensor, layout: Layout, experts: Experts, dense: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    int4 = None if name.startswith("mtp.") else Int4Layout.of(layout)
    if experts == "fused" and layout != "fp8" and int4 is None:
        yield name, tensor.to(dense)
        return
    base, kind = name.rsplit(".", 1)
    for e, matrix in enumerate(tensor):
        if kind == "down_proj":
            parts = {"down_proj": matrix}
        else:
            gate, up = matrix.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up}
        for projection, value in parts.items():
            full = f"{base}.{e}.{projection}.weight"
            if int4 is not None:
                yield from int4.tensors(full, value)
            elif layout != "fp8":
                yield full, value.to(dense).contiguous()
            else:
                yield from _fp8_tensors(full, value)


def _fp8_tensors(name: str, matrix: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    codes, scale = quantise_blocks(matrix)
    yield name, codes
    yield f"{name}_scale_inv", scale


def quantise_blocks(w_NK: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [N, K] and bf16 multipliers per block of `block` x `block`."""
    n, k = w_NK.shape
    rows, columns = -(-n // block), -(-k // block)
    scale = torch.empty(rows, columns, dtype=torch.bfloat16)
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for r in range(rows):
        for c in range(columns):
            at = (slice(r * block, (r + 1) * block), slice(c * block, (c + 1) * block))
            scale[r, c] = w_NK[at].abs().max() / 448.0
            codes[at] = (w_NK[at] / scale[r, c].float()).clamp(-448, 448).to(codes.dtype)
    return codes, scale


def _table_tensors(
    name: str, table: torch.Tensor, layout: Layout, parts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    base = name.removesuffix("weight")
    if layout == "fp8":
        scale = (table.abs().max() / 448.0).to(torch.bfloat16)
        stored = (table / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        yield f"{base}weight_scale", scale.view(1)
    else:
        stored = table.to(torch.bfloat16)
    for i, shard in enumerate(stored.chunk(parts)):
        yield f"{base}shard_{i}.weight", shard.contiguous()


def _values(
    stored: dict[str, torch.Tensor], state: dict[str, torch.Tensor], oracle: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """What the stored tensors mean, in fp32, under the oracle's names."""
    values = {}
    for name in oracle.state_dict():
        if name.endswith(_INTEGER_NAMES):
            values[name] = stored[name]
        elif name in stored or int4_value(name, stored) is not None:
            values[name] = matrix_value(name, stored)
        elif name.endswith("ngram_embedding.weight"):
            values[name] = _table_value(name, stored)
        else:
            values[name] = _expert_value(name, stored, state[name].shape[0])
    return values


_DENSE_PROJECTIONS = tuple(
    f".{module}.weight"
    for module in (
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")),
    )
)


def _is_dense_projection(name: str) -> bool:
    return name.endswith(_DENSE_PROJECTIONS) and not name.startswith("mtp.")


_INTEGER_NAMES = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def _table_value(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    base = name.removesuffix("weight")
    shards = [n for n in stored if n.startswith(f"{base}shard_")]
    shards.sort(key=lambda n: int(n.split("shard_")[1].split(".")[0]))
    table = torch.cat([stored[n].float() for n in shards])
    scale = stored.get(f"{base}weight_scale")
    return table if scale is None else table * scale.float()


def _expert_value(name: str, stored: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    base, kind = name.rsplit(".", 1)
    projections = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
    return torch.stack(
        [
            torch.cat([matrix_value(f"{base}.{e}.{p}.weight", stored) for p in projections])
            for e in range(count)
        ]
    )


def matrix_value(name: str, stored: dict[str, torch.Tensor], block: int = 128) -> torch.Tensor:
    """fp32 value of a stored matrix, by torch's own e4m3 conversion or a decoder of four bits."""
    if (four_bit := int4_value(name, stored)) is not None:
        return four_bit
    values = stored[name].float()
    scale = stored.get(f"{name}_scale_inv")
    if scale is None:
        return values
    spread = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    return values * spread[: values.shape[0], : values.shape[1]]


def write_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], shards: int
) -> None:
    """config.json, generation_config.json and the tensors over `shards` files with an index."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate(_split(names, shards), start=1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _split(names: list[str], parts: int) -> Iterable[list[str]]:
    size = -(-len(names) // parts)
    return [names[i : i + size] for i in range(0, len(names), size)]


def prompt(length: int, seed: int, vocab: int = 490) -> list[int]:
    """Random ids with single and doubled end-of-text ids inside."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, vocab, (length,), generator=generator).tolist()
    for at in (length // 4, length // 2, length // 2 + 1):
        ids[at] = EOS
    return ids
