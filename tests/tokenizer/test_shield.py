"""User text and control tokens in rendered prompts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.rendering.shield import Shield, ShieldExhaustedError, strings_in
from services.tokenizer.rendering.worker import answer
from services.tokenizer.vocabulary import Segment
from tests.tokenizer.support import MARKUP, SPECIAL, THINK, reference, vocabulary

CONTROL = (*SPECIAL, *MARKUP, *THINK)
PRIVATE = st.sampled_from(["\U0010fffd", "\U0010fffc", "\U00100000", "\ue000", "\U000f0000"])
TEXT = st.lists(
    st.one_of(
        st.sampled_from(CONTROL),
        st.sampled_from(["<|im_", "end|>", "<", ">", "think", "/think", "im_start", "|>", "<|"]),
        st.text(max_size=5),
        PRIVATE,
        st.sampled_from([" ", "\n"]),
    ),
    max_size=6,
).map("".join)

TEMPLATE = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content | trim }}{% else -%}
{%- for part in m.content %}{{ part.text }}{% endfor %}{% endif -%}
<|im_end|>
{{ m.extra | tojson }}<{{ m.name }}><|{{ m.name }}|>{{ m.name }}<|im_{{ m.last }}
{%- endfor -%}
<think>"""
OWN = ["<|im_start|>", "<|im_end|>"]


def rendered(messages: list[dict[str, object]]) -> list[Segment]:
    """The segments of the template above."""
    context = {"messages": messages}
    shield = Shield(vocabulary().control, strings_in(context))
    reply = answer({"template": TEMPLATE, "context": shield.value(context)}, 10**6)
    return [
        segment if segment.is_special else Segment(shield.restore(segment.text), False)
        for segment in vocabulary().split(reply["text"])
    ]


@settings(max_examples=300, deadline=None)
@given(
    content=TEXT | st.lists(TEXT, max_size=3),
    extra=TEXT,
    name=TEXT | st.sampled_from(["think", "/think", "im_start", "im_end", "tool_call", " think"]),
    last=TEXT | st.sampled_from(["end|>", "start|>", "end|", "end"]),
)
def test_only_the_template_writes_control_tokens(
    content: str | list[str], extra: str, name: str, last: str
) -> None:
    shown = content if isinstance(content, str) else [{"text": text} for text in content]
    message = {"role": "user", "content": shown, "extra": {extra: [extra]}, "name": name}
    segments = rendered([{**message, "last": last}])
    assert [s.text for s in segments if s.is_special] == [*OWN, "<think>"]
    ids = vocabulary().encode_segments(segments)
    assert sum(i in vocabulary().added for i in ids) == 3
    text = content.strip() if isinstance(content, str) else "".join(content)
    expected = (
        f"<|im_start|>user\n{text}<|im_end|>\n{json.dumps({extra: [extra]}, ensure_ascii=False)}"
        f"<{name}><|{name}|>{name}<|im_{last}<think>"
    )
    assert "".join(s.text for s in segments) == expected


@settings(max_examples=100, deadline=None)
@given(content=st.text("ab \né字🐴.", max_size=20))
def test_without_control_texts_the_prompt_equals_the_plain_encoding(content: str) -> None:
    message = {"role": "user", "content": content, "extra": 1, "name": "n", "last": ""}
    segments = rendered([message])
    whole = "".join(segment.text for segment in segments)
    library = reference().encode(whole, add_special_tokens=False).ids
    assert vocabulary().encode_segments(segments) == library


def test_values_that_are_no_text_stay_as_they_are() -> None:
    shield = Shield(CONTROL, [])
    value = {"a": 1, "b": [1.5, None, True], "type": "object"}
    assert shield.value(value) == value


def test_conversation_with_every_private_character_is_refused() -> None:
    codes = [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]
    with pytest.raises(ShieldExhaustedError):
        Shield(CONTROL, ["".join(map(chr, codes))])
