"""Ids of requests and of the served model."""

from __future__ import annotations

import re
import secrets
import uuid

from services.gateway.sampling import ModelFacts

_USABLE = re.compile(r"[\x21-\x7e]{1,256}")


def request_id(header: str | None, body: str | None) -> str:
    """The client's id, its header first; else, or when it is unusable, a fresh one."""
    for given in (header, body):
        if given and _USABLE.fullmatch(given):
            return given
    return uuid.uuid4().hex


def engine_request_id(public: str) -> str:
    """An id that is unique even when a client uses `public` twice at a time.

    At most 240 characters of `public` are kept: engines take ids of up to 256.
    """
    return f"{public[:240]}-{secrets.token_hex(4)}"


def public_request_id(engine_id: str) -> str:
    """What `engine_request_id` was made from, as far as it was kept."""
    return engine_id.rpartition("-")[0]


def fingerprint(facts: ModelFacts) -> str:
    """`system_fingerprint`: changes with the weights."""
    return "fp_" + facts.fingerprint[:12] if facts.fingerprint else "fp_unknown"
