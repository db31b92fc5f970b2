"""N-gram tables of a checkpoint: where their rows lie, how row ids are hashed, what names them.

Torch-free, so that the offload service and the engine derive the same answer, fingerprint
included, from the same checkpoint folder. Two forms exist: PLE tables (`ngram.ple`) and Engram
tables (`ngram.engram`).
"""

from __future__ import annotations

from services.common.checkpoint import Checkpoint
from services.common.ngram.engram import engram_parameters, engram_tables
from services.common.ngram.layout import (
    AnyParameters,
    EngramParameters,
    HashParameters,
    TableLayout,
)
from services.common.ngram.ple import hash_parameters, ple_tables

__all__ = [
    "AnyParameters",
    "EngramParameters",
    "HashParameters",
    "TableLayout",
    "engram_parameters",
    "find_tables",
    "hash_parameters",
]


def find_tables(checkpoint: Checkpoint) -> tuple[TableLayout, ...]:
    """Every n-gram table of the checkpoint, by layer; empty when the model has none.

    Names are `<family>.layers.<layer>.<ple or engram>`. Raises CheckpointError, naming file,
    tensor and sizes, for a table that the config asks for and the folder lacks, a missing or
    misshapen tensor of it, and hash constants that differ from those that the config determines.
    The rows themselves are not read.
    """
    text = checkpoint.config.get("text_config", checkpoint.config)
    if text.get("engram_layer_ids"):
        # Here top-level keys win over those of the text part, but for the name of the family.
        flat = text | {k: v for k, v in checkpoint.config.items() if k != "text_config"}
        return engram_tables(checkpoint, flat)
    return ple_tables(checkpoint, text)
