"""Small checkpoint folders with one n-gram table, in the release's names and formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYER = 1
PREFIX = f"model.language_model.layers.{LAYER}.ple.ple_embedding."
HEADS = 8
SCALE = 0.000199


def config(base: int, parts: int, values: int) -> dict[str, Any]:
    """config.json of a model whose table has about `base` rows a head of `values` values."""
    text = {
        "model_type": "qwen4_exp_text",
        "vocab_size": 1024,
        "hidden_size": HEADS * values,
        "eos_token_id": 995,
        "ple_layer_ids": [LAYER + 1],
        "ple_embed_dim": HEADS * values,
        "ngram_size": 3,
        "heads_per_ngram": HEADS // 2,
        "ngram_vocab_size_base": base,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": parts,
    }
    return {"model_type": "qwen4_exp", "text_config": text, "split_ngram_parts": 512}


def primes(base: int, count: int) -> list[int]:
    """The first primes >= base, by trial division: independent of the code under test."""
    found: list[int] = []
    number = base
    while len(found) < count:
        if number > 1 and not any(number % d == 0 for d in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found


def hash_tensors(base: int) -> dict[str, torch.Tensor]:
    """The three I64 tensors. The multipliers are those of transformers' class for this config."""
    sizes = primes(base, HEADS)
    offsets = [sum(sizes[:h]) for h in range(HEADS)]
    multipliers = [4295158889766209, 8433018892997163, 1270917961435699]
    return {
        PREFIX + "layer_multipliers": torch.tensor(multipliers),
        PREFIX + "ngram_heads_vocab_sizes": torch.tensor(sizes),
        PREFIX + "ngram_heads_offsets": torch.tensor(offsets),
    }


def make_checkpoint(
    folder: Path,
    *,
    base: int = 1500,
    parts: int = 4,
    values: int = 16,
    dtype: torch.dtype = torch.float8_e4m3fn,
    seed: int = 5,
) -> torch.Tensor:
    """Write a folder of two shards; returns the table's bytes, uint8 [rows, row_bytes]."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = -(-sum(primes(base, HEADS)) // 128) * 128
    generator = torch.Generator().manual_seed(seed)
    item = dtype.itemsize
    table = torch.randint(0, 120, (rows, values * item), generator=generator, dtype=torch.uint8)
    pieces = {
        f"{PREFIX}ngram_embedding.shard_{i}.weight": part.contiguous().view(dtype)
        for i, part in enumerate(table.chunk(parts))
    }
    others = hash_tensors(base)
    if dtype == torch.float8_e4m3fn:
        others[PREFIX + "ngram_embedding.weight_scale"] = torch.tensor([SCALE]).bfloat16()
    names = sorted(pieces)
    files = {
        "model-00001-of-00002.safetensors": {n: pieces[n] for n in names[::2]} | others,
        "model-00002-of-00002.safetensors": {n: pieces[n] for n in names[1::2]},
    }
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weight_map = {n: file for file, tensors in files.items() for n in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(base, parts, values)))
    return table


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of the folder, or remove those whose value is None, index included."""
    from safetensors.torch import load_file

    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for file in sorted(set(index["weight_map"].values())):
        tensors = load_file(folder / file)
        for name, value in change.items():
            if name not in tensors:
                continue
            del tensors[name]
            if value is None:
                del index["weight_map"][name]
            else:
                tensors[name] = value
        save_file(tensors, folder / file)
    path.write_text(json.dumps(index))
