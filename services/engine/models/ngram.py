"""Row ids of n-gram tables, as the engine computes them ahead of the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.ple import hashed_rows, ngram_row_ids
from services.common.checkpoint import Checkpoint
from services.common.ngram_table import EngramParameters, HashParameters, TableLayout
from services.engine.models.base import NgramHash
from services.engine.models.token_map import token_map

_MISSING = -1  # stands for a predecessor before the sequence's start


def ngram_hashes(checkpoint: Checkpoint, tables: Sequence[TableLayout]) -> tuple[NgramHash, ...]:
    """The hash of each of `tables`, in their order.

    Engram tables read the checkpoint's tokenizer.json, once for all. Raises CheckpointError where
    it is missing or gives another number of compressed ids than the config.
    """
    compressed = {t.hash.compressed_ids for t in tables if isinstance(t.hash, EngramParameters)}
    maps = {count: token_map(checkpoint.folder, count) for count in compressed}
    return tuple(
        EngramHash.from_parameters(t.name, t.hash, maps[t.hash.compressed_ids])
        if isinstance(t.hash, EngramParameters)
        else TableHash.from_parameters(t.name, t.hash)
        for t in tables
    )


@dataclass(slots=True)
class TableHash:
    """Implements `NgramHash` for a PLE table. Constants lie on the CPU, ids where tokens are."""

    table: str
    context_tokens: int
    eos: int
    multipliers_N: torch.Tensor
    head_sizes_h: torch.Tensor
    head_offsets_h: torch.Tensor

    @classmethod
    def of(cls, layout: TableLayout) -> TableHash:
        """The hash of a table whose stored constants were found equal to the config's."""
        assert isinstance(layout.hash, HashParameters)
        return cls.from_parameters(layout.name, layout.hash)

    @classmethod
    def from_parameters(cls, name: str, parameters: HashParameters) -> TableHash:
        return cls(
            table=name,
            context_tokens=parameters.ngram_size - 1,
            eos=parameters.eos_token_id,
            multipliers_N=torch.tensor(parameters.multipliers),
            head_sizes_h=torch.tensor(parameters.head_sizes),
            head_offsets_h=torch.tensor(parameters.head_offsets),
        )

    def row_ids(self, token_ids: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Row ids int64 [n, heads] of n consecutive tokens of one sequence.

        `context` holds up to `context_tokens` ids just before `token_ids` (fewer at the start).
        """
        device = token_ids.device
        return ngram_row_ids(
            _history(token_ids, context, self.context_tokens),
            self.multipliers_N.to(device),
            self.head_sizes_h.to(device),
            self.head_offsets_h.to(device),
            self.eos,
        )


@dataclass(slots=True)
class EngramHash:
    """Implements `NgramHash` for an Engram table. Constants live on the CPU; ids as above.

    Ids go through the token map. At a missing predecessor or an image token, that slot of the
    n-gram and all older ones hold the padding token's code. An id that the tokenizer does not
    have, such as one between its size and the model's vocabulary, counts as the padding token.
    """

    table: str
    context_tokens: int
    pad_code: int
    image_token: int | None
    codes_V: torch.Tensor  # compressed id of every token id
    multipliers_N: torch.Tensor
    head_sizes_h: torch.Tensor
    head_offsets_h: torch.Tensor

    @classmethod
    def from_parameters(
        cls, name: str, parameters: EngramParameters, codes_V: torch.Tensor
    ) -> EngramHash:
        """`codes_V` as `token_map` gives it. ValueError where it lacks the padding token."""
        if parameters.pad_token_id >= len(codes_V):
            raise ValueError(
                f"engram_pad_token_id is {parameters.pad_token_id}, the tokenizer has "
                f"{len(codes_V)} tokens"
            )
        return cls(
            table=name,
            context_tokens=parameters.ngram_size - 1,
            pad_code=int(codes_V[parameters.pad_token_id]),
            image_token=parameters.image_token_id,
            codes_V=codes_V,
            multipliers_N=torch.tensor(parameters.multipliers),
            head_sizes_h=torch.tensor(parameters.head_sizes),
            head_offsets_h=torch.tensor(parameters.head_offsets),
        )

    def row_ids(self, token_ids: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Row ids int64 [n, heads] of n consecutive tokens of one sequence.

        `context` holds up to `context_tokens` ids just before `token_ids` (fewer at the start).
        """
        device = token_ids.device
        return hashed_rows(
            self._codes(_history(token_ids, context, self.context_tokens)),
            self.multipliers_N.to(device),
            self.head_sizes_h.to(device),
            self.head_offsets_h.to(device),
        )

    def _codes(self, history_TN: torch.Tensor) -> torch.Tensor:
        """Compressed ids [T, N], the padding code from the first cut on."""
        cut = history_TN == _MISSING
        if self.image_token is not None:
            cut = cut | (history_TN == self.image_token)
        known = history_TN.clamp(0, len(self.codes_V) - 1)
        hidden = cut.cummax(dim=1).values | (known != history_TN)
        codes_TN = self.codes_V.to(history_TN.device)[known]
        return codes_TN.masked_fill_(hidden, self.pad_code)


def _history(token_ids: torch.Tensor, context: torch.Tensor, need: int) -> torch.Tensor:
    """Each token's id, then its `need` predecessors, nearest first: int64 [n, 1 + need]."""
    before = context[max(0, len(context) - need) :]
    missing = token_ids.new_full((need - len(before),), _MISSING)
    ids = torch.cat([missing, before, token_ids])
    return ids.unfold(0, need + 1, 1).flip(1)
