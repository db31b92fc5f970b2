"""What a checkpoint folder says about its model, read without torch and without weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warhorse.v1.common_pb2 import ModelInfo

from services.common.errors import StartupError


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of config.json and tokenizer.json. `max_positions` in tokens."""

    model_type: str
    vocab_size: int
    max_positions: int
    config_sha256: str
    tokenizer_sha256: str
    takes_images: bool = False

    @classmethod
    def read(cls, folder: Path) -> ModelCard:
        """Read `folder`. Raises StartupError naming the file and the missing value."""
        path = folder / "config.json"
        try:
            data = path.read_bytes()
            config = json.loads(data)
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot read {path}: {error}") from error
        text = config.get("text_config", config)
        return cls(
            model_type=str(config.get("model_type", "")),
            vocab_size=_positive(text, "vocab_size", path),
            max_positions=_positive(text, "max_position_embeddings", path),
            config_sha256=hashlib.sha256(data).hexdigest(),
            tokenizer_sha256=tokenizer_sha256(folder),
            takes_images=bool(config.get("vision_config") or config.get("vision_n_layers")),
        )

    def info(self, max_model_len: int | None) -> ModelInfo:
        """The model as a scripted engine serves it: no weights take part in the fingerprint."""
        identity = f"scripted {self.config_sha256} {self.tokenizer_sha256}"
        return ModelInfo(
            family=self.model_type,
            fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
            tokenizer_sha256=self.tokenizer_sha256,
            vocab_size=self.vocab_size,
            max_model_len=min(max_model_len or self.max_positions, self.max_positions),
            takes_images=self.takes_images,
        )


def tokenizer_sha256(folder: Path) -> str:
    """Hex digest of tokenizer.json; empty where the folder has none."""
    path = folder / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _positive(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise StartupError(f"{path}: {key} is {value!r}; must be a positive integer")
    return value
