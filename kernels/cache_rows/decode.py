"""Stored rows to bf16, for kernels that read them from a paged pool.

Legend: BK rows, D values of a row, ROW elements of the pool that it takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.quant_linear.decode import e2m1_to_bf16, e4m3_to_bf16, times_bf16

# Codes of FORM.
PLAIN, E4M3, E2M1 = 0, 1, 2
PLAIN_: tl.constexpr = tl.constexpr(PLAIN)
E4M3_: tl.constexpr = tl.constexpr(E4M3)
# Takes out the bias of decoded e2m1.
E2M1_UNIT: tl.constexpr = tl.constexpr(2.0**126)


@triton.jit
def load_rows(
    pool, number, shown, BK: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr,
    ROW: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """bf16 [BK, D] of the rows `number` (int64 [BK]), 0 where not `shown`; exact for codes.

    Coded rows without plain values, one scale byte for GROUP values behind the codes; GROUP 0:
    codes alone.
    """
    row = number * ROW
    if FORM == PLAIN_:
        at = row[:, None] + tl.arange(0, D)[None, :]
        return tl.load(pool + at, mask=shown[:, None], other=0.0).to(tl.bfloat16)
    elif GROUP == 0:
        at = row[:, None] + tl.arange(0, D)[None, :]
        return e4m3_to_bf16(tl.load(pool + at, mask=shown[:, None], other=0), PTX)
    else:
        # A group is a dimension of its own, so that its scale lies beside its codes.
        GROUPS: tl.constexpr = D // GROUP
        BYTES: tl.constexpr = GROUP if FORM == E4M3_ else GROUP // 2
        group = tl.arange(0, GROUPS)
        inner = group[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
        at = row[:, None, None] + inner[None, :, :]
        code = tl.load(pool + at, mask=shown[:, None, None], other=0)
        at_scale = row[:, None] + (GROUPS * BYTES + group)[None, :]
        byte = tl.load(pool + at_scale, mask=shown[:, None], other=0)
        if E8M0:
            scale = (byte.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True)
        else:
            scale = e4m3_to_bf16(byte, PTX)
        scale = tl.broadcast_to(scale[:, :, None], (BK, GROUPS, BYTES))
        if FORM == E4M3_:
            values = times_bf16(e4m3_to_bf16(code, PTX), scale, PTX)
        else:
            unit = tl.full(code.shape, E2M1_UNIT, tl.float32).to(tl.bfloat16)
            low, high = e2m1_to_bf16(code, unit, PTX)
            values = tl.join(times_bf16(low, scale, PTX), times_bf16(high, scale, PTX))
        return tl.reshape(values, (BK, D))
