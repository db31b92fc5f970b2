"""Folders that users bring: a bare one is served, a broken one is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.cli.up import DEFAULT_MODEL
from tests.stack.conftest import Stack, running

pytestmark = pytest.mark.slow


def copy_of_model(folder: Path) -> Path:
    return Path(shutil.copytree(DEFAULT_MODEL, folder / "model"))


def index(model: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((model / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    return found


def shard(model: Path) -> Path:
    return model / index(model)["lm_head.weight"]


def remove_shard(model: Path) -> str:
    shard(model).unlink()
    return shard(model).name


def truncate_shard(model: Path) -> str:
    whole = shard(model).read_bytes()
    shard(model).write_bytes(whole[: len(whole) // 2])
    return shard(model).name


def change_architecture(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    config["architectures"], config["model_type"] = ["UnheardOfForCausalLM"], "unheard_of"
    (model / "config.json").write_text(json.dumps(config))
    return "UnheardOfForCausalLM"


def change_shape(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] += 128
    (model / "config.json").write_text(json.dumps(config))
    return "experts"


@pytest.mark.parametrize(
    "damage", [remove_shard, truncate_shard, change_architecture, change_shape]
)
def test_a_broken_folder_is_refused_at_start_by_name(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    model = copy_of_model(tmp_path)
    words = damage(model)
    stack = Stack(tmp_path / "home", model=model)
    refused = stack.up()
    assert refused.returncode == 1, stack.down()
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_bare_folder_is_served(tmp_path: Path) -> None:
    model = copy_of_model(tmp_path)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        (model / name).unlink(missing_ok=True)
    with running(Stack(tmp_path / "home", model=model)) as stack:
        answer = stack.client().chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=20,
        )
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
