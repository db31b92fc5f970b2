"""What becomes of reasoning on its way to the client."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.events import Content, Piece, Reasoning


@dataclass(slots=True)
class ReasoningPolicy:
    """Drops, merges or delays the reasoning of one choice.

    `include` False drops it; `separate` False turns it into content; `hold` True keeps it until
    it is complete.
    """

    include: bool = True
    separate: bool = True
    hold: bool = False
    _held: list[str] = field(default_factory=list)

    @property
    def changes_nothing(self) -> bool:
        """Whether pieces may pass untouched."""
        return self.include and self.separate and not self.hold

    def apply(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces to pass on now."""
        if self.changes_nothing:
            return pieces
        passed: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, Reasoning):
                passed.extend(self.flush())
                passed.append(piece)
            elif self.include:
                self._add(piece, passed)
        return passed

    def _add(self, piece: Reasoning, passed: list[Piece]) -> None:
        if self.hold:
            self._held.append(piece.text)
        else:
            passed.append(self._shaped(piece.text))

    def flush(self) -> list[Piece]:
        """What was kept; called at the end of the choice."""
        if not self._held:
            return []
        text = "".join(self._held)
        self._held.clear()
        return [self._shaped(text)]

    def _shaped(self, text: str) -> Piece:
        return Reasoning(text) if self.separate else Content(text)
