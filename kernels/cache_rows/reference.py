from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.quant_linear.reference import decode_e2m1, decode_e4m3, nibbles, scale_values

if TYPE_CHECKING:
    from kernels.cache_rows import RowFormat

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_LEAST_E4M3 = 1e-4  # smallest group maximum that counts
_LEAST_E2M1 = 6 * 2.0**-126
_LEAST_E4M3_SCALE = 2.0**-9
_BIAS = 127
_MANTISSA_BITS = 23


def encode_rows(values: torch.Tensor, form: RowFormat) -> torch.Tensor:
    plain = values[..., values.shape[-1] - form.plain :]
    groups = values[..., : values.shape[-1] - form.plain].float().unflatten(-1, (-1, form.group))
    scale_bytes = _scale_bytes(groups.abs().amax(-1), form)
    scaled = groups / _scales(scale_bytes, form)[..., None]
    if form.codes == "e4m3":
        codes = _e4m3_codes(scaled.clamp_(-_E4M3_MAX, _E4M3_MAX))
    else:
        codes = _e2m1_codes(scaled)
    codes = codes.flatten(-2)
    if form.codes == "e2m1":
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    parts = [codes, scale_bytes]
    if form.plain:
        parts.insert(1, plain.to(form.plain_type).contiguous().view(torch.uint8))
    if form.pad:
        parts.append(scale_bytes.new_zeros(*scale_bytes.shape[:-1], form.pad))
    return torch.cat(parts, dim=-1)


def decode_rows(rows: torch.Tensor, form: RowFormat) -> torch.Tensor:
    groups = (form.row_values(rows.shape[-1]) - form.plain) // form.group
    sizes = [form.plain_bytes, groups, form.pad]
    codes, plain, scale_bytes, _ = rows.split([rows.shape[-1] - sum(sizes), *sizes], dim=-1)
    if form.codes == "e4m3":
        decoded = decode_e4m3(codes.contiguous())
    else:
        decoded = decode_e2m1(nibbles(codes, "pairs"))
    grouped: torch.Tensor = decoded.unflatten(-1, (groups, form.group))
    values = (grouped * _scales(scale_bytes, form)[..., None]).flatten(-2)
    if not form.plain:
        return values
    return torch.cat([values, plain.contiguous().view(form.plain_type).float()], dim=-1)


def _scale_bytes(amax: torch.Tensor, form: RowFormat) -> torch.Tensor:
    if form.scale == "e4m3":
        return _e4m3_codes((amax / _E2M1_MAX).clamp(_LEAST_E4M3_SCALE, _E4M3_MAX))
    least, most = (_LEAST_E4M3, _E4M3_MAX) if form.codes == "e4m3" else (_LEAST_E2M1, _E2M1_MAX)
    # The release multiplies by the rounded reciprocal.
    return _ceil_exponent(amax.clamp_min(least) * torch.tensor(1.0 / most, dtype=torch.float32))


def _ceil_exponent(x: torch.Tensor) -> torch.Tensor:
    """Byte b with 2^(b - 127) the least power of two >= x, from the bits of normal fp32 x > 0."""
    bits = x.view(torch.int32)
    above = (bits & ((1 << _MANTISSA_BITS) - 1)) != 0
    return ((bits >> _MANTISSA_BITS) + above).clamp_(0, 2 * _BIAS).to(torch.uint8)


def _scales(scale_bytes: torch.Tensor, form: RowFormat) -> torch.Tensor:
    if form.scale == "e4m3":
        return decode_e4m3(scale_bytes.contiguous())
    return scale_values(scale_bytes)


def _e4m3_codes(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """s ee m of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; halfway to the even code."""
    magnitude = x.abs().clamp_max_(_E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    nearest = (magnitude / step).round_() * step  # torch rounds halves to even
    code = torch.where(
        nearest < 2, nearest * 2, torch.where(nearest < 4, nearest + 2, nearest / 2 + 4)
    )
    sign = torch.signbit(x).to(torch.uint8) << 3
    return code.to(torch.uint8) | sign
