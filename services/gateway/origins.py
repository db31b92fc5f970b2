"""What fields of a chat request are called in the request that it was made from.

Responses and messages become chat requests. Their errors name the fields that the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import ServiceError
from services.gateway.body import validate
from services.gateway.errors import ApiError, to_api_error
from services.gateway.schema.chat import ChatRequest
from services.gateway.unsupported import CHAT

ORIGIN = "origin"  # the key under which converters leave the path of what they convert
_PATH = re.compile(r"messages(?P<message>\.\d+)?(?P<part>\.content\.\d+)?(?P<rest>\..+)?")
_IMAGE = re.compile(r"\.image_url(\.url)?(?=\.|$)")
_QUOTED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How one interface calls what a chat request holds.

    `messages` is its field for the conversation, `image` the one for the image of a part, `fields`
    has the other names that differ. `origins` has the paths of messages and of their parts.
    """

    messages: str
    image: str
    fields: Mapping[str, str]
    origins: Mapping[str, str] = field(default_factory=dict)

    def rename(self, error: ApiError) -> ApiError:
        """The error with the client's names in `param` and where its message quotes a field."""
        message = _QUOTED.sub(lambda quoted: f"`{self._name(quoted[1])}`", error.message)
        param = None if error.param is None else self._name(error.param)
        return ApiError(error.status, error.kind, message, param=param, headers=error.headers)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Errors that are raised inside have the client's names."""
        try:
            yield
        except (ApiError, ServiceError) as error:
            raise self.rename(to_api_error(error)) from error

    def _name(self, path: str) -> str:
        match = _PATH.fullmatch(path)
        if match is None:
            return self.fields.get(path, path)
        message = f"messages{match['message'] or ''}"
        rest = _IMAGE.sub(f".{self.image}", match["rest"] or "")
        if match["part"] and (found := self.origins.get(message + match["part"])):
            return found + rest
        if match["message"] and (found := self.origins.get(message)):
            return f"{found}.content" if match["part"] else found + rest
        return self.messages


def chat_of(fields: dict[str, Any], names: FieldNames) -> tuple[ChatRequest, FieldNames]:
    """The chat request of `fields`, and `names` with the origins of its messages.

    Raises ApiError 400 with the client's names.
    """
    found = FieldNames(names.messages, names.image, names.fields, take_origins(fields["messages"]))
    with found.applied():
        return validate(ChatRequest, fields, CHAT), found


def take_origins(messages: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Remove the origins that converters left; chat path -> path in the client's request."""
    found: dict[str, str] = {}
    for index, message in enumerate(messages):
        _take(message, f"messages.{index}", found)
        content = message.get("content")
        for position, part in enumerate(content if isinstance(content, list) else ()):
            _take(part, f"messages.{index}.content.{position}", found)
    return found


def _take(item: dict[str, Any], path: str, found: dict[str, str]) -> None:
    if (origin := item.pop(ORIGIN, None)) is not None:
        found[path] = origin
