"""A frozen dataclass as the one description of a service's settings.

Each field `max_num_seqs` is a flag `--max-num-seqs`, an environment variable
`WARHORSE_MAX_NUM_SEQS` and, when neither is given, the field's default. The flag wins over the
variable. Supported types: str, int, float, bool, Path, Literal, tuple[str, ...] (comma separated)
and `X | None` ("none" or an empty value means None).

Field metadata: `help` (required for users to understand it), `min` and `max` (numbers, both
inclusive), `aliases` (further flag names, with their dashes).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Parser = Callable[[str], Any]

ENV_PREFIX = "WARHORSE_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class ConfigError(ValueError):
    """A setting has a value outside its range; the message names setting, value and range."""


def parse_config(
    cls: type[T], argv: Sequence[str] | None = None, *, prog: str, description: str
) -> T:
    """Build `cls` from flags, environment and defaults.

    `argv` None means the process's own arguments. A bad value, an unknown flag or a missing
    required setting ends the process with status 2 and a message on stderr, as does a ValueError
    from the dataclass's own checks.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    hints = type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    for field in fields:
        _add_flag(parser, field, hints[field.name])
    given = vars(parser.parse_args(argv))
    try:
        return cls(**_resolve(fields, hints, given, os.environ))
    except ValueError as error:
        return _fail(parser, error)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting as a reader of documentation sees it."""

    flag: str
    variable: str
    accepts: str  # in words
    default: str  # "required" where there is none
    text: str


def settings_of(cls: type[DataclassInstance]) -> list[Setting]:
    """Every setting of a configuration, in the order of its fields."""
    hints = type_hints(cls)
    return [
        Setting(
            flag=flag_name(field.name),
            variable=env_name(field.name),
            accepts=_range_text(field, hints[field.name]),
            default="required" if _is_required(field) else _default_words(field),
            text=field.metadata.get("help", ""),
        )
        for field in dataclasses.fields(cls)
        if field.init
    ]


def _fail(parser: argparse.ArgumentParser, error: ValueError) -> NoReturn:
    parser.error(str(error))


def flag_name(field_name: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + field_name.replace("_", "-")


def env_name(field_name: str) -> str:
    """`max_num_seqs` -> `WARHORSE_MAX_NUM_SEQS`."""
    return ENV_PREFIX + field_name.upper()


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    options["help"] = _help_text(field, hint)
    flags = [flag_name(field.name), *field.metadata.get("aliases", ())]
    if _without_none(hint)[0] is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["metavar"] = _range_text(field, hint)
    parser.add_argument(*flags, **options)


def _help_text(field: dataclasses.Field[Any], hint: Any) -> str:
    text = field.metadata.get("help", "")
    parts = [text, _default_text(field), f"[{env_name(field.name)}]"]
    return " ".join(part for part in parts if part).replace("%", "%%")


def _default_text(field: dataclasses.Field[Any]) -> str:
    return "(required)" if _is_required(field) else f"(default: {_default_words(field)})"


def _default_words(field: dataclasses.Field[Any]) -> str:
    value = _default(field)
    shown = ",".join(value) if isinstance(value, tuple) else value
    return str(shown) if shown != "" else "empty"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _resolve(
    fields: Sequence[dataclasses.Field[Any]],
    hints: Mapping[str, Any],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields:
        hint, variable = hints[field.name], env_name(field.name)
        if field.name in given:
            values[field.name] = _convert(field, hint, given[field.name], flag_name(field.name))
        elif environ.get(variable):  # compose files pass empty values for unset ones
            values[field.name] = _convert(field, hint, environ[variable], variable)
        elif _is_required(field):
            raise ConfigError(f"{flag_name(field.name)} (or {variable}) is required")
    return values


def _convert(field: dataclasses.Field[Any], hint: Any, raw: str | bool, source: str) -> Any:
    if isinstance(raw, bool):
        return raw
    inner, optional = _without_none(hint)
    if optional and raw.strip().lower() in ("", "none"):
        return None
    try:
        value = _parser_of(inner)(raw)
    except ValueError:
        raise ConfigError(f"{source}={raw!r} is not {_range_text(field, hint)}") from None
    low, high = field.metadata.get("min", -math.inf), field.metadata.get("max", math.inf)
    if isinstance(value, int | float) and not low <= value <= high:
        raise ConfigError(f"{source}={raw!r} is not {_range_text(field, hint)}")
    return value


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); anything else -> (hint, False)."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [part for part in get_args(hint) if part is not types.NoneType]
        if len(inner) == 1 and len(get_args(hint)) == 2:
            return inner[0], True
        raise TypeError(f"unsupported setting type {hint}")
    return hint, False


def _parser_of(hint: Any) -> Parser:
    simple: dict[Any, Parser] = {str: str, int: int, float: _finite, bool: _boolean, Path: _path}
    if hint in simple:
        return simple[hint]
    if get_origin(hint) is Literal:
        return lambda raw: _choice(raw, get_args(hint))
    if hint == tuple[str, ...]:
        return _names
    raise TypeError(f"unsupported setting type {hint}")


def _finite(raw: str) -> float:
    value = float(raw)
    if not math.isfinite(value):
        raise ValueError(raw)
    return value


def _boolean(raw: str) -> bool:
    word = raw.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(raw)
    return word in _TRUE


def _path(raw: str) -> Path:
    if not raw:
        raise ValueError(raw)
    return Path(raw).expanduser()


def _choice(raw: str, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if raw == str(choice):
            return choice
    raise ValueError(raw)


def _names(raw: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in raw.split(",") if part.strip())


def _range_text(field: dataclasses.Field[Any], hint: Any) -> str:
    """What a setting accepts, in words: `an integer from 1 to 4096`."""
    inner, optional = _without_none(hint)
    if get_origin(inner) is Literal:
        text = "one of " + ", ".join(str(choice) for choice in get_args(inner))
    else:
        words = {int: "an integer", float: "a number", bool: "true or false", Path: "a path"}
        text = words.get(inner, "a text" if inner is str else "a comma separated list")
    low, high = field.metadata.get("min"), field.metadata.get("max")
    if low is not None and high is not None:
        text += f" from {low} to {high}"
    elif low is not None or high is not None:
        text += f" of at least {low}" if low is not None else f" of at most {high}"
    return text + (" or none" if optional else "")
