"""Stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.stops import Piece, StopFilter


def run(
    texts: list[str], stops: list[str], *, include: bool = False
) -> tuple[str, int | None, int]:
    """Return the text let through, the stop that matched and the pieces that were needed."""
    guard = StopFilter(stops, include_stop=include)
    out = ""
    for count, text in enumerate(texts, start=1):
        out += "".join(piece.text for piece in guard.push(Piece(text)))
        if guard.matched is not None:
            return out, guard.matched, count
    return out + "".join(piece.text for piece in guard.flush()), None, len(texts)


def expected(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The first match by a search at every place, written independently of the automaton."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], stops.index(longest)
    return None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    size=st.integers(1, 6),
)
def test_match_equals_a_plain_search_for_every_cut(text: str, stops: list[str], size: int) -> None:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    out, matched, _ = run(parts, stops)
    want = expected(text, stops)
    assert (out, matched) == (want if want else (text, None))


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc", max_size=20), stop=st.text("ab", min_size=1, max_size=5))
def test_only_a_beginning_of_the_stop_is_held(text: str, stop: str) -> None:
    guard = StopFilter([stop], include_stop=False)
    out = ""
    for count, char in enumerate(text, start=1):
        out += "".join(piece.text for piece in guard.push(Piece(char)))
        if guard.matched is not None:
            return
        held = text[len(out) : count]
        assert stop.startswith(held)
        longer = [text[i:count] for i in range(len(out)) if stop.startswith(text[i:count])]
        assert not longer, "the longest beginning is what is held"


def test_match_across_pieces_is_trimmed() -> None:
    assert run(["hello wo", "r", "ld and"], ["world"]) == ("hello ", 0, 3)


def test_included_stop_ends_the_text() -> None:
    assert run(["a wor", "ld b"], ["world"], include=True) == ("a world", 0, 2)


def test_earliest_match_wins_over_the_order_of_the_list() -> None:
    assert run(["hello world"], ["world", "lo"]) == ("hel", 1, 1)


def test_text_is_released_when_it_cannot_become_a_stop() -> None:
    assert run(["a wor", "th"], ["world"]) == ("a worth", None, 2)


def test_special_token_is_never_given_out_in_part() -> None:
    guard = StopFilter(["_call>\nx"], include_stop=False)
    free = guard.push(Piece("a")) + guard.push(Piece("<tool_call>", special=True))
    assert [piece.text for piece in free] == ["a"]
    assert guard.push(Piece("\nx")) == []
    assert guard.matched == 0


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopFilter([""], include_stop=False)
