"""`warhorse dev lock`: writes the lock files from the packages of the running environment.

Each lock is the closure of some extras of pyproject.toml over installed distributions. The leaves
are packages whose own pins pull the CUDA stack or a cloud's; what they need is listed in the
extras. torch has
a lock of its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

RUNTIME_EXTRAS = ("gateway", "tokenizer", "engine", "kvcache", "offload", "cli")
LEAVES = ("lmcache", "xgrammar", "litellm")
LOCKS = {"requirements.lock": RUNTIME_EXTRAS, "requirements-dev.lock": (*RUNTIME_EXTRAS, "dev")}


def write_locks(root: Path) -> None:
    """Write all lock files below `root`."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for name, extras in LOCKS.items():
        wanted = [*project["dependencies"], *_extra_lines(project, extras)]
        pins = sorted(set(closure(wanted)) - {"torch"})
        lines = [f"{pin}=={_version(pin)}" for pin in pins]
        (root / name).write_text("\n".join(lines) + "\n")
    (root / "requirements-torch.lock").write_text(f"torch=={_version('torch')}\n")


def _extra_lines(project: dict[str, dict[str, list[str]]], extras: Iterable[str]) -> Iterator[str]:
    for extra in extras:
        yield from project["optional-dependencies"][extra]


def closure(lines: Iterable[str]) -> set[str]:
    """Canonical names of everything that these requirement lines bring in."""
    found: set[str] = set()
    pending = [Requirement(line) for line in lines]
    while pending:
        requirement = pending.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found:
            continue
        found.add(name)
        if name not in LEAVES:
            pending += _needs(name, requirement.extras)
    return found


def _needs(name: str, extras: Iterable[str]) -> list[Requirement]:
    environments = [{"extra": extra} for extra in (*extras, "")]
    needs = [Requirement(line) for line in metadata.requires(name) or ()]
    return [
        need
        for need in needs
        if need.marker is None or any(need.marker.evaluate(env) for env in environments)
    ]


def _version(name: str) -> str:
    return metadata.version(name).split("+")[0]
