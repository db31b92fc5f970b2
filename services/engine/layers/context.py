"""What every layer of one forward pass shares, derived once from the batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.causal_conv import history_rows
from services.engine.cache.spec import CachePools
from services.engine.layers.rope import RotaryFrequencies
from services.engine.runtime.batch import StateWrites, StepBatch

# Legend: T packed tokens, B sequences, W state writes, F rotary frequencies.

KV_GROUP = "kv"
INDEX_GROUP = "index"
STATE_GROUP = "state"


@dataclass(frozen=True, slots=True)
class Angles:
    """cos and sin fp32 [T, F] of one position per token."""

    cos_TF: torch.Tensor
    sin_TF: torch.Tensor


@dataclass(frozen=True, slots=True)
class PassContext:
    """A batch with what layers of any family need of it; lives for one forward pass."""

    batch: StepBatch
    pools: CachePools
    positions_T: torch.Tensor  # int64, absolute
    sequence_T: torch.Tensor  # int64, sequence of each token
    offset_T: torch.Tensor  # int64, place of each token within its sequence's part of the step
    token_T: torch.Tensor  # int64, 0..T - 1
    _rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, kw_only=True)

    @classmethod
    def make(cls, batch: StepBatch, pools: CachePools) -> PassContext:
        """Derive the shared tensors; no host round trip."""
        tokens = batch.token_ids_T.shape[0]
        starts = batch.starts_B1
        numbers_B = torch.arange(starts.shape[0] - 1, device=starts.device)
        sequence_T = numbers_B.repeat_interleave(starts.diff(), output_size=tokens)
        token_T = torch.arange(tokens, device=starts.device)
        offset_T = token_T - starts[sequence_T]
        return PassContext(batch, pools, batch.positions_T, sequence_T, offset_T, token_T)

    @property
    def state_writes(self) -> StateWrites:
        """Writes of the state group."""
        return self.batch.state_writes[STATE_GROUP]

    def pages(self, group: str) -> torch.Tensor:
        """Page table int64 [B, P] of a paged group."""
        return self.batch.page_tables[group]

    def ngram_rows(self, table: str) -> torch.Tensor:
        """Rows of an n-gram table for every token, as stored; waits for them."""
        rows = self.batch.ngram_rows.get(table)
        if rows is None:
            raise ValueError(f"the batch holds no ngram_rows of table {table}")
        return rows.wait()

    def read_state(self, name: str) -> torch.Tensor:
        """The state tensor `name` of every sequence, [B, ...]; zeros where it starts afresh."""
        pool = self.pools[STATE_GROUP][name]
        slot_B = self.batch.state_read_B[STATE_GROUP]
        values = pool.index_select(0, slot_B.clamp_min(0))
        fresh = (slot_B < 0).view(-1, *(1,) * (values.dim() - 1))
        return values.masked_fill_(fresh, 0)

    def write_state(self, name: str, values_W: torch.Tensor) -> None:
        """Put values [W, ...] of the state writes into their slots."""
        pool = self.pools[STATE_GROUP][name]
        pool.index_copy_(0, self.state_writes.slot_W, values_W.to(pool.dtype))

    def history_rows(self, window: int, dilation: int = 1) -> torch.Tensor:
        """Rows of a history that a convolution over `window` past rows reads, int64 [T, J].

        Oldest first, the token's own row last; made once for all layers of the pass.
        """
        key = (window, dilation)
        if key not in self._rows:
            self._rows[key] = history_rows(
                self.token_T,
                self.sequence_T,
                self.offset_T,
                sequences=self.batch.context_B.shape[0],
                window=window,
                delays=tuple(range(window, -1, -dilation)),
            )
        return self._rows[key]

    def write_window(self, name: str, history_RC: torch.Tensor, window: int) -> None:
        """Write the last `window` rows up to each token of the state writes."""
        rows_WS = self.history_rows(window).index_select(0, self.state_writes.token_W)[:, 1:]
        self.write_state(name, rows_of(history_RC, rows_WS))


@dataclass(frozen=True, slots=True)
class StepContext(PassContext):
    """The context of a family with rotary positions."""

    angles: Angles
    block_angles: Angles | None  # at the first token of the block that each token may close


def rows_of(history_RC: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., C] of a history by row numbers int64 [...]."""
    return history_RC.index_select(0, rows.flatten()).view(*rows.shape, -1)


def make_context(
    batch: StepBatch, pools: CachePools, rope: RotaryFrequencies, block_ratio: int | None
) -> StepContext:
    """Derive the shared tensors; no host round trip.

    `block_ratio` is the number of tokens of an index block, None for a model without an indexer.
    """
    base = PassContext.make(batch, pools)
    block_angles = None
    if block_ratio is not None:
        first_T = (batch.positions_T - (block_ratio - 1)).clamp_min(0)
        block_angles = Angles(*rope.angles(first_T, batch.rope_lagging_T3))
    return StepContext(
        batch=batch,
        pools=pools,
        positions_T=base.positions_T,
        sequence_T=base.sequence_T,
        offset_T=base.offset_T,
        token_T=base.token_T,
        angles=Angles(*rope.angles(batch.positions_T, batch.rope_positions_T3)),
        block_angles=block_angles,
    )
