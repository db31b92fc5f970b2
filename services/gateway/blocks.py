"""The output of one choice as blocks that follow each other: reasoning, text, calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from services.gateway.events import CallArguments, CallOpened, Content, Piece, Reasoning


class BlockKind(Enum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block; `call_id` and `name` are those of a call, whose text is its arguments."""

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What the block holds so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """A block got more text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete."""

    block: Block


Change = Opened | Grown | Closed


class BlockList:
    """Turns pieces into blocks. At most one block is open at a time: the last one."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def feed(self, pieces: Iterable[Piece]) -> list[Change]:
        """What `pieces` change."""
        changes: list[Change] = []
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self._grow(BlockKind.REASONING, text, changes)
                case Content(text):
                    self._grow(BlockKind.TEXT, text, changes)
                case CallOpened(_, call_id, name):
                    self._begin(BlockKind.CALL, changes, call_id, name)
                case CallArguments(_, text):
                    self._grow(BlockKind.CALL, text, changes)
        return changes

    def close(self) -> list[Change]:
        """The output is complete."""
        if self._open is None:
            return []
        closed, self._open = self._open, None
        return [Closed(closed)]

    @property
    def has_calls(self) -> bool:
        """Whether the model called a tool."""
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    def _grow(self, kind: BlockKind, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind is not kind:
            self._begin(kind, changes)
        assert self._open is not None
        self._open.parts.append(text)
        changes.append(Grown(self._open, text))

    def _begin(
        self, kind: BlockKind, changes: list[Change], call_id: str = "", name: str = ""
    ) -> None:
        changes += self.close()
        self._open = Block(kind, len(self.blocks), call_id, name)
        self.blocks.append(self._open)
        changes.append(Opened(self._open))
