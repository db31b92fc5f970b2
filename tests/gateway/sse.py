"""Reads server-sent events strictly: every byte must belong to a frame or a comment."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Frames:
    """The JSON frames of a stream, its comments, and whether it was closed by [DONE]."""

    frames: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def choices(self) -> list[dict[str, Any]]:
        """All choice objects in order."""
        return [choice for frame in self.frames for choice in frame.get("choices", ())]

    def joined(self, name: str, index: int = 0) -> str:
        """Concatenated delta text of one field of one choice."""
        deltas = [c["delta"] for c in self.choices if c["index"] == index]
        return "".join(delta.get(name) or "" for delta in deltas)

    def finish(self, index: int = 0) -> dict[str, Any]:
        """The only frame of a choice that has a finish reason; it must be the last one."""
        mine = [c for c in self.choices if c["index"] == index]
        assert [c["finish_reason"] is not None for c in mine] == [False] * (len(mine) - 1) + [True]
        return mine[-1]


def parse_frames(text: str) -> Frames:
    """Parse a whole stream."""
    result = Frames()
    assert text.endswith("\n\n"), text[-80:]
    for block in text[:-2].split("\n\n"):
        assert not result.done, f"data after [DONE]: {block}"
        if block.startswith(":"):
            result.comments.append(block)
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        if block == "data: [DONE]":
            result.done = True
        else:
            result.frames.append(json.loads(block[6:]))
    return result
