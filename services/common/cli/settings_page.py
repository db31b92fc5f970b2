"""Writes docs/configuration.md from the settings themselves, so that it cannot be wrong."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator

from services.common.config import Setting, settings_of
from services.common.supervisor.compose_file import variable_defaults
from services.common.supervisor.state import ROOT

PAGE = ROOT / "docs" / "configuration.md"
COMPOSE_FILE = ROOT / "compose" / "compose.yaml"
CONFIGS = {
    "gateway": "GatewayConfig",
    "tokenizer": "TokenizerConfig",
    "engine": "EngineFlags",
    "kvcache": "KvCacheConfig",
    "offload": "OffloadConfig",
}
INTRODUCTION = """# Configuration

Made by `./warhorse dev generate` from the settings in the code; do not edit.

A service is started as `python -m services.NAME`. Every setting is a flag and a variable; the flag
wins, an empty variable counts as not set. An unknown flag, a value out of range or a missing
required setting ends the process with status 2 and a message that names setting, value and range.
Lists are comma separated; `none` clears a setting that may have no value. `--kvcache-address none`
and `--offload-address none` run the engine without that service.

## `./warhorse up`

`--model`, `--port`, `--host`, `--project`, `--scale`, `--detach` and `--docker` are its own. Each
variable of `compose/compose.yaml` is a flag too (`WARHORSE_L1_SIZE_GB` is `--l1-size-gb`); other
settings of a service reach a local stack as variables of its environment. `empty` leaves the choice
to the services' own defaults below.
"""


def settings_page() -> str:
    """The page as it should be."""
    lines = [INTRODUCTION, *_variables()]
    for service, name in CONFIGS.items():
        module = "flags" if service == "engine" else "config"
        config = getattr(importlib.import_module(f"services.{service}.{module}"), name)
        lines += ["", f"## {service}", "", *_table(settings_of(config))]
    return "\n".join(lines) + "\n"


def _variables() -> Iterator[str]:
    words = {None: "required", "": "empty"}
    yield from ("| variable | default |", "|---|---|")
    for name, default in sorted(variable_defaults(COMPOSE_FILE).items()):
        yield f"| `{name}` | `{words.get(default, default)}` |"


def _table(settings: Iterable[Setting]) -> Iterator[str]:
    yield from ("| flag, variable | accepts | default | meaning |", "|---|---|---|---|")
    for s in settings:
        row = (f"`{s.flag}`<br>`{s.variable}`", s.accepts, f"`{s.default}`", s.text)
        yield f"| {' | '.join(cell.replace('|', ' or ') for cell in row)} |"
