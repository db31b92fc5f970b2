"""The unmodified transformers implementation with the exported, dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from services.engine.checkpoints.nano.export import PREFIX, dequantized, read_checkpoint


def _fused_experts(tensors: dict[str, Tensor], stem: str, count: int) -> dict[str, Tensor]:
    def of(kind: str) -> Tensor:
        return torch.stack([tensors.pop(f"{stem}.{e}.{kind}.weight") for e in range(count)])

    gate, up, down = of("gate_proj"), of("up_proj"), of("down_proj")
    return {f"{stem}.gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}.down_proj": down}


def oracle_state(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Rename and fuse dequantised tensors to the names of the transformers text model."""
    names = {name.replace(PREFIX, "model."): name for name in tensors if "mtp." not in name}
    state = {new: tensors[old] for new, old in names.items()}
    for layer in range(config["num_hidden_layers"]):
        state |= _fused_experts(state, f"model.layers.{layer}.mlp.experts", config["num_experts"])
    stem = f"model.layers.{config['ple_layer_ids'][0] - 1}.ple.ple_embedding.ngram_embedding"
    parts = [state.pop(f"{stem}.shard_{i}.weight") for i in range(config["split_ngram_parts"])]
    state[f"{stem}.weight"] = torch.cat(parts)
    return state


def load_oracle(folder: Path) -> Qwen4ExpForCausalLM:
    """Return the transformers text model of a checkpoint folder, in fp32 on the CPU."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    text = Qwen4ExpTextConfig(**config | {"dtype": "float32"})
    model: Qwen4ExpForCausalLM = Qwen4ExpForCausalLM(text).float()
    model.load_state_dict(oracle_state(dequantized(read_checkpoint(folder)), config))
    model.eval()
    return model
