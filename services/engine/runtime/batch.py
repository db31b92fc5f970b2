"""The input of one forward pass, as tensors on the model's device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

# Legend: B sequences of the step, T packed tokens, N rows that need logits, W state writes,
# P pages of the longest table.


class PendingRows(Protocol):
    """N-gram rows on their way; started when the token ids were known."""

    def wait(self) -> torch.Tensor:
        """Rows [T, rows_per_token * row_values] as stored.

        bf16 values, e4m3 codes (uint8), or e4m3 codes with the row's ue8m0 scales behind them
        (uint8; then row_values counts the bytes of both).
        """
        ...


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The rows of a step that stand for parts of images, and where images lie.

    Spans are absolute positions; a token outside every image has its own position as both ends.
    """

    rows_R: torch.Tensor  # int64, packed rows
    values_RH: torch.Tensor  # what takes the place of their token embeddings
    span_first_T: torch.Tensor  # int64, first position of the image that a token belongs to
    span_last_T: torch.Tensor  # int64, last position of it


@dataclass(frozen=True, slots=True)
class StateWrites:
    """Which states a step leaves behind in one state group.

    The state after packed token `token_W[i]` of sequence `sequence_W[i]` goes to slot
    `slot_W[i]`. The last token of every sequence has a write; further ones are snapshots at unit
    boundaries or the states after each draft token. Ordered by token; int64.
    """

    token_W: torch.Tensor
    sequence_W: torch.Tensor
    slot_W: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens to compute, packed: sequence b owns rows starts_B1[b] to starts_B1[b + 1].

    A sequence computes n >= 1 tokens; decode, a prefill chunk and the verification of drafts
    differ in nothing else.
    """

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, absolute from 0
    starts_B1: torch.Tensor  # int64 [B + 1]
    context_B: torch.Tensor  # int64, tokens of the sequence before this step
    page_tables: dict[str, torch.Tensor]  # group -> int64 [B, P]; -1 where freed or absent
    state_read_B: dict[str, torch.Tensor]  # group -> int64 slot to start from; -1 means zeros
    state_writes: dict[str, StateWrites]
    logit_rows_N: torch.Tensor  # int64, packed rows to compute logits for
    ngram_rows: Mapping[str, PendingRows] = field(default_factory=dict)  # by table name
    images: ImageBatch | None = None  # None where no token of the step belongs to one
    # Positions for rotary embeddings, int64 [T, 3] (time, row, column), of models that tell them
    # apart; None for all others, and where no sequence of the step has an image.
    rope_positions_T3: torch.Tensor | None = None
    # The same of the token `VisionModel.rope_lag` places in front of each; None as above.
    rope_lagging_T3: torch.Tensor | None = None
