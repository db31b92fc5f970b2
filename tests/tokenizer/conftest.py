"""Fixtures: checkpoint folders and a running service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from warhorse.v1 import tokenizer_pb2_grpc

from tests.service_process import RunDir, ServiceProcess
from tests.tokenizer.support import byte_level_definition

SERVICE = "warhorse.v1.TokenizerService"


def write_folder(folder: Path, **changes: Any) -> Path:
    """A bare checkpoint folder of the family; `changes` are further files, None leaves one out."""
    end = next(
        e["id"] for e in byte_level_definition()["added_tokens"] if e["content"] == "<|im_end|>"
    )
    files: dict[str, Any] = {
        "config.json": {
            "model_type": "qwen4_exp",
            "text_config": {"eos_token_id": 0, "max_position_embeddings": 4096, "vocab_size": 512},
        },
        "tokenizer.json": byte_level_definition(),
        "generation_config.json": {"eos_token_id": [end]},
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**files, **changes}.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="session")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def process(bare_folder: Path) -> Iterator[ServiceProcess]:
    run_dir = RunDir()
    flags = ["--model", str(bare_folder), "--render-timeout", "1"]
    service = ServiceProcess("tokenizer", SERVICE, run_dir.path, flags)
    service.start()
    yield service
    assert service.stop() == 0
    run_dir.close()


@pytest.fixture
def stub(process: ServiceProcess) -> Iterator[tokenizer_pb2_grpc.TokenizerServiceStub]:
    with grpc.insecure_channel(process.address) as channel:
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)
