"""The contract of the kvcache service over a real socket and a real arena."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from warhorse.v1 import kvcache_pb2

from services.common.errors import ErrorReason, from_rpc_error
from tests.kvcache.client import (
    SIZES,
    keys_of,
    object_content,
    open_request,
    session,
    stats,
    unit_chain,
)
from tests.kvcache.conftest import wait_idle
from tests.service_process import ServiceProcess


def reason_of(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> ErrorReason:
    return from_rpc_error(error.value).reason


async def test_stored_prefix_is_found_and_loaded_with_equal_bytes(service: ServiceProcess) -> None:
    hashes = unit_chain(5)
    async with session(service.address, service.run_dir) as writer:
        assert await writer.store(keys_of(hashes)) == 15
    async with session(service.address, service.run_dir) as reader:
        assert await reader.lookup(hashes) == 5
        assert await reader.load(hashes) == 5
        assert await reader.load([*hashes[:3], *unit_chain(2, b"other")]) == 3


async def test_a_load_pins_only_what_the_hit_needs(service: ServiceProcess) -> None:
    hashes = unit_chain(5)
    async with session(service.address, service.run_dir) as client:
        await client.store(keys_of(hashes))
        begun = await client.begin_load(hashes)
        units = {g: [] for g in SIZES}
        for slot in begun.slots:
            units[slot.key.group_id].append(hashes.index(slot.key.unit_hash))
        assert units == {0: [0, 1, 2, 3, 4], 1: [3, 4], 2: [4]}
        await client.end_load(begun.lease_id)
        tail = await client.begin_load(hashes, first_unit=3)
        assert len(tail.slots) == 2 + 2 + 1
        await client.end_load(tail.lease_id)


async def test_units_held_by_the_client_need_not_be_stored(service: ServiceProcess) -> None:
    hashes = unit_chain(4)
    async with session(service.address, service.run_dir) as client:
        await client.store(keys_of(hashes[2:]))
        assert await client.lookup(hashes) == 0
        begun = await client.begin_load(hashes, first_unit=2)
        assert begun.hit_units == 4
        await client.end_load(begun.lease_id)


async def test_a_missing_state_shortens_the_hit_to_the_last_snapshot(
    service: ServiceProcess,
) -> None:
    hashes = unit_chain(5)
    async with session(service.address, service.run_dir) as client:
        await client.store(keys_of(hashes, groups=(0, 1)))
        assert await client.lookup(hashes) == 0
        await client.store(keys_of(hashes[1:2], groups=(2,)))
        assert await client.lookup(hashes) == 2
        assert await client.load(hashes) == 2


async def test_nothing_is_visible_before_commit(service: ServiceProcess) -> None:
    hashes = unit_chain(2)
    async with session(service.address, service.run_dir) as client:
        begun = await client.begin_store(keys_of(hashes))
        for slot in begun.slots:
            client.slot(slot)[:] = object_content(slot.key.group_id, slot.key.unit_hash)
        assert await client.lookup(hashes) == 0
        assert not (await client.begin_load(hashes)).lease_id
        await client.abort(begun.lease_id)
        assert await client.lookup(hashes) == 0


async def test_objects_with_a_wrong_digest_are_not_committed(service: ServiceProcess) -> None:
    hashes = unit_chain(1)
    before = (await stats(service.address)).corrupt_objects
    async with session(service.address, service.run_dir) as client:
        begun = await client.begin_store(keys_of(hashes))
        assert await client.commit(begun.lease_id, [1, 2, 3]) == 0
        assert await client.lookup(hashes) == 0
        assert await client.store(keys_of(hashes)) == 3
    assert (await stats(service.address)).corrupt_objects == before + 3


async def test_a_wrong_number_of_digests_is_refused_and_keeps_the_lease(
    service: ServiceProcess,
) -> None:
    async with session(service.address, service.run_dir) as client:
        begun = await client.begin_store(keys_of(unit_chain(1)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.commit(begun.lease_id, [1])
        assert reason_of(error) == ErrorReason.ERROR_REASON_INVALID_FIELD
        await client.abort(begun.lease_id)


async def test_a_second_writer_of_a_key_gets_no_slot(service: ServiceProcess) -> None:
    hashes = unit_chain(1)
    async with (
        session(service.address, service.run_dir) as one,
        session(service.address, service.run_dir) as two,
    ):
        begun = await one.begin_store(keys_of(hashes))
        other = await two.begin_store(keys_of(hashes))
        assert (other.lease_id, len(other.slots), len(other.unplaced)) == ("", 0, 0)
        await one.abort(begun.lease_id)
        assert await two.store(keys_of(hashes)) == 3
        assert not (await one.begin_store(keys_of(hashes))).slots


async def test_other_salt_other_model_and_other_layout_find_nothing(
    service: ServiceProcess,
) -> None:
    hashes = unit_chain(3, b"tenant-a")
    async with session(service.address, service.run_dir) as client:
        await client.store(keys_of(hashes))
        assert await client.lookup(unit_chain(3, b"tenant-b")) == 0
    async with session(service.address, service.run_dir, "model-b") as other:
        assert await other.lookup(hashes) == 0


async def test_leases_end_once_and_only_in_their_session(service: ServiceProcess) -> None:
    hashes = unit_chain(1)
    async with (
        session(service.address, service.run_dir) as one,
        session(service.address, service.run_dir) as two,
    ):
        await one.store(keys_of(hashes))
        begun = await one.begin_load(hashes)
        for client, lease in ((two, begun.lease_id), (one, "nonsense"), (one, "")):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.end_load(lease)
            assert reason_of(error) == ErrorReason.ERROR_REASON_UNKNOWN_LEASE
        assert (await stats(service.address)).read_leases == 1
        await one.end_load(begun.lease_id)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await one.end_load(begun.lease_id)
        assert reason_of(error) == ErrorReason.ERROR_REASON_UNKNOWN_LEASE
        assert (await stats(service.address)).read_leases == 0


async def test_a_closed_session_and_one_of_another_life_are_told_apart(
    service: ServiceProcess,
) -> None:
    async with session(service.address, service.run_dir) as gone:
        pass
    await wait_idle(service.address)
    async with session(service.address, service.run_dir) as client:
        for session_id, reason in (
            (gone.session_id, ErrorReason.ERROR_REASON_UNKNOWN_LEASE),
            ("0123456789abcdef.1.ff", ErrorReason.ERROR_REASON_STALE_GENERATION),
        ):
            client.session_id = session_id
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.lookup(unit_chain(1))
            assert reason_of(error) == reason


async def test_objects_reported_corrupt_are_dropped(service: ServiceProcess) -> None:
    hashes = unit_chain(3)
    async with (
        session(service.address, service.run_dir) as one,
        session(service.address, service.run_dir) as two,
    ):
        await one.store(keys_of(hashes))
        held = await two.begin_load(hashes)
        begun = await one.begin_load(hashes)
        bad = next(s.key for s in begun.slots if s.key.group_id == 0)
        await one.end_load(begun.lease_id, [bad])
        assert await one.lookup(hashes) == 0
        for slot in held.slots:  # still whole for who reads it
            content = object_content(slot.key.group_id, slot.key.unit_hash)
            assert bytes(two.slot(slot)) == content
        await two.end_load(held.lease_id)
        assert await one.store([bad]) == 1
        assert await one.load(hashes) == 3


async def test_a_full_arena_evicts_the_least_recent_objects(service: ServiceProcess) -> None:
    chains = [unit_chain(10, bytes([i])) for i in range(30)]  # 30 x 250 KiB in 4 MiB
    before = await stats(service.address)
    async with session(service.address, service.run_dir) as client:
        for chain in chains:
            assert await client.store(keys_of(chain)) == 30
            assert await client.load(chains[0]) == 10  # kept, because it is used
        assert await client.load(chains[-1]) == 10
        assert await client.lookup(chains[1]) == 0
    now = await stats(service.address)
    assert now.evicted_objects - before.evicted_objects >= 30 * 10
    assert now.used_bytes <= now.capacity_bytes


async def test_pinned_objects_survive_any_pressure(service: ServiceProcess) -> None:
    async with session(service.address, service.run_dir) as client:
        leases = []
        for i in range(45):
            chain = unit_chain(10, bytes([i]))
            await client.store(keys_of(chain))
            leases.append(await client.begin_load(chain))
        assert leases[0].hit_units == 10  # at first everything fits,
        assert leases[-1].hit_units == 0  # in the end the pinned ones fill the arena
        for lease in leases:
            for slot in lease.slots:
                content = object_content(slot.key.group_id, slot.key.unit_hash)
                assert bytes(client.slot(slot)) == content
            if lease.lease_id:
                await client.end_load(lease.lease_id)
        assert await client.store(keys_of(unit_chain(10, b"again"))) == 30


async def test_an_arena_full_of_reservations_is_exhausted_until_one_is_aborted(
    service: ServiceProcess,
) -> None:
    async with session(service.address, service.run_dir) as client:
        leases = []
        with pytest.raises(grpc.aio.AioRpcError) as error:
            for i in range(1000):
                begun = await client.begin_store(keys_of(unit_chain(10, bytes([i % 256, i >> 8]))))
                leases.append(begun.lease_id)
        assert reason_of(error) == ErrorReason.ERROR_REASON_POOL_EXHAUSTED
        assert begun.unplaced  # the last one got what was left
        await client.abort(leases.pop(0))
        assert await client.store(keys_of(unit_chain(10, b"again"))) == 30
        for lease in leases:
            await client.abort(lease)


async def test_a_silent_session_is_closed_and_a_pinging_one_is_not(
    service: ServiceProcess,
) -> None:
    ping = kvcache_pb2.SessionRequest(ping=kvcache_pb2.SessionPing())
    async with (
        session(service.address, service.run_dir, pings=False) as silent,
        session(service.address, service.run_dir, pings=False) as alive,
    ):
        await silent.begin_store(keys_of(unit_chain(1)))
        for _ in range(8):
            await alive.stream.write(ping)
            answer = await alive.stream.read()
            assert answer.session_id == alive.session_id
            await asyncio.sleep(0.5)
        assert (await stats(service.address)).sessions == 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await silent.stream.read()
        assert reason_of(error) == ErrorReason.ERROR_REASON_DEADLINE


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model_fingerprint", {"model_fingerprint": ""}),
        ("unit_tokens", {"unit_tokens": 0}),
        ("groups", {"groups": []}),
        ("groups.kind", {"groups": [kvcache_pb2.StoreGroup(kind="ring", object_bytes=1)]}),
        ("groups.object_bytes", {"groups": [kvcache_pb2.StoreGroup(kind="state")]}),
        (
            "groups.object_bytes",
            {"groups": [kvcache_pb2.StoreGroup(kind="state", object_bytes=1 << 30)]},
        ),
        (
            "groups.window_units",
            {"groups": [kvcache_pb2.StoreGroup(kind="window", object_bytes=1)]},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_malformed_open_names_its_field(
    service: ServiceProcess, field: str, change: dict[str, object]
) -> None:
    request = open_request()
    for name, value in change.items():
        request.open.ClearField(name)
        if value:
            getattr(request.open, name).extend(value)
    async with session(service.address, service.run_dir) as client:
        stream = client.stub.Session()
        await stream.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        refused = from_rpc_error(error.value)
        assert (refused.reason, refused.field) == (ErrorReason.ERROR_REASON_INVALID_FIELD, field)


@pytest.mark.parametrize(
    ("field", "keys"),
    [
        ("unit_hashes", [kvcache_pb2.ObjectKey(unit_hash=b"short", group_id=0)]),
        ("keys", [kvcache_pb2.ObjectKey(unit_hash=bytes(32), group_id=9)]),
        ("keys", [kvcache_pb2.ObjectKey(unit_hash=bytes(32), group_id=0)] * 2),
    ],
    ids=["hash", "group", "twice"],
)
async def test_a_malformed_key_is_refused_without_effect(
    service: ServiceProcess, field: str, keys: list[kvcache_pb2.ObjectKey]
) -> None:
    async with session(service.address, service.run_dir) as client:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.begin_store(keys)
        assert from_rpc_error(error.value).field == field
        assert (await stats(service.address)).used_bytes == 0
