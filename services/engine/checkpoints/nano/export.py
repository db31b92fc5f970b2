"""Write the nano checkpoint in the release's FP8 layout, and read it back.

`python -m services.engine.checkpoints.nano.export --weights FOLDER` writes the trained model;
`--random SEED` writes one with random weights and every mechanism alive.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.common.cli.base import say
from services.engine.checkpoints.nano.bpe import write_tokenizer
from services.engine.checkpoints.nano.config import (
    MODEL_DIR,
    SOURCE_DIR,
    NanoConfig,
    generation_config,
    model_config,
)
from services.engine.checkpoints.nano.fp8 import (
    dequantize_blocks,
    quantize_blocks,
    quantize_table,
)
from services.engine.checkpoints.nano.model import NanoModel
from services.engine.checkpoints.nano.train import load_weights

PREFIX = "model.language_model."
SHARDS = 3
_TABLE = "ngram_embedding.weight"


def _expert_tensors(name: str, value: Tensor) -> dict[str, Tensor]:
    """Split a fused expert tensor into per-expert FP8 weights and BF16 scales."""
    stem, kind = name.rsplit(".", 1)
    parts = value.chunk(2, dim=1) if kind == "gate_up_proj" else (value,)
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    out: dict[str, Tensor] = {}
    for part_name, part in zip(names, parts, strict=True):
        codes, scale = quantize_blocks(part)
        for expert in range(part.shape[0]):
            full = f"{stem}.{expert}.{part_name}"
            out[f"{full}.weight"] = codes[expert].contiguous()
            out[f"{full}.weight_scale_inv"] = scale[expert].to(torch.bfloat16).contiguous()
    return out


def _table_tensors(cfg: NanoConfig, name: str, value: Tensor) -> dict[str, Tensor]:
    """Split the n-gram table into FP8 row shards with one BF16 scale."""
    stem = name.removesuffix(".weight")
    codes, scale = quantize_table(value)
    shards = codes.view(torch.uint8).chunk(cfg.split_ngram_parts, dim=0)
    out = {
        f"{stem}.shard_{i}.weight": shard.contiguous().view(torch.float8_e4m3fn)
        for i, shard in enumerate(shards)
    }
    out[f"{stem}.weight_scale"] = scale.reshape(1).to(torch.bfloat16)
    return out


def released_tensors(cfg: NanoConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn the training state dict into the tensors of the FP8 release."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        full = name if name.startswith(("lm_head.", "mtp.")) else PREFIX + name
        if ".experts." in name:
            out |= _expert_tensors(full, value)
        elif name.endswith(_TABLE):
            out |= _table_tensors(cfg, full, value)
        elif value.dtype == torch.int64:
            out[full] = value.clone()
        else:
            out[full] = value.to(torch.bfloat16).contiguous()
    return out


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with FP8 weights as fp32 and their scales gone; the rest as fp32 too."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith((".weight_scale_inv", ".weight_scale")):
            continue
        if value.dtype == torch.int64:
            out[name] = value
        elif value.dtype != torch.float8_e4m3fn:
            out[name] = value.float()
        elif ".shard_" in name:
            scale = tensors[name.split(".shard_")[0] + ".weight_scale"]
            out[name] = value.float() * scale.float()
        else:
            out[name] = dequantize_blocks(value, tensors[f"{name}_scale_inv"])
    return out


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a sharded checkpoint as stored."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    out: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(str(folder / file), framework="pt") as shard:
            out |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return out


def _json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write shards of about equal size, in name order, and their index."""
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    done = 0
    for name, value in sorted(tensors.items()):
        shards[min(done * SHARDS // total, SHARDS - 1)][name] = value
        done += value.numel() * value.element_size()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _json(folder / "model.safetensors.index.json", index)


def write_checkpoint(cfg: NanoConfig, state: dict[str, Tensor], folder: Path) -> int:
    """Write every file of the checkpoint but scores.json; return the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = released_tensors(cfg, state)
    kept = sorted(
        name.removesuffix(".weight")
        for name, value in tensors.items()
        if name.endswith(".weight") and value.dtype == torch.bfloat16 and value.dim() == 2
    )
    _write_shards(folder, tensors)
    _json(folder / "config.json", model_config(cfg, kept))
    _json(folder / "generation_config.json", generation_config(cfg))
    shutil.copyfile(SOURCE_DIR / "chat_template.jinja", folder / "chat_template.jinja")
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(cfg, folder)
    return sum(t.numel() * t.element_size() for t in tensors.values())


def random_state(cfg: NanoConfig, seed: int) -> dict[str, Tensor]:
    """Return random weights in which nothing is zero or constant, so no mechanism is idle.

    Embeddings and indexers share a direction: block scores then rarely tie at zero, where the
    choice of blocks would be left to the order of a sort.
    """
    torch.manual_seed(seed)
    model = NanoModel(cfg)
    shared = torch.randn(cfg.hidden_size)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.std(correction=0) == 0:
                value.add_(torch.randn_like(value), alpha=0.2)
            if name == "embed_tokens.weight":
                value.add_(shared)
            elif name.endswith("index_qk_proj.weight"):
                value.add_(2.0 * shared / shared.norm())
    return dict(model.state_dict())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", type=Path, help="folder written by training")
    source.add_argument("--random", type=int, metavar="SEED")
    parser.add_argument("--output", type=Path, default=MODEL_DIR)
    args = parser.parse_args()
    cfg = NanoConfig()
    state = random_state(cfg, args.random) if args.weights is None else load_weights(args.weights)
    size = write_checkpoint(cfg, state, args.output)
    parameters = sum(v.numel() for v in state.values() if v.is_floating_point())
    say(f"{args.output}: {parameters:,} parameters, {size:,} bytes of tensors")


if __name__ == "__main__":
    main()
