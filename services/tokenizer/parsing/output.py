"""Collects deltas and applies the newline rule of all families.

Only runs of newlines are stripped, at four places: start and end of the reasoning, start of the
content behind the reasoning, end of the content in front of a call. White space between calls and
behind the last one is dropped when nothing else follows.
"""

from __future__ import annotations

from services.tokenizer.parsing.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta


class Output:
    """Deltas of one choice. Owned by its parser."""

    def __init__(self, *, strip_reasoning: bool) -> None:
        """strip_reasoning: the reasoning begins here, so that its first newlines are dropped."""
        self._deltas: list[Delta] = []
        self._strip_reasoning = strip_reasoning
        self._strip_content = False
        self._reasoning_newlines = 0
        self._content_newlines = 0
        # White space behind a call, which counts only if text follows; None elsewhere.
        self._behind_call: list[str] | None = None
        self.has_content = False
        self.calls = 0

    def take(self) -> list[Delta]:
        """Return the deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def reasoning(self, text: str) -> None:
        """Add reasoning text."""
        if self._strip_reasoning:
            text = text.lstrip("\n")
            if not text:
                return
            self._strip_reasoning = False
        body = text.rstrip("\n")
        if body:
            self._add_reasoning("\n" * self._reasoning_newlines + body)
            self._reasoning_newlines = 0
        self._reasoning_newlines += len(text) - len(body)

    def end_reasoning(self) -> None:
        """The reasoning is closed; the newlines at its end are dropped."""
        self._reasoning_newlines = 0
        self._strip_reasoning = True
        self._strip_content = not self.has_content

    def content(self, text: str) -> None:
        """Add content text."""
        if self._behind_call is not None:
            self._behind_call.append(text)
            if text.isspace():
                return
            text, self._behind_call = "".join(self._behind_call), None
        if self._strip_content:
            text = text.lstrip("\n")
            if not text:
                return
            self._strip_content = False
        body = text.rstrip("\n")
        if body:
            self._add_content("\n" * self._content_newlines + body)
            self._content_newlines = 0
        self._content_newlines += len(text) - len(body)

    def before_block(self) -> None:
        """A tool block opens: newlines in front of it are dropped."""
        self._content_newlines = 0
        self._behind_call = None

    def after_block(self) -> None:
        """A tool block or call is closed: white space is kept only in front of more text."""
        self._behind_call = []
        self._strip_content = self._strip_content or not self.has_content

    def open_call(self, call_id: str, name: str) -> int:
        """Announce a call; return its index."""
        index, self.calls = self.calls, self.calls + 1
        self._deltas.append(CallDelta(index, id=call_id, name=name))
        return index

    def arguments(self, index: int, text: str) -> None:
        """Add JSON text to the arguments of a call."""
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, CallDelta) and last.index == index and not last.name:
            last.arguments += text
        else:
            self._deltas.append(CallDelta(index, arguments=text))

    def end(self) -> None:
        """The generation is over: newlines held at the end of the content are part of it."""
        if self._content_newlines:
            self._add_content("\n" * self._content_newlines)
            self._content_newlines = 0

    def _add_reasoning(self, text: str) -> None:
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, ReasoningDelta):
            last.text += text
        else:
            self._deltas.append(ReasoningDelta(text))

    def _add_content(self, text: str) -> None:
        self.has_content = True
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, ContentDelta):
            last.text += text
        else:
            self._deltas.append(ContentDelta(text))
