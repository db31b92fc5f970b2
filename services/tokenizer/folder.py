"""The files of a checkpoint folder that the tokenizer service reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import StartupError
from services.tokenizer.families import Family, family_of
from services.tokenizer.images.rules import ImageRules, rules_of
from services.tokenizer.rendering.deepseek import Dialect
from services.tokenizer.vocabulary import Vocabulary, VocabularyError

_TOKEN_VARIABLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SAMPLING_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """A checkpoint as far as text is concerned. Immutable.

    config: config.json. template: text of the chat template; None when there is none, not even a
    built-in one. template_source: where it is from. dialect: of prompts that are written without a
    template.
    max_model_len: longest prompt plus output in tokens, 0 when the files do not say. vocab_rows:
    ids of the model, of which those beyond the vocabulary have no text. images: None when the model
    takes none.
    """

    name: str
    family: Family
    vocabulary: Vocabulary
    tokenizer_sha256: str
    template: str | None
    template_is_own: bool
    template_variables: dict[str, str]
    generation_config: str
    stop_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_rows: int
    images: ImageRules | None = None
    path: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)
    template_source: str = ""
    dialect: Dialect | None = None

    @classmethod
    def open(cls, folder: Path, template_file: Path | None = None) -> TokenizerFolder:
        """Read a folder. Raises StartupError naming the file at fault.

        template_file: a chat template that replaces the checkpoint's format.
        """
        config = _json_object(folder / "config.json", required=True)
        settings = _json_object(folder / "tokenizer_config.json")
        generation = _generation(folder / "generation_config.json")
        family = family_of(_model_type(config))
        vocabulary = _vocabulary(folder / "tokenizer.json")
        own = _template(folder, settings, template_file)
        text_config = config.get("text_config", config)
        return cls(
            name=folder.resolve().name,
            family=family,
            vocabulary=vocabulary,
            tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
            template=own[0] if own else family.template(),
            template_is_own=own is not None,
            template_source=own[1] if own else f"the built-in template of {family.name}",
            dialect=None if template_file else family.dialect,
            path=folder,
            config=config,
            template_variables=_template_variables(settings),
            generation_config=json.dumps(generation) if generation else "",
            stop_token_ids=_stop_ids(vocabulary, family, generation, text_config, settings),
            max_model_len=int(text_config.get("max_position_embeddings") or 0),
            vocab_rows=max(vocabulary.size, int(text_config.get("vocab_size") or 0)),
            images=rules_of(config, _json_object(folder / "preprocessor_config.json"), vocabulary),
        )


def _json_object(file: Path, *, required: bool = False) -> dict[str, Any]:
    if not file.exists() and not required:
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{file}: not a JSON object")
    return value


def _generation(file: Path) -> dict[str, Any]:
    """The sampling defaults. Each request without its own would fail on a wrong one."""
    values = _json_object(file)
    for name in _SAMPLING_NUMBERS:
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise StartupError(f"{file}: {name} is {value!r}, expected a number")
    stops = values.get("eos_token_id")
    for token in stops if isinstance(stops, list) else [stops]:
        if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
            raise StartupError(f"{file}: eos_token_id holds {token!r}, expected token ids")
    return values


def _model_type(config: dict[str, Any]) -> str:
    inner = config.get("text_config") or {}
    return str(config.get("model_type") or inner.get("model_type") or "")


def _vocabulary(file: Path) -> Vocabulary:
    try:
        return Vocabulary.load(file)
    except VocabularyError as error:
        raise StartupError(str(error)) from error


def _template(folder: Path, settings: dict[str, Any], given: Path | None) -> tuple[str, str] | None:
    """Return the chat template and its file: the given one, or the folder's own."""
    file = given or folder / "chat_template.jinja"
    if given or file.exists():
        try:
            return file.read_text("utf-8"), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"{file}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    if not isinstance(template, str) or not template:
        return None
    return template, f"chat_template of {folder / 'tokenizer_config.json'}"


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template_variables(settings: dict[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(settings.get(name)) for name in _TOKEN_VARIABLES}
    return {name: text for name, text in texts.items() if text is not None}


def _stop_ids(
    vocabulary: Vocabulary,
    family: Family,
    generation: dict[str, Any],
    config: dict[str, Any],
    settings: dict[str, Any],
) -> tuple[int, ...]:
    """Return the ids that end an output, most specific source first, without repetition."""
    found: list[int] = []
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    found += given if isinstance(given, list) else [given] if given is not None else []
    texts = (*family.turn_ends, _token_text(settings.get("eos_token")))
    found += [vocabulary.control[text] for text in texts if text in vocabulary.control]
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))
