"""The `usage` object of responses."""

from __future__ import annotations

from typing import Any

from services.gateway.events import Usage


def usage_body(usage: Usage, *, reasoning: bool, details: bool = True) -> dict[str, Any]:
    """Counts in the names of the OpenAI interface and of those derived from it.

    `reasoning` says whether the endpoint knows reasoning tokens at all, `details` whether what
    prompts consist of is told.
    """
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
    if details:
        body |= _prompt_details(usage)
    if reasoning:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
        body["reasoning_tokens"] = usage.reasoning
    return body


def _prompt_details(usage: Usage) -> dict[str, Any]:
    details: dict[str, Any] = {
        "cached_tokens": usage.cached,
        "created_cache_tokens": usage.created,
    }
    if usage.images:
        details["multimodal_tokens"] = {"image": usage.images}
    return {
        "prompt_tokens_details": details,
        "prompt_cache_hit_tokens": usage.cached,
        "prompt_cache_miss_tokens": usage.prompt - usage.cached,
    }
