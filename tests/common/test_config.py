"""Settings: flags over environment over defaults, and errors that name what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from services.common.config import parse_config


@dataclass(frozen=True)
class Sample:
    """One field of every supported type."""

    model: str
    max_num_seqs: int = field(default=8, metadata={"help": "sequences", "min": 1, "max": 64})
    share: float = field(default=0.5, metadata={"min": 0.0, "aliases": ("--gpu-share",)})
    enable_cache: bool = True
    run_dir: Path = Path("/run/warhorse")
    peers: tuple[str, ...] = ()
    dtype: Literal["auto", "float32"] = "auto"
    seed: int | None = field(default=None, metadata={"help": "100% fixed"})

    def __post_init__(self) -> None:
        if self.model == "bad":
            raise ValueError("--model='bad' is not a model")


def parse(*argv: str) -> Sample:
    return parse_config(Sample, argv, prog="sample", description="A sample.")


def test_defaults_apply_when_nothing_is_given() -> None:
    assert parse("--model", "m") == Sample(model="m")


def test_flags_of_every_type_are_read() -> None:
    config = parse(
        *("--model=m", "--max-num-seqs=3", "--share=0.25", "--no-enable-cache"),
        *("--run-dir=/tmp/x", "--peers=a, b,", "--dtype=float32", "--seed=7"),
    )
    assert config == Sample("m", 3, 0.25, False, Path("/tmp/x"), ("a", "b"), "float32", 7)


def test_environment_is_read_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARHORSE_MODEL", "from-env")
    monkeypatch.setenv("WARHORSE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("WARHORSE_ENABLE_CACHE", "off")
    config = parse("--max-num-seqs", "6")
    assert (config.model, config.max_num_seqs, config.enable_cache) == ("from-env", 6, False)


def test_none_clears_an_optional_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARHORSE_SEED", "4")
    assert parse("--model=m").seed == 4
    assert parse("--model=m", "--seed=none").seed is None


def test_an_alias_sets_the_field() -> None:
    assert parse("--model=m", "--gpu-share=0.75").share == 0.75


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model=m", "--max-num-seqs=65"], "--max-num-seqs='65' is not an integer from 1 to 64"),
        (["--model=m", "--max-num-seqs=x"], "--max-num-seqs='x' is not an integer from 1 to 64"),
        (["--model=m", "--share=-1"], "--share='-1' is not a number of at least 0.0"),
        (["--model=m", "--share=nan"], "--share='nan' is not a number"),
        (["--model=m", "--dtype=fp7"], "--dtype='fp7' is not one of auto, float32"),
        (["--model=m", "--seed=x"], "--seed='x' is not an integer or none"),
        (["--model=bad"], "--model='bad' is not a model"),
        (["--model=m", "--max-num=3"], "unrecognized arguments: --max-num=3"),
        ([], "--model (or WARHORSE_MODEL) is required"),
    ],
)
def test_a_bad_setting_ends_the_process_and_names_it(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARHORSE_ENABLE_CACHE", "maybe")
    with pytest.raises(SystemExit):
        parse("--model=m")
    assert "WARHORSE_ENABLE_CACHE='maybe' is not true or false" in capsys.readouterr().err


def test_help_shows_default_range_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for part in ("sequences (default: 8)", "[WARHORSE_MAX_NUM_SEQS]", "from 1 to 64", "100% fixed"):
        assert part in text
