"""Installs one extra of pyproject.toml at the versions of the locks: `install_extra.py EXTRA`.

Further arguments go to pip. The lock holds more than one service needs; only the extra's own
closure is installed, so that the gateway and tokenizer images hold no torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

# Packages whose own requirements are not followed: their needed sets are in the extras.
NO_DEPENDENCIES = ("lmcache", "xgrammar", "humming-kernels")
LOCKS = ("requirements.lock", "requirements-torch.lock")
# Of extras for a card alone: torch brings parts of the toolkit in versions of its own.
CARD_LOCK = "requirements-gpu.lock"


def main(extra: str, pip_arguments: list[str]) -> None:
    """Two calls of pip: what must not resolve, then the rest under the lock's constraints."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    alone = [w for w in wanted if _name(w) in NO_DEPENDENCIES]
    rest = [w for w in wanted if _name(w) not in NO_DEPENDENCIES]
    install = [sys.executable, "-m", "pip", "install", *pip_arguments]
    locks = (*LOCKS, CARD_LOCK) if extra.startswith("engine-gpu") else LOCKS
    constraints = [word for lock in locks for word in ("-c", lock)]
    if alone:
        subprocess.run([*install, "--no-deps", *alone], check=True)
    subprocess.run([*install, *constraints, *rest], check=True)


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    return match.group().lower() if match else ""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
