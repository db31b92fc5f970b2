"""Finding n-gram tables in a checkpoint folder, and refusing damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.common.checkpoint import Checkpoint, CheckpointError
from services.common.ngram_table import find_tables, hash_parameters
from tests.offload.checkpoint import LAYER, PREFIX, hash_tensors, make_checkpoint, rewrite

SHARD = PREFIX + "ngram_embedding.shard_{}.weight"


def test_the_release_s_hash_constants_follow_from_its_config() -> None:
    config = {
        "vocab_size": 248320,
        "eos_token_id": [248044, 1],
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
    }
    found = hash_parameters(config, 0)
    assert found.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert found.head_sizes[:3] == (20000003, 20000023, 20000033)
    assert found.head_sizes[-1] == 20000171
    assert sum(found.head_sizes) == 320_001_446
    assert found.head_offsets[:3] == (0, 20000003, 40000026)
    assert found.eos_token_id == 248044


def test_a_second_table_goes_on_where_the_first_one_s_primes_end() -> None:
    config = {"vocab_size": 1024, "eos_token_id": 0, "ngram_vocab_size_base": 100}
    first, second = hash_parameters(config, 0), hash_parameters(config, 1)
    assert first.head_sizes[-1] < second.head_sizes[0]
    assert len({*first.head_sizes, *second.head_sizes}) == 32
    # What transformers' class gives for its table number 1.
    assert second.multipliers == (8230546411685799, 2619768721786115, 6083637270625295)


@pytest.mark.parametrize(
    ("dtype", "name", "item"),
    [(torch.float8_e4m3fn, "F8_E4M3", 1), (torch.bfloat16, "BF16", 2)],
    ids=["e4m3", "bf16"],
)
def test_shards_are_found_in_the_order_of_their_numbers(
    tmp_path: Path, dtype: torch.dtype, name: str, item: int
) -> None:
    table = make_checkpoint(tmp_path, parts=12, dtype=dtype)
    with Checkpoint.open(tmp_path) as checkpoint:
        (layout,) = find_tables(checkpoint)
        data = b"".join(bytes(checkpoint.raw(s.name)) for s in layout.shards)
    assert data == table.numpy().tobytes()
    assert (layout.name, layout.layer) == ("qwen4_exp.layers.1.ple", LAYER)
    assert (layout.rows, layout.row_bytes, layout.dtype) == (*table.shape, name)
    assert layout.row_values == table.shape[1] // item
    scale = float(torch.tensor(0.000199).bfloat16()) if item == 1 else 1.0
    assert layout.scale == scale
    assert layout.hash.head_sizes == tuple(
        hash_tensors(1500)[PREFIX + "ngram_heads_vocab_sizes"].tolist()
    )


def test_a_model_without_tables_has_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["ple_layer_ids"] = []
    path.write_text(json.dumps(config))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert find_tables(checkpoint) == ()


def test_equal_folders_have_equal_fingerprints_and_changed_weights_another(
    tmp_path: Path,
) -> None:
    prints = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tmp_path / name, seed=seed)
        with Checkpoint.open(tmp_path / name) as checkpoint:
            prints.append(find_tables(checkpoint)[0].fingerprint)
    assert prints[0] == prints[1] != prints[2]


def hashed_differently(folder: Path) -> None:
    sizes = hash_tensors(1500)[PREFIX + "ngram_heads_vocab_sizes"].clone()
    sizes[3] += 2
    rewrite(folder, {PREFIX + "ngram_heads_vocab_sizes": sizes})


def truncated(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "shard tensor gone": (
        lambda f: rewrite(f, {SHARD.format(2): None}),
        r"no such tensor.*shard_2\.weight",
    ),
    "file gone": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        r"missing shard.*model-00002-of-00002\.safetensors",
    ),
    "file truncated": (
        truncated,
        r"truncated.*model-00002-of-00002\.safetensors.*expected \d+ bytes.*found \d+ bytes",
    ),
    "hashed differently": (
        hashed_differently,
        r"hashed differently.*ngram_heads_vocab_sizes.*model-00001.*expected 64 bytes",
    ),
    "hash constants gone": (
        lambda f: rewrite(f, {PREFIX + "layer_multipliers": None}),
        r"no such tensor.*layer_multipliers",
    ),
    "hash constants of another type": (
        lambda f: rewrite(f, {PREFIX + "layer_multipliers": torch.zeros(3, dtype=torch.int32)}),
        r"I32 \[3\], expected I64 \[3\].*expected 24 bytes.*found 12 bytes",
    ),
    "scale gone": (
        lambda f: rewrite(f, {PREFIX + "ngram_embedding.weight_scale": None}),
        r"no such tensor.*weight_scale",
    ),
    "too few rows": (
        lambda f: rewrite(f, {SHARD.format(3): torch.zeros(9, 16).to(torch.float8_e4m3fn)}),
        r"n-gram table has \d+ rows.*expected \d+ bytes.*found \d+ bytes",
    ),
    "rows of another width": (
        lambda f: rewrite(f, {SHARD.format(1): torch.zeros(9, 15).to(torch.float8_e4m3fn)}),
        r"\[9, 15\], expected F8_E4M3 \[rows, 16\].*shard_1.*expected 144 bytes; found 135 bytes",
    ),
    "shard of another type": (
        lambda f: rewrite(f, {SHARD.format(1): torch.zeros(9, 16).bfloat16()}),
        r"shard is BF16.*shard_1\.weight",
    ),
    "table of an unknown type": (
        lambda f: rewrite(f, {SHARD.format(0): torch.zeros(9, 16)}),
        r"type F32.*shard_0\.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_refused_with_its_file_and_tensor(tmp_path: Path, damage: str) -> None:
    make_checkpoint(tmp_path)
    apply, message = DAMAGES[damage]
    apply(tmp_path)
    with pytest.raises(CheckpointError) as error, Checkpoint.open(tmp_path) as checkpoint:
        find_tables(checkpoint)
    assert re.search(message, str(error.value)), str(error.value)
    assert str(tmp_path) in str(error.value)
