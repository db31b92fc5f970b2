"""A checkpoint's tokenizer: text to ids without control tokens, ids to bytes."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_MARK = "\u2581"
# Vocabulary entries with a control token's text are renamed to this and their id: no text of a
# user can produce them, because the encoder is never given such a sequence as one word.
_UNREACHABLE = "\U0010fffe{}\U0010fffe"


class VocabularyError(Exception):
    """tokenizer.json is missing or is of a kind that is not served; the text names the file."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt: the text of exactly one control token, or ordinary text."""

    text: str
    is_special: bool


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside the trained vocabulary, as tokenizer.json describes it."""

    token_id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool

    @property
    def is_control(self) -> bool:
        """Whether text of users must not become this token: all but runs of white space."""
        return bool(self.text.strip())


def _byte_of_char() -> dict[str, int]:
    """Return the printable stand-ins of byte-level vocabularies (GPT-2's table), inverted.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


class Vocabulary:
    """Immutable after construction; safe to use from several threads.

    `bytes_of` and `text_of` are the tables of `detokenizer.TokenTable`.
    """

    def __init__(self, definition: dict[str, Any]) -> None:
        """definition: the parsed tokenizer.json.

        Raises VocabularyError for a kind that is not served.
        """
        added = (_added_token(entry) for entry in definition.get("added_tokens", []))
        self.added: dict[int, AddedToken] = {token.token_id: token for token in added}
        self.control: dict[str, int] = {
            token.text: token.token_id for token in self.added.values() if token.is_control
        }
        self._byte_level = _is_byte_level(definition)
        self._plain = _plain_tokenizer(definition, self.control)
        self._strips_first_space = not self._byte_level and "Strip" in json.dumps(
            definition.get("decoder")
        )
        self.bytes_of = self._byte_table(definition)
        self.text_of = [_whole_text(data) for data in self.bytes_of]
        self._splitter = self._control_pattern()
        self._prefix, self._suffix = self._special_frame()

    @classmethod
    def load(cls, file: Path) -> Vocabulary:
        """Read a tokenizer.json. Raises VocabularyError naming the file."""
        try:
            definition = json.loads(file.read_text(encoding="utf-8"))
            return cls(definition)
        except (OSError, ValueError, VocabularyError) as error:
            raise VocabularyError(f"{file}: {error}") from error
        except (AttributeError, KeyError, TypeError) as error:
            raise VocabularyError(f"{file}: not a tokenizer definition ({error!r})") from error

    @property
    def size(self) -> int:
        """Number of ids, the highest plus one."""
        return len(self.bytes_of)

    @property
    def special_ids(self) -> list[int]:
        """Ids of the tokens that are marked special, ascending."""
        return sorted(token.token_id for token in self.added.values() if token.special)

    def split(self, text: str) -> list[Segment]:
        """Split text at the control tokens in it, all of which are taken for real."""
        if self._splitter is None:
            return [Segment(text, False)] if text else []
        segments, start = [], 0
        for match in self._splitter.finditer(text):
            if match.start() > start:
                segments.append(Segment(text[start : match.start()], False))
            found = match.group()
            segments.append(Segment(found if found in self.control else found.strip(), True))
            start = match.end()
        if start < len(text):
            segments.append(Segment(text[start:], False))
        return segments

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text; control tokens in it are spelled out."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Return the ids of a prompt in parts."""
        ids: list[int] = []
        for segment in segments:
            if segment.is_special:
                ids.append(self.control[segment.text])
            else:
                ids += self.encode(segment.text)
        return ids

    def framed(self, ids: list[int]) -> list[int]:
        """Return ids with the tokens that the tokenizer puts around a text (BOS and the like)."""
        return [*self._prefix, *ids, *self._suffix]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of ids; invalid UTF-8 gives U+FFFD, unknown ids give nothing."""
        shown = (i for i in ids if not (skip_special and self.is_special(i)))
        data = b"".join(map(self.token_bytes, shown))
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for an id beyond the vocabulary."""
        return self.bytes_of[token_id] if token_id < self.size else b""

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is marked special."""
        token = self.added.get(token_id)
        return token is not None and token.special

    def _byte_table(self, definition: dict[str, Any]) -> list[bytes]:
        vocab = _trained_vocab(definition)
        size = max([*vocab.values(), *self.added], default=-1) + 1
        table = [b""] * size
        to_byte = _byte_of_char()
        for text, token_id in vocab.items():
            table[token_id] = _byte_level(text, to_byte) if self._byte_level else _fallback(text)
        for token in self.added.values():
            table[token.token_id] = token.text.encode()
        return table

    def _control_pattern(self) -> re.Pattern[str] | None:
        tokens = [token for token in self.added.values() if token.is_control]
        tokens.sort(key=lambda token: len(token.text), reverse=True)
        parts = [
            (r"\s*" if token.lstrip else "")
            + re.escape(token.text)
            + (r"\s*" if token.rstrip else "")
            for token in tokens
        ]
        return re.compile("|".join(parts)) if parts else None

    def _special_frame(self) -> tuple[list[int], list[int]]:
        bare = self._plain.encode("x", add_special_tokens=False).ids
        full = self._plain.encode("x", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise VocabularyError("its post-processor changes the tokens of the text")


def _added_token(entry: dict[str, Any]) -> AddedToken:
    return AddedToken(
        entry["id"],
        entry["content"],
        bool(entry.get("special")),
        bool(entry.get("lstrip")),
        bool(entry.get("rstrip")),
    )


def _trained_vocab(definition: dict[str, Any]) -> dict[str, int]:
    vocab = definition["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {entry[0]: index for index, entry in enumerate(vocab)}


def _is_byte_level(definition: dict[str, Any]) -> bool:
    decoder = json.dumps(definition.get("decoder"))
    if '"ByteLevel"' in decoder:
        return True
    if '"ByteFallback"' in decoder or definition["model"].get("byte_fallback"):
        return False
    raise VocabularyError("its decoder is neither byte-level nor byte-fallback")


def _byte_level(text: str, to_byte: dict[str, int]) -> bytes:
    try:
        return bytes(to_byte[char] for char in text)
    except KeyError:
        return text.encode()


def _fallback(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(_WORD_MARK, " ").encode()


def _whole_text(data: bytes) -> str | None:
    try:
        return codecs.utf_8_decode(data, "strict", True)[0]
    except UnicodeDecodeError:
        return None


def _plain_tokenizer(definition: dict[str, Any], control: dict[str, int]) -> Tokenizer:
    """Return a tokenizer that does not know the control tokens."""
    plain = dict(definition)
    plain["added_tokens"] = [
        entry for entry in definition.get("added_tokens", []) if entry["content"] not in control
    ]
    plain["model"] = _without(definition["model"], control)
    plain["truncation"] = plain["padding"] = None
    try:
        return Tokenizer.from_str(json.dumps(plain, ensure_ascii=False))
    except Exception as error:  # the library raises nothing more specific
        raise VocabularyError(f"not readable: {error}") from error


def _without(model: dict[str, Any], control: dict[str, int]) -> dict[str, Any]:
    """Return the model with control tokens' texts renamed, so that no merge can end in one."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        renamed: Any = {
            (_UNREACHABLE.format(i) if text in control else text): i for text, i in vocab.items()
        }
    else:
        renamed = [
            [_UNREACHABLE.format(i), *entry[1:]] if entry[0] in control else entry
            for i, entry in enumerate(vocab)
        ]
    return {**model, "vocab": renamed}
