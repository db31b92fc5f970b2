"""The lock of what a card needs: how pip's answer becomes pins, and that the file fits the rest."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from services.common.cli import lock
from services.common.supervisor.state import ROOT


def pins(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / name).read_text().splitlines())


def test_pins_are_new_ones_of_pip_without_local_versions() -> None:
    found = [
        {"name": "Jinja2", "version": "3.1.6"},
        {"name": "CUDA_Bindings", "version": "13.5.0"},
        {"name": "torch.like", "version": "2.1+cu130"},
    ]
    assert list(lock.new_pins(found, "jinja2==3.1.6\n")) == [
        "cuda-bindings==13.5.0",
        "torch-like==2.1",
    ]


@pytest.mark.parametrize("extra", lock.CARD_EXTRAS)
def test_what_a_card_needs_is_pinned_once_and_within_its_bounds(extra: str) -> None:
    card, shared = pins("requirements-gpu.lock"), pins("requirements.lock")
    assert not set(card) & set(shared)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["optional-dependencies"][extra]:
        wanted = Requirement(line)
        assert Version({**shared, **card}[wanted.name]) in wanted.specifier, line
    assert list(card) == sorted(card) and all(re.fullmatch(r"[a-z0-9-]+", name) for name in card)


def test_the_launcher_of_humming_brings_nothing_else() -> None:
    assert lock.closure(["humming-kernels==0.1.20"]) == {"humming-kernels"}
