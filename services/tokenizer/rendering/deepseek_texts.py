"""The instruction texts of the DeepSeek formats, which are model data and not ours.

They are cut out of prompts that DeepSeek's own package `deepseek-recipe` renders, and checked
against known digests, so that a prompt never holds a text that a model was not trained with. The
effort texts of a Preview checkpoint come from its own encoder file, which is read and never run.
"""

from __future__ import annotations

import ast
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.common.errors import StartupError

ENCODER_FILE = Path("encoding") / "encoding_dsv4.py"
PROFILES = ("official", "preview")
_PROFILE_KEY = "dsv4_reasoning_effort_profile"
_MAX_ENCODER_BYTES = 1 << 20
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"

# SHA-256 of the texts, substitutions written as {{NAME}}.
_DIGESTS = {
    "v4 tools": "4ee7f2ed322661740a383a505e43ddc260c6e1e66d0252ba225875b38d6bec8c",
    "v41 tools": "82ee68b67ee32b6282a8d67faeedd3c86f1fcf215b99ebab2e84eded4b3fc42d",
    "v4 high": "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
    "v4 max": "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
    "v41 effort": "15b91dcb6c0b3a7bf2113e0dfaa6228c9bba7833b9d1fd0760c7d1c46cc4a5ef",
    "response format": "780b5eaf6abec6fa1a8e7a855a9a60fc148c4ade1f2a1c69c2c61302a5682e4d",
    "v4 json object": "a786ffd2d77d3105d22f8107d57b02766476a65a63fb1e7d8c70c95ec164929c",
}

_SUBSTITUTIONS = {
    "v4 tools": "{{SCHEMAS}}",
    "v41 tools": "{{SCHEMAS}}",
    "v41 effort": "{{N}}",
    "response format": "{{SCHEMA}}",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeepSeekTexts:
    """Texts with the character U+FFFC where something is put in.

    tools: around the schemas. effort: around the number (V4.1; empty in V4). efforts: by level
    "low", "high" and "max" (V4). response_format: around the schema. json_object: empty where the
    format has no text of its own for it.
    """

    tools: str
    response_format: str
    json_object: str = ""
    effort: str = ""
    efforts: Mapping[str, str] | None = None

    @staticmethod
    def filled(text: str, value: str) -> tuple[str, str, str]:
        """Return a text in three parts: before the value, the value, behind it."""
        before, _, behind = text.partition(_MARK)
        return before, value, behind


def v4_texts(folder: Path | None, config: Mapping[str, Any]) -> DeepSeekTexts:
    """Return the texts of a V4 checkpoint.

    folder: where its encoder file may be. Raises StartupError.
    """
    texts = _recipe_v4()
    source = _encoder(folder) if folder else None
    profile = _profile(config, source)
    logger.info("reasoning effort texts: profile %s", profile)
    if profile == "official":
        return texts
    assert texts.efforts is not None
    own = (source or {}).get("REASONING_EFFORT_MAX")
    text = own.rstrip("\n") + "\n\n" if isinstance(own, str) and own else texts.efforts["high"]
    return replace(texts, efforts={"low": "", "high": "", "max": text})


def _profile(config: Mapping[str, Any], source: Mapping[str, Any] | None) -> str:
    """Return which efforts have a text: what the configuration says, else what the encoder file
    shows, else the official form."""
    given = config.get(_PROFILE_KEY)
    if given is not None:
        if given not in PROFILES:
            known = " or ".join(PROFILES)
            raise StartupError(f"config.json: {_PROFILE_KEY} is {given!r}, expected {known}")
        return str(given)
    if source is None:
        return "official"
    tables = [value for value in source.values() if isinstance(value, dict)]
    complete = any({"low", "high", "max"} <= table.keys() for table in tables)
    official = source.get("DEFAULT_REASONING_EFFORT") == "low" and complete
    return "official" if official and "REASONING_EFFORT_MAX" not in source else "preview"


def _encoder(folder: Path) -> dict[str, Any] | None:
    """Return the constants of a checkpoint's encoder file; none when it cannot be read, None when
    there is no such file."""
    file = folder / ENCODER_FILE
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > _MAX_ENCODER_BYTES:
            raise ValueError(f"longer than {_MAX_ENCODER_BYTES} bytes")
        tree = ast.parse(file.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        logger.warning("%s is not readable (%s); it counts as a Preview encoder", file, error)
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if names:
            found.update(dict.fromkeys(names, _constant(getattr(node, "value", None))))
    return found


def _constant(node: Any) -> Any:
    """Return a text, or a table by its text keys; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        return dict.fromkeys(keys)
    return None


def _recipe() -> Any:
    try:
        import deepseek_recipe
    except ImportError as error:
        raise StartupError(
            "DeepSeek checkpoints need the package deepseek-recipe, which holds the texts of their "
            f"chat format: pip install deepseek-recipe==0.2.0 ({error})"
        ) from error
    return deepseek_recipe


def _recipe_v4() -> DeepSeekTexts:
    recipe = _recipe()
    cut = _Cutter(recipe, recipe.DeepseekV4Encoding())
    efforts = {level: cut.front(reasoning_effort=level) for level in ("low", "high", "max")}
    for level in ("high", "max"):
        _check(f"v4 {level}", efforts[level])
    return DeepSeekTexts(
        tools=_check_part("v4 tools", cut.tools()),
        response_format=_check_part("response format", cut.format()),
        json_object=_check_part("v4 json object", cut.front(response_format="json_object")),
        efforts=efforts,
    )


def v41_texts() -> DeepSeekTexts:
    """Return the texts of a V4.1 checkpoint. Raises StartupError."""
    recipe = _recipe()
    cut = _Cutter(recipe, recipe.DeepseekV41Encoding())
    lead = recipe.SpecialToken.System.default_str()
    line = cut.front(reasoning_effort="high").removeprefix(lead).replace("75", _MARK, 1)
    _check_part("v41 effort", line)
    return DeepSeekTexts(
        tools=_check_part("v41 tools", cut.tools().removeprefix(lead)),
        response_format=_check_part("response format", cut.format().removeprefix(lead)),
        effort=line,
    )


class _Cutter:
    """Renders conversations of one user message and returns what is in front of it."""

    def __init__(self, recipe: Any, encoding: Any) -> None:
        self._recipe = recipe
        self._encoding = encoding
        self._bos = recipe.SpecialToken.Bos.default_str()
        self._user = recipe.SpecialToken.User.default_str()

    def front(self, **settings: Any) -> str:
        """What settings put in front of the user's message."""
        thinking = "reasoning_effort" in settings
        message = self._recipe.UserMessage("x")
        conversation = self._recipe.Conversation([message], thinking_mode=thinking, **settings)
        prompt: str = self._encoding.render_conversation(conversation).prompt
        front, found, _ = prompt.removeprefix(self._bos).partition(self._user)
        if not found:
            raise StartupError("deepseek-recipe renders an unknown layout")
        return front

    def tools(self) -> str:
        """The section about tools around the schemas."""
        tool = self._recipe.ToolDefinition(_MARK, "", {})
        shown = f'{{"name": "{_MARK}", "description": "", "parameters": {{}}}}'
        return self.front(tools=[tool]).replace(shown, _MARK)

    def format(self) -> str:
        """The section about the form of the answer around the schema."""
        return self.front(response_schema={_MARK: 0}).replace(f'{{"{_MARK}": 0}}', _MARK)


def _check(name: str, text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != _DIGESTS[name]:
        raise StartupError(
            f"deepseek-recipe gives another text for {name} than the models were trained with; "
            "install deepseek-recipe==0.2.0"
        )
    return text


def _check_part(name: str, text: str) -> str:
    """Check a text whose digest is that of its lines without the newlines in front."""
    _check(name, text.replace(_MARK, _SUBSTITUTIONS.get(name, "")).lstrip("\n"))
    return text
