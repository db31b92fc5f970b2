"""Model cards of GET /v1/models."""

from __future__ import annotations

from typing import Any

from services.gateway.state import GatewayState

OWNER = "warhorse"


def cards(state: GatewayState, created: int) -> list[dict[str, Any]]:
    """One card per served name; empty until an engine was seen."""
    info = state.engines.info
    if info is None:
        return []
    root, room = info.model.name, info.model.max_model_len
    return [_card(name, root, room, created) for name in state.model_names]


def _card(name: str, root: str, room: int, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": root,
        "parent": None,
        "max_model_len": room,
        "context_length": room,
        "permission": [_permission(name, created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
