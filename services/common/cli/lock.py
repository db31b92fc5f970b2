"""`warhorse dev lock`: writes the lock files from the packages of the running environment.

Each lock is the closure of some extras of pyproject.toml over installed distributions. The leaves
are packages whose own pins pull the CUDA stack or a cloud's; what they need is listed in the
extras. torch has a lock of its own. What a card needs beside it is not installed where locks are
written: pip resolves it against the other locks, from its index, and downloads nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

RUNTIME_EXTRAS = ("gateway", "tokenizer", "engine", "kvcache", "offload", "cli")
CARD_EXTRAS = ("engine-gpu", "engine-gpu-build")
LEAVES = ("lmcache", "xgrammar", "litellm", "humming-kernels")
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
    lines = sorted(set(resolved(root, _extra_lines(project, CARD_EXTRAS))))
    (root / "requirements-gpu.lock").write_text("\n".join(lines) + "\n")


def _extra_lines(project: dict[str, dict[str, list[str]]], extras: Iterable[str]) -> Iterator[str]:
    for extra in extras:
        yield from project["optional-dependencies"][extra]


def closure(lines: Iterable[str]) -> set[str]:
    """Canonical names of everything that these requirement lines bring in."""
    found: set[str] = set()
    pending = [Requirement(line) for line in lines]
    while pending:
        requirement = pending.pop()
        name = _canonical(str(requirement))
        if name in found:
            continue
        found.add(name)
        if name not in LEAVES:
            pending += _needs(name, requirement.extras)
    return found


def resolved(root: Path, lines: Iterable[str]) -> Iterator[str]:
    """Pins of what these requirement lines bring in beside requirements.lock, found by pip.

    CalledProcessError where its index has no fitting set.
    """
    wanted = list(lines)
    for leaf in (True, False):
        chosen = [line for line in wanted if (_canonical(line) in LEAVES) == leaf]
        alone = ["--no-deps"] * leaf
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
            "--report", "-", "--constraint", str(root / "requirements.lock"), *alone, *chosen,
        ]  # fmt: skip
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = [item["metadata"] for item in json.loads(report)["install"]]
        yield from new_pins(found, (root / "requirements.lock").read_text())


def new_pins(found: Iterable[dict[str, str]], lock: str) -> Iterator[str]:
    """`name==version` of pip's metadata, without what the text of a lock has."""
    known = {_canonical(line) for line in lock.splitlines()}
    for item in found:
        name = _canonical(item["name"])
        if name not in known:
            yield f"{name}=={item['version'].split('+')[0]}"


def _canonical(line: str) -> str:
    """Name of a requirement line as locks spell it."""
    return re.sub(r"[-_.]+", "-", Requirement(line).name).lower()


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
