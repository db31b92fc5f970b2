"""Sampling as DeepSeek's own interface resolves it, for deployments that ask for it."""

from __future__ import annotations

from warhorse.v1 import engine_pb2

V4, V41 = "deepseek_v4", "deepseek_v41"
THINKING_TEMPERATURE = 1.0
LEAST_TOP_P = 0.95


def follow_deepseek(
    params: engine_pb2.SamplingParams,
    requested_top_p: float | None,
    *,
    family: str,
    thinks: bool,
    has_tools: bool,
) -> None:
    """Set temperature and top_p as deepseek-recipe 0.2.0 does; other families stay as they are.

    `thinks`: the output begins inside reasoning.
    """
    if family not in (V4, V41):
        return
    if thinks:
        params.temperature = THINKING_TEMPERATURE
    if family == V4 and thinks:
        params.top_p = LEAST_TOP_P if has_tools else 1.0
    elif family == V41:
        wanted = 1.0 if requested_top_p is None else requested_top_p
        params.top_p = max(wanted, LEAST_TOP_P) if thinks else 1.0
