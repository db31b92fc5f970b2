"""Objects of the store: the bytes of a unit, out of one pool and into another."""

from __future__ import annotations

import pytest
import torch

from services.engine.cache.mover import PageMover
from services.engine.cache.spec import CacheGroup, CacheTensor, allocate_pools

GROUPS = (
    CacheGroup(
        "kv",
        "paged",
        (
            CacheTensor("k", (2, 3), torch.bfloat16),
            CacheTensor("scale", (), torch.float32),
            CacheTensor("bytes", (5,), torch.float8_e4m3fn),
        ),
        page_tokens=4,
        stride=2,
    ),
    CacheGroup("win", "window", (CacheTensor("v", (7,), torch.int8),), 8, window_tokens=17),
    CacheGroup("state", "state", (CacheTensor("s", (3, 3), torch.float32),)),
)


def mover(seed: int | None = None) -> PageMover:
    pools = allocate_pools(GROUPS, {"kv": 12, "win": 6, "state": 4}, torch.device("cpu"))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for tensors in pools.values():
            for tensor in tensors.values():
                raw = tensor.view(tensor.shape[0], -1).view(torch.uint8)
                raw.copy_(torch.randint(0, 120, raw.shape, generator=generator))
    return PageMover(pools, GROUPS, unit_tokens=16)


def test_sizes_follow_the_groups() -> None:
    made = mover()
    assert [made.unit_pages(g.name) for g in GROUPS] == [4, 2, 1]
    assert [made.window_units(g.name) for g in GROUPS] == [0, 2, 0]
    assert made.object_bytes("kv") == 16 // 2 * (12 + 4 + 5)
    assert made.object_bytes("win") == 16 * 7
    assert made.object_bytes("state") == 36


@pytest.mark.parametrize(
    ("group", "source", "target"),
    [("kv", (7, 2, 11, 0), (3, 1, 2, 8)), ("win", (5, 1), (0, 4)), ("state", (2,), (3,))],
)
def test_contents_survive_the_way_through_bytes(
    group: str, source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    old, new = mover(seed=1), mover()
    data = bytearray(old.object_bytes(group))
    old.write_out(group, source, memoryview(data))  # type: ignore[arg-type]
    new.read_in(group, target, memoryview(bytes(data)))  # type: ignore[arg-type]
    for name, tensor in new.pools[group].items():
        was = old.pools[group][name].view(torch.uint8)
        now = tensor.view(torch.uint8)
        assert torch.equal(now[list(target)], was[list(source)])
        untouched = [i for i in range(tensor.shape[0]) if i not in target]
        assert not now[untouched].any()


def test_an_object_is_its_tensors_one_after_the_other() -> None:
    made = mover(seed=2)
    data = bytearray(made.object_bytes("kv"))
    made.write_out("kv", (1, 0, 3, 2), memoryview(data))  # type: ignore[arg-type]
    expected = b"".join(
        made.pools["kv"][name].view(torch.uint8)[[1, 0, 3, 2]].numpy().tobytes()
        if made.pools["kv"][name].dim() > 1
        else b""
        for name in ("k", "scale", "bytes")
    )
    assert bytes(data) == expected


@pytest.mark.parametrize(("ids", "size"), [((1, 2, 3), 168), ((1, 2, 3, 4), 167)])
def test_wrong_sizes_are_refused(ids: tuple[int, ...], size: int) -> None:
    with pytest.raises(ValueError, match="4 ids and 168 bytes"):
        mover().write_out("kv", ids, memoryview(bytearray(size)))  # type: ignore[arg-type]
