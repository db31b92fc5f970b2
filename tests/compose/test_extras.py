"""Every service runs on what its extra of pyproject.toml brings, and no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from services.common.cli.lock import closure
from services.common.supervisor.state import ROOT

# Imports a module while everything outside the allowed distributions looks absent.
IMPORT = """
import importlib, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in hidden:
            return super().find_spec(name, path, target)

hidden = set(sys.argv[2:])
sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
importlib.import_module(sys.argv[1])
"""
MODULES = {
    "gateway": "services.gateway.__main__",
    "tokenizer": "services.tokenizer.__main__",
    "offload": "services.offload.__main__",
    "kvcache": "services.kvcache.server",
    "engine": "services.engine.core_process",
    "cli": "services.common.cli.main",
}


def distributions(extra: str) -> set[str]:
    """What an installation with this extra alone holds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return closure([*project["dependencies"], *project["optional-dependencies"][extra]])


def hidden_packages(allowed: set[str]) -> set[str]:
    """Top-level packages of this environment that no allowed distribution has."""
    return {
        package
        for package, names in metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in names} & allowed
    }


@pytest.mark.parametrize("extra", MODULES)
def test_a_service_imports_nothing_beyond_its_extra(extra: str) -> None:
    hidden = hidden_packages(distributions(extra))
    assert len(hidden) > 10
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, MODULES[extra], *sorted(hidden)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("extra", ["gateway", "tokenizer", "offload"])
def test_services_without_a_model_bring_no_torch(extra: str) -> None:
    assert "torch" not in distributions(extra)
