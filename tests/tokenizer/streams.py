"""Streams of all families for property tests: well-formed ones, and the pieces of noise."""

from __future__ import annotations

from collections.abc import Sequence

from services.tokenizer.parsing.dsml import MARK
from tests.tokenizer.support import FORMATS

Call = tuple[str, Sequence[tuple[str, str]]]

_DSML_NOISE = (
    *(MARK, "<", "</", f"<{MARK}", f"</{MARK}", "tool_calls>", "invoke", ' name="f"', ">", "/>"),
    *(f"<{MARK}tool_calls>", f"</{MARK}tool_calls>", f"<{MARK} calls>\n", f"</{MARK} calls>"),
    *(f'<{MARK}invoke name="f">', f'<{MARK} invoke name="now">\n', f'<{MARK}invoke name="g"/>'),
    *(f"</{MARK}invoke>", f"</{MARK} invoke>", f"<{MARK}toolcalls>", f"<{MARK}invoke nam='"),
    *(f'<{MARK}parameter name="a" string="true">', f'<{MARK}parameter name="n" string="false">'),
    *(f'<{MARK}parameter name="u">', f"</{MARK}parameter>", f'<{MARK}parameter name="arguments">'),
    *('{"a": "q"}', '{"k": 1}', '"s"', "7"),
)
_GLM_NOISE = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_call>f", "<tool_call>now", "<tool_call>", "</tool_call>", "<arg_value>", "f", "now"),
    *("<arg_key>a</arg_key><arg_value>", "<arg_key>n</arg_key>\n<arg_value>", "get_weathercity"),
    *("a", "n", "get_weather", "<arg_", "</tool_c", "[1, 2]", "True"),
)
_QWEN_NOISE = (
    *("<tool_call>", "</tool_call>", "<tool_call>\n<function=f>\n", "<function=f>", "<function="),
    *("<function=now>", "<parameter=a>", "<parameter=n>", "<parameter=u>", "\n<parameter=a>\n"),
    *("</parameter>", "</function>", "\n</function>\n", "< / parameter >", "</func", "12"),
)
_SHARED_NOISE = ("<think>", "</think>", "<thi", "\n", "\n\n", " ", "null", "word", "é字🐴", '"\\')
NOISE = {
    "dsv4": (*_DSML_NOISE, *_SHARED_NOISE),
    "glm": (*_GLM_NOISE, *_SHARED_NOISE),
    "qwen": (*_QWEN_NOISE, *_SHARED_NOISE),
}


def written(family: str, calls: Sequence[Call]) -> str:
    """Calls as a model of the family writes them; all values are strings."""
    if family in ("dsv4", "dsv41"):
        return _dsml(calls, " " if family == "dsv41" else "")
    return "".join(_glm(*call) if family == "glm" else _qwen(*call) for call in calls)


def _dsml(calls: Sequence[Call], lead: str) -> str:
    if not calls:
        return ""
    block = "calls" if lead else "tool_calls"
    lines = [f"<{MARK}{lead}{block}>"]
    for name, values in calls:
        lines.append(f'<{MARK}{lead}invoke name="{name}">')
        for key, value in values:
            opening = f'<{MARK}{lead}parameter name="{key}" string="true">'
            lines.append(f"{opening}{value}</{MARK}{lead}parameter>")
        lines.append(f"</{MARK}{lead}invoke>")
    return "\n".join([*lines, f"</{MARK}{lead}{block}>"])


def _glm(name: str, values: Sequence[tuple[str, str]]) -> str:
    pairs = (f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in values)
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


def _qwen(name: str, values: Sequence[tuple[str, str]]) -> str:
    pairs = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values)
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>\n"


def partition(text: str, family: str, cuts: Sequence[int]) -> list[str]:
    """Special tokens whole, the text between them cut at the given lengths in turn."""
    form = FORMATS[family]
    out: list[str] = []
    turn = 0
    for piece in form.split.split(text):
        if piece in form.structural or piece in form.ends:
            out.append(piece)
            continue
        while piece:
            size = cuts[turn % len(cuts)]
            turn += 1
            out.append(piece[:size])
            piece = piece[size:]
    return out


def flat_partition(text: str, cuts: Sequence[int]) -> list[str]:
    """Text cut at the given lengths in turn, markers and all."""
    out, start, turn = [], 0, 0
    while start < len(text):
        out.append(text[start : start + cuts[turn % len(cuts)]])
        start += len(out[-1])
        turn += 1
    return out
