"""What a GPU runs: the library's batched products, and the kernel of `sparse_attention`."""

from __future__ import annotations

import torch

from kernels.quant_linear import Matrix, PlainMatrix, dequantize
from kernels.sparse_attention import Entries, Rows
from kernels.sparse_attention.launch import Question, attend
from kernels.split_keys import Partials


def absorb_queries(q_THK: torch.Tensor, kv_b: Matrix) -> torch.Tensor:
    """One launch for a plain matrix; any other is widened first."""
    return _per_head(q_THK, _heads(kv_b, q_THK.shape[1])[:, : q_THK.shape[2]])


def expand_values(o_THC: torch.Tensor, kv_b: Matrix, value_dim: int) -> torch.Tensor:
    """As above."""
    return _per_head(o_THC, _heads(kv_b, o_THC.shape[1])[:, -value_dim:].transpose(1, 2))


def _heads(kv_b: Matrix, heads: int) -> torch.Tensor:
    """[H, K + V, C] of a plain matrix as it is, of others in fp32."""
    data = kv_b.data if isinstance(kv_b, PlainMatrix) else dequantize(kv_b)
    return data.view(heads, -1, kv_b.in_features)


def _per_head(x_THK: torch.Tensor, w_HKN: torch.Tensor) -> torch.Tensor:
    """x_h w_h for every head, [T, H, N], in the type of w; by the library, which is given views."""
    x = x_THK.to(w_HKN.dtype).transpose(0, 1)
    out = torch.empty(x_THK.shape[0], *w_HKN.shape[::2], dtype=w_HKN.dtype, device=w_HKN.device)
    torch.bmm(x, w_HKN, out=out.transpose(0, 1))
    return out.to(x_THK.dtype)


def mla_attention(
    q_THC: torch.Tensor,
    latents_PNC: torch.Tensor,
    page_table_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    scale: float,
    selected_TS: torch.Tensor,
    partials: Partials | None = None,
) -> torch.Tensor:
    """Latent attention without window and sinks; `selected` needs no order."""
    q_THC = q_THC.contiguous()
    entries = Entries(Rows(latents_PNC, page_table_BP), sequence_T, selected_TS.contiguous())
    question = Question(q_THC, sequence_T, scale)
    return attend(question, None, entries, torch.empty_like(q_THC), partials)
