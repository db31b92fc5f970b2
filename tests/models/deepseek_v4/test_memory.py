"""Bytes per token and per request, and the command that prints them."""

from __future__ import annotations

import pytest
import torch

from services.engine.cache.accounting import GroupBytes, group_bytes, main, request_bytes, table
from services.engine.cache.spec import CacheGroup, allocate_pools
from services.engine.models.deepseek_v4 import cache_groups
from services.engine.models.deepseek_v4_config import parse_config
from tests.models.deepseek_v4.conftest import GetNano, Model, load
from tests.models.deepseek_v4.test_loading import RELEASED

LAYERS, CSA_LAYERS, HCA_LAYERS = 43, 21, 20
RECORD, KEY = 584, 68  # bytes of a quantised row or entry, and of an index key


@pytest.fixture(scope="module")
def released() -> tuple[CacheGroup, ...]:
    config = parse_config(RELEASED, quantised_cache=True)
    return cache_groups(config, range(LAYERS), torch.bfloat16)


def by_name(groups: tuple[CacheGroup, ...]) -> dict[str, GroupBytes]:
    return {g.name: group_bytes(g) for g in groups}


def test_bytes_per_token_of_the_released_model(released: tuple[CacheGroup, ...]) -> None:
    found = by_name(released)
    assert found["csa"].per_token == CSA_LAYERS * RECORD / 4 == 21 * 146
    assert found["hca"].per_token == HCA_LAYERS * RECORD / 128 == 20 * 4.5625
    assert found["index"].per_token == CSA_LAYERS * KEY / 4
    total = sum(g.per_token for g in found.values())
    assert int(total) == 3514  # the published figure for four-bit index keys


def test_bytes_per_request_of_the_released_model(released: tuple[CacheGroup, ...]) -> None:
    found = by_name(released)
    assert found["window"].per_request == LAYERS * 128 * RECORD == 3_214_336
    # Running sums of three fp32 rows: three of them where windows overlap, one where not.
    csa, index, hca = 9 * 512 * 4, 9 * 128 * 4, 3 * 512 * 4
    assert found["state"].per_request == CSA_LAYERS * (csa + index) + HCA_LAYERS * hca
    # Less than raw rows: the A half alone of the last window, and half an open HCA window.
    assert found["state"].per_request < CSA_LAYERS * 20 * 1024 + HCA_LAYERS * 64 * 4096


def test_a_request_takes_whole_pages_a_window_and_a_slot(
    released: tuple[CacheGroup, ...],
) -> None:
    fixed = sum(g.per_request for g in by_name(released).values())
    page = sum(g.page_bytes for g in released if g.kind == "paged")
    assert request_bytes(released, 1) == request_bytes(released, 128) == page + fixed
    assert request_bytes(released, 1_048_576) == 8192 * page + fixed


def test_pages_of_a_long_context_pass_two_to_the_31_bytes(
    released: tuple[CacheGroup, ...],
) -> None:
    """What 64-bit offsets are for: the entries of a single layer in 16 requests of 1M tokens."""
    csa = next(g for g in released if g.name == "csa")
    pages = 16 * 1_048_576 // csa.page_tokens
    pools = allocate_pools((csa,), {"csa": pages}, torch.device("meta"))
    assert all(pool.nbytes > 2**31 for pool in pools["csa"].values())


def test_the_command_prints_what_the_loaded_model_keeps(
    get_nano: GetNano, nano: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(get_nano("0731")), "--dtype", "float32", "--tokens", "300"]) == 0
    assert capsys.readouterr().out.splitlines() == list(table(nano.groups, 300))


def test_the_command_names_a_bad_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/nowhere"]) == 1
    assert "/nowhere" in capsys.readouterr().err


def test_nothing_is_read_for_the_meta_device(get_nano: GetNano, nano: Model) -> None:
    from services.engine.models.registry import load_model

    shape = load_model(get_nano("vision"), device=torch.device("meta"), compute_dtype=torch.float32)
    assert shape.weight_bytes == 0 and shape.groups == load(get_nano("vision")).groups
