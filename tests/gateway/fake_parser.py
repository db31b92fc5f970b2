"""A small streaming parser for the fake tokenizer: UTF-8, stop strings, reasoning, calls."""

from __future__ import annotations

import codecs

from warhorse.v1 import tokenizer_pb2 as pb

from tests.gateway.vocabulary import ARGUMENTS, CALL, END_CALL, END_THINK, EOS


class FakeParser:
    """State of one Parse stream."""

    def __init__(self, opening: pb.ParseOpen) -> None:
        self.stop = list(opening.stop)
        self.include_stop = opening.include_stop_str_in_output
        self.kind = "reasoning" if opening.start_state == pb.PARSE_STATE_REASONING else "content"
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in opening.prompt_tail[::4][-3:]:
            self.decoder.decode(bytes([byte]))
        self.held = ""
        self.name = ""
        self.calls = 0
        self.reasoning_tokens = 0
        self.matched: int | None = None
        self.deltas: list[pb.Delta] = []

    def push(self, tokens: list[int]) -> pb.ParseResponse:
        """The answer to one ParseTokens."""
        self.deltas = []
        answer = pb.ParseResponse()
        for used, token in enumerate(tokens, start=1):
            self._token(token)
            if self.matched is not None:
                answer.stop_matched, answer.tokens_used = self.matched, used
                break
        answer.deltas.extend(self.deltas)
        answer.reasoning_tokens = self.reasoning_tokens
        return answer

    def finish(self, reason: int) -> pb.ParseResponse:
        """The answer to ParseFinish."""
        self.deltas = []
        if self.matched is None:
            self._emit(self.held + self.decoder.decode(b"", final=True))
        if reason == pb.FINISH_REASON_STOP and self.calls:
            reason = pb.FINISH_REASON_TOOL_CALLS
        return pb.ParseResponse(
            deltas=self.deltas, finish_reason=reason, reasoning_tokens=self.reasoning_tokens
        )

    def _token(self, token: int) -> None:
        if token == END_THINK:
            self._flush("content")
        elif token == CALL:
            self._flush("name")
            self.name = ""
        elif token == ARGUMENTS:
            call = pb.ToolCallDelta(index=self.calls, id="ignored", name=self.name)
            self.deltas.append(pb.Delta(tool_call=call))
            self._flush("arguments")
        elif token == END_CALL:
            self._flush("content")
            self.calls += 1
        elif token != EOS:
            self.reasoning_tokens += self.kind == "reasoning"
            self._text(self.decoder.decode(bytes([token])))

    def _flush(self, kind: str) -> None:
        self._emit(self.held)
        self.held, self.kind = "", kind

    def _text(self, text: str) -> None:
        if self.kind == "name":
            self.name += text
            return
        self.held += text
        for i, stop in enumerate(self.stop):
            if stop in self.held:
                end = self.held.index(stop) + len(stop) * self.include_stop
                self._emit(self.held[:end])
                self.matched = i
                return
        keep = max((len(s) - 1 for s in self.stop), default=0)
        cut = max(0, len(self.held) - keep)
        self._emit(self.held[:cut])
        self.held = self.held[cut:]

    def _emit(self, text: str) -> None:
        if not text:
            return
        last = self.deltas[-1] if self.deltas else pb.Delta()
        if self.kind == "arguments":
            call = pb.ToolCallDelta(index=self.calls, arguments=text)
            self.deltas.append(pb.Delta(tool_call=call))
        elif last.HasField(self.kind):
            setattr(last, self.kind, getattr(last, self.kind) + text)
        else:
            self.deltas.append(pb.Delta(**{self.kind: text}))
