"""How many pages and slots each pool gets."""

from __future__ import annotations

import math

from services.engine.cache.spec import CacheGroup
from services.engine.config import CoreConfig


def least_unit(groups: tuple[CacheGroup, ...], unit_tokens: int) -> int:
    """The smallest multiple of `unit_tokens` that consists of whole pages of every group."""
    return math.lcm(unit_tokens, *(g.page_tokens for g in groups if g.kind != "state"))


def check_groups(groups: tuple[CacheGroup, ...], unit_tokens: int) -> None:
    """Raise ValueError where units do not consist of whole pages of every group."""
    if not any(g.kind == "paged" for g in groups):
        raise ValueError("the model has no paged cache group; the prefix index needs one")
    for g in groups:
        if g.kind != "state" and unit_tokens % g.page_tokens:
            raise ValueError(
                f"unit_tokens {unit_tokens} must be a multiple of page_tokens {g.page_tokens} "
                f"of cache group {g.name}"
            )


def sequence_need(group: CacheGroup, config: CoreConfig, tokens: int) -> int:
    """Most ids that one sequence of `tokens` tokens holds at once."""
    if group.kind == "state":
        return 2 + config.num_speculative_tokens
    if group.kind == "window":
        tokens = min(tokens, _window_span(group, config))
    return -(-tokens // group.page_tokens)


def pool_sizes(groups: tuple[CacheGroup, ...], config: CoreConfig) -> dict[str, int]:
    """Pages or slots of each pool.

    State and window pools hold every sequence at once and as many snapshots again, in at most
    half of the memory; the paged groups share the rest evenly by tokens. Raises ValueError where
    one sequence of max_model_len tokens does not fit.
    """
    sizes = _bounded_sizes(groups, config)
    rest = config.kv_cache_memory_bytes - sum(
        sizes[g.name] * g.page_bytes for g in _bounded(groups)
    )
    paged = [g for g in groups if g.kind == "paged"]
    token_bytes = sum(g.page_bytes / g.page_tokens for g in paged)
    tokens = config.num_kv_tokens or max(0, int(rest / token_bytes))
    sizes |= {g.name: tokens // g.page_tokens for g in paged}
    sizes |= _overrides(groups, config)
    for g in groups:
        need = sequence_need(g, config, config.max_model_len)
        if sizes[g.name] < need:
            raise ValueError(
                f"cache group {g.name} gets {sizes[g.name]} pages or slots and one sequence of "
                f"max_model_len {config.max_model_len} needs {need} of {g.page_bytes} bytes; "
                f"raise kv_cache_memory_bytes ({config.kv_cache_memory_bytes}) or lower "
                "max_model_len"
            )
    return sizes


def _bounded(groups: tuple[CacheGroup, ...]) -> list[CacheGroup]:
    return [g for g in groups if g.kind != "paged"]


def _bounded_sizes(groups: tuple[CacheGroup, ...], config: CoreConfig) -> dict[str, int]:
    wanted = {g.name: 2 * config.max_num_seqs * _held(g, config) for g in _bounded(groups)}
    total = sum(wanted[g.name] * g.page_bytes for g in _bounded(groups))
    share = min(1.0, config.kv_cache_memory_bytes / 2 / total) if total else 1.0
    sizes = {}
    for g in _bounded(groups):
        least = sequence_need(g, config, config.max_model_len)
        sizes[g.name] = max(least, int(wanted[g.name] * share))
        if g.kind == "state" and config.state_slots is not None:
            sizes[g.name] = config.state_slots
    return sizes


def _held(group: CacheGroup, config: CoreConfig) -> int:
    """Ids of a decoding sequence."""
    if group.kind == "state":
        return 1 + config.num_speculative_tokens
    span = group.window_tokens + 2 * config.unit_tokens
    return -(-min(span, config.max_model_len) // group.page_tokens)


def _window_span(group: CacheGroup, config: CoreConfig) -> int:
    """Tokens between the oldest page of a window and the end of a full step."""
    return group.window_tokens + config.max_num_batched_tokens + 2 * config.unit_tokens


def _overrides(groups: tuple[CacheGroup, ...], config: CoreConfig) -> dict[str, int]:
    unknown = set(config.pool_sizes) - {g.name for g in groups}
    if unknown:
        raise ValueError(f"pool_sizes names cache groups {sorted(unknown)} that the model lacks")
    return config.pool_sizes
