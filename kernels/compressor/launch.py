"""Launches of the Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.cache_rows import launch as cache_rows
from kernels.compressor.triton import BF16, FP16, FP32
from kernels.compressor.triton import pool_rows as pool_kernel
from kernels.compressor.triton import store_entries as store_kernel
from kernels.compressor.triton import write_entries as write_kernel

if TYPE_CHECKING:
    from kernels.cache_rows import RowFormat
    from kernels.compressor import Finish

ROUND = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
CHANNELS, POOL_WARPS = 128, 4  # of a program that pools: one channel a thread
UNROLLED, MOST_UNROLLED = 8, 32  # tokens whose rows are loaded at once, where they are many
FEW_TOKENS = 256  # each has a program; where there are more a window has one
SEQUENCES = 256  # that are compared at a time
COPIED, WARPS, STAGES = 1024, 4, 1


def pool_rows(
    rows_TX: torch.Tensor,
    scores_TX: torch.Tensor,
    state_BYD: torch.Tensor,
    starts_B1: torch.Tensor,
    positions_T: torch.Tensor,
    write_token_W: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package. One launch; no host synchronisation; can be captured in a CUDA graph."""
    tokens, writes, (sequences, rows, width) = len(rows_TX), len(write_token_W), state_BYD.shape
    assert rows_TX.is_contiguous() and scores_TX.is_contiguous() and state_BYD.is_contiguous()
    assert starts_B1.shape == (sequences + 1,) and positions_T.shape == (tokens,)
    entries_TD = torch.empty(tokens, width, dtype=torch.float32, device=rows_TX.device)
    states_WYD = torch.empty(writes, rows, width, dtype=torch.float32, device=rows_TX.device)
    values = pool_constants(tokens, ratio, overlap=overlap)
    span = int(values["SPAN"])
    if tokens + writes:
        pool_kernel[(-(-tokens // span) + writes, -(-width // CHANNELS))](
            rows_TX, scores_TX, state_BYD, starts_B1, positions_T, write_token_W, entries_TD,
            states_WYD, tokens, sequences, width, **values, num_warps=POOL_WARPS,
            num_stages=STAGES,
        )  # fmt: skip
    return entries_TD, states_WYD


def pool_constants(tokens: int, ratio: int, *, overlap: bool) -> dict[str, int | bool]:
    """The constants of `pool_rows`."""
    few = tokens <= FEW_TOKENS
    return {
        "RATIO": ratio,
        "OVERLAP": overlap,
        "SPAN": _span(tokens, ratio),
        "BD": CHANNELS,
        "UNROLL": min(ratio, UNROLLED if few else MOST_UNROLLED),
        "CHUNK": SEQUENCES,
    }


def _span(tokens: int, ratio: int) -> int:
    """Tokens of a program; of these one fills an entry, unless they are of several sequences."""
    return 1 if tokens <= FEW_TOKENS else 1 << (ratio.bit_length() - 1)


def write_entries(
    entries_TD: torch.Tensor,
    pool_PND: torch.Tensor,
    pages_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    """See the package. No host synchronisation; can be captured in a CUDA graph."""
    tokens, width = entries_TD.shape
    assert entries_TD.is_contiguous()
    if tokens == 0:
        return
    write_kernel[(tokens, -(-width // COPIED))](
        entries_TD, pool_PND, pages_BP, sequence_T, positions_T, tokens,
        *_sizes(pool_PND, pages_BP), width, RATIO=ratio, BX=COPIED, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip


def store_entries(
    entries_TD: torch.Tensor,
    finish: Finish,
    pool_PND: torch.Tensor,
    pages_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    """See the package. One launch; no host synchronisation; can be captured in a CUDA graph."""
    tokens, width = entries_TD.shape
    assert entries_TD.is_contiguous() and finish.weight_D.is_contiguous()
    assert finish.cos_TF.is_contiguous() and finish.sin_TF.is_contiguous()
    if tokens == 0:
        return
    tail = pool_PND if finish.form is None else cache_rows.tail_view(pool_PND, finish.form)
    values = store_constants(
        tokens, width, finish.cos_TF.shape[1], ratio, finish.dtype, finish.form,
        rotated=finish.rotated,
    )  # fmt: skip
    store_kernel[(-(-tokens // int(values["SPAN"])),)](
        entries_TD, finish.weight_D, finish.cos_TF, finish.sin_TF, pool_PND, tail, pages_BP,
        sequence_T, positions_T, tokens, *_sizes(pool_PND, pages_BP), finish.eps,
        **values, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def store_constants(
    tokens: int,
    width: int,
    angles: int,
    ratio: int,
    dtype: torch.dtype,
    form: RowFormat | None,
    *,
    rotated: bool,
) -> dict[str, int | bool]:
    """The constants of `store_entries`."""
    wide = cache_rows.padded(width)
    assert width % 2 == 0 and (not rotated or wide == width)
    plain = dict.fromkeys(("TAIL", "FORM", "ROW", "GROUP", "E8M0", "ITEM", "PAD"), 0)
    stored = {"D": width, "DP": wide} | plain
    return (stored if form is None else cache_rows.constants(width, form)) | {
        "F": angles,
        "RATIO": ratio,
        "SPAN": _span(tokens, ratio),
        "ROUND": ROUND[dtype],
        "ROTATED": rotated,
        "LOG": wide.bit_length() - 1,
        "CODED": form is not None,
    }


def _sizes(pool_PND: torch.Tensor, pages_BP: torch.Tensor) -> tuple[int, int, int, int]:
    """Rows and columns of the table, pages of the pool, the logarithm of a page's entries."""
    pages, per_page, _ = pool_PND.shape
    assert pool_PND.is_contiguous() and pages_BP.is_contiguous()
    assert per_page & (per_page - 1) == 0, "a page holds a power of two of entries"
    return pages_BP.shape[0], pages_BP.shape[1], pages, per_page.bit_length() - 1
