"""Row ids of an n-gram table, as the engine computes them ahead of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.ple import ngram_row_ids
from services.common.ngram_table import HashParameters, TableLayout


@dataclass(slots=True)
class TableHash:
    """Implements `NgramHash` for one table. Constants live on the CPU; ids go where tokens are."""

    table: str
    context_tokens: int
    eos: int
    multipliers_N: torch.Tensor
    head_sizes_h: torch.Tensor
    head_offsets_h: torch.Tensor

    @classmethod
    def of(cls, layout: TableLayout) -> TableHash:
        """The hash of a table whose stored constants were found equal to the config's."""
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
        need = self.context_tokens
        before = context[max(0, len(context) - need) :]
        missing = token_ids.new_full((need - len(before),), -1)
        ids = torch.cat([missing, before, token_ids])
        history_TN = ids.unfold(0, need + 1, 1).flip(1)
        device = token_ids.device
        return ngram_row_ids(
            history_TN,
            self.multipliers_N.to(device),
            self.head_sizes_h.to(device),
            self.head_offsets_h.to(device),
            self.eos,
        )
