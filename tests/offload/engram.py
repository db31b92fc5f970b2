"""Small checkpoint folders with two Engram tables, in the release's names and formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.offload.checkpoint import primes

LAYERS = (1, 4)
HEADS = 9  # of orders 2 to 4 together
GROUP = 32


def config(base: int, values: int) -> dict[str, Any]:
    """config.json of a model whose tables have about `base` rows a head of `values` values."""
    sizes = primes(base, HEADS * len(LAYERS))
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 512,
        "engram_layer_ids": [*LAYERS],
        "engram_num_embeddings": [sum(sizes[:HEADS]), sum(sizes[HEADS:])],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": base,
        "engram_n_heads": HEADS // 3,
        "engram_head_dim": values,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 311,
    }
    return {"model_type": "deepseek_v41", "image_token_id": 500, "text_config": text}


def tensor_name(layer: int, part: str) -> str:
    """`part` is weight or scale."""
    return f"layers.{layer}.engram.embed.{part}"


def make_engram(
    folder: Path, *, base: int = 300, values: int = 64, seed: int = 5
) -> dict[str, torch.Tensor]:
    """Write a folder of two files, codes in one and scales in the other.

    Returns the served bytes of each table by name, uint8 [rows, values + values / 32].
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(base, values)
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, top: int) -> torch.Tensor:
        return torch.randint(0, top, (rows, columns), generator=generator, dtype=torch.uint8)

    codes, scales, served = {}, {}, {}
    for layer, rows in zip(LAYERS, settings["text_config"]["engram_num_embeddings"], strict=True):
        # Every byte that is no NaN.
        code = random(rows, values, 127) | random(rows, values, 2) << 7
        scale = random(rows, values // GROUP, 255)
        codes[tensor_name(layer, "weight")] = code.view(torch.float8_e4m3fn)
        scales[tensor_name(layer, "scale")] = scale.view(torch.float8_e8m0fnu)
        served[f"deepseek_v41.layers.{layer}.engram"] = torch.cat([code, scale], dim=1)
    files = {
        "model-00001-of-00002.safetensors": codes,
        "model-00002-of-00002.safetensors": scales,
    }
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weight_map = {n: file for file, tensors in files.items() for n in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(settings))
    return served
