"""The `usage` object of responses."""

from __future__ import annotations

from typing import Any

from services.gateway.events import Usage


def usage_body(usage: Usage, *, reasoning: bool) -> dict[str, Any]:
    """Counts in the names of the OpenAI interface and of those derived from it.

    `reasoning` says whether the endpoint knows reasoning tokens at all.
    """
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "prompt_cache_hit_tokens": usage.cached,
        "prompt_cache_miss_tokens": usage.prompt - usage.cached,
    }
    if usage.images:
        body["prompt_tokens_details"]["multimodal_tokens"] = usage.images
    if reasoning:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
        body["reasoning_tokens"] = usage.reasoning
    return body
