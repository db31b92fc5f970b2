"""Settings of the engine core. Names follow vLLM's flags where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits and sizes of one engine core.

    Pool sizes follow from `kv_cache_memory_bytes`, or from `num_kv_tokens` and `state_slots` where
    given (see `services.engine.cache.sizing`); `pool_sizes` overrides single pools by group name,
    in pages or slots. At least one sequence of `max_model_len` tokens must fit.
    """

    max_model_len: int
    model_fingerprint: str = ""  # part of every prefix hash
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    unit_tokens: int = 64  # prefix cache unit; a multiple of every group's page_tokens
    enable_prefix_caching: bool = True
    prefix_cache_retention_interval: int = 1024  # tokens between kept snapshots; 0 keeps none
    max_waiting_tokens: int = 1 << 20  # prompt tokens in the queue before QUEUE_FULL
    kv_cache_memory_bytes: int = 256 << 20
    num_kv_tokens: int | None = None  # capacity of the paged groups, tokens
    state_slots: int | None = None  # slots of each state group, snapshots included
    pool_sizes: dict[str, int] = field(default_factory=dict)
    seed: int = 0  # seeds requests that bring none, together with their id
    device: DeviceName = "cpu"
    num_speculative_tokens: int = 0  # most draft tokens of one step of one sequence
    max_logprobs: int = 20
    prompt_logprobs_chunk: int = 256  # most tokens of a step of a sequence with prompt_logprobs
    progress_seconds: float = 2.0  # between ProgressOut events of a prompt being computed
    lookup_timeout_seconds: float = 2.0  # a store that does not answer is a miss
    max_loads: int = 4  # external loads in flight
    max_stores: int = 16  # external store jobs in flight
    debug_poison: bool = False  # fill freed pages and slots with garbage
    debug_checks: bool = False  # check invariants after every step

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("prefix_cache_retention_interval", "num_speculative_tokens", "max_logprobs"):
            _require(self, name, getattr(self, name) >= 0, "at least 0")
        most = self.max_num_seqs * (1 + self.num_speculative_tokens)
        _require(
            self,
            "max_num_batched_tokens",
            self.max_num_batched_tokens >= most,
            f"at least max_num_seqs * (1 + num_speculative_tokens) = {most}",
        )
        interval = self.prefix_cache_retention_interval
        _require(
            self,
            "prefix_cache_retention_interval",
            interval % self.unit_tokens == 0,
            f"a multiple of unit_tokens = {self.unit_tokens}",
        )


_POSITIVE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "unit_tokens",
    "max_waiting_tokens",
    "kv_cache_memory_bytes",
    "prompt_logprobs_chunk",
    "max_loads",
    "max_stores",
)


def _require(config: CoreConfig, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {getattr(config, name)} and must be {expected}")
