"""The offload service over a real socket: attaching, gathering, dying, coming back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from warhorse.v1 import offload_pb2, offload_pb2_grpc

from services.common.errors import ErrorReason, ServiceError, from_rpc_error
from services.common.grpc_client import connect
from services.common.shm import region_counts
from services.engine.runtime.remote_table import RemoteTable
from services.engine.runtime.tables import MappedTable, RegionRows, attach_tables, check_table
from tests.offload.checkpoint import PREFIX, config, make_checkpoint, rewrite
from tests.offload.conftest import Model, make_service
from tests.service_process import ROOT, RunDir, ServiceProcess, child_environment

CPU = torch.device("cpu")
NAME = "qwen4_exp.layers.1.ple"


async def attach(service: ServiceProcess, model: Model, seconds: float = 10.0) -> MappedTable:
    tables = await attach_tables(
        service.address,
        service.run_dir,
        model.layouts(),
        client_id="engine-0",
        device=CPU,
        retry_seconds=seconds,
    )
    (table,) = tables.values()
    return table


async def describe(service: ServiceProcess) -> offload_pb2.DescribeOffloadResponse:
    async with connect(service.address) as channel:
        stub = offload_pb2_grpc.OffloadServiceStub(channel)
        return await stub.DescribeOffload(offload_pb2.DescribeOffloadRequest(), timeout=5)


def random_ids(model: Model, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.table.shape[0], (tokens, 8), generator=generator)


def expected_rows(model: Model, ids: torch.Tensor) -> torch.Tensor:
    return model.table[ids].reshape(ids.shape[0], 8 * model.table.shape[1])


@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
async def test_mapped_and_remote_rows_are_those_of_the_checkpoint(
    service: ServiceProcess, model: Model, tokens: int
) -> None:
    before = region_counts()
    ids = random_ids(model, tokens)
    mapped = await attach(service, model)
    remote = RemoteTable(model.layouts()[0], service.address, CPU)
    for source in (mapped, remote):
        rows = source.start_gather(ids).wait()
        assert (rows.dtype, tuple(rows.shape)) == (torch.uint8, (tokens, 8 * 16))
        assert torch.equal(rows, expected_rows(model, ids))
        source.close()
    assert region_counts() == before
    assert (await describe(service)).gathered_rows == 8 * tokens


async def test_ids_outside_the_table_are_refused(service: ServiceProcess, model: Model) -> None:
    mapped = await attach(service, model)
    for bad in (-1, model.table.shape[0]):
        ids = random_ids(model, 2)
        ids[1, 3] = bad
        with pytest.raises(IndexError, match=str(bad)):
            mapped.start_gather(ids)
    mapped.close()


async def test_a_mapping_cannot_be_written(service: ServiceProcess, model: Model) -> None:
    mapped = await attach(service, model)
    reader = mapped._reader
    assert isinstance(reader, RegionRows) and reader.region.view.readonly
    with pytest.raises(OSError):
        os.pwrite(reader.region.fd, b"x", 8192)
    mapped.close()


async def test_gather_checks_its_request(service: ServiceProcess, model: Model) -> None:
    rows = model.table.shape[0]
    cases = (
        ("row_ids", {"table": NAME, "row_ids": b"123"}),
        ("row_ids", {"table": NAME, "row_ids": np.array([rows], "<i8").tobytes()}),
        ("row_ids", {"table": NAME, "row_ids": np.array([-1], "<i8").tobytes()}),
        ("row_ids", {"table": NAME, "row_ids": np.zeros(4097, "<i8").tobytes()}),
        ("table", {"table": "nonsense"}),
        ("fingerprint", {"table": NAME, "fingerprint": "nonsense"}),
    )
    async with connect(service.address) as channel:
        stub = offload_pb2_grpc.OffloadServiceStub(channel)
        for field, values in cases:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Gather(offload_pb2.GatherRequest(**values), timeout=5)
            assert from_rpc_error(error.value).field == field


async def test_an_engine_with_other_weights_is_refused_at_once(
    service: ServiceProcess, model: Model, tmp_path: Path
) -> None:
    other = Model(tmp_path, make_checkpoint(tmp_path, seed=6))
    started = time.monotonic()
    with pytest.raises(ServiceError) as error:
        await attach(service, other)
    assert error.value.reason == ErrorReason.ERROR_REASON_LAYOUT_MISMATCH
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "x"),
        ("rows", 1),
        ("row_bytes", 15),
        ("row_values", 8),
        ("scale", 0.5),
        ("fingerprint", "x"),
        ("hash.ngram_size", 2),
        ("hash.eos_token_id", 1),
        ("hash.multipliers", [1, 2, 3]),
        ("hash.head_offsets", []),
        ("offset", 1 << 20),
    ],
)
async def test_every_fact_of_a_served_table_is_checked(
    service: ServiceProcess, model: Model, field: str, value: object
) -> None:
    (table,) = (await describe(service)).tables
    (layout,) = model.layouts()
    check_table(table, layout)
    *path, name = field.split(".")
    target = table.hash if path else table
    if isinstance(value, list):
        del getattr(target, name)[:]
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)
    with pytest.raises(ServiceError) as error:
        check_table(table, layout)
    assert error.value.field == (path[0] if path else name)


async def test_an_engine_waits_for_a_service_that_comes_later(
    run_dir: RunDir, model: Model
) -> None:
    late = make_service(run_dir, model.folder)
    with pytest.raises(ServiceError) as error:
        await attach(late, model, seconds=0.3)
    assert error.value.reason == ErrorReason.ERROR_REASON_ENGINE_LOST
    late.start()
    mapped = await attach(late, model)
    mapped.close()
    assert late.stop() == 0


async def test_gathers_outlive_a_killed_service_and_a_new_life_adopts_its_table(
    service: ServiceProcess, model: Model
) -> None:
    mapped = await attach(service, model)
    ids = random_ids(model, 3000)
    before = (await describe(service)).tables
    pending = [mapped.start_gather(ids) for _ in range(20)]
    service.kill()
    pending += [mapped.start_gather(ids) for _ in range(20)]
    for rows in pending:
        assert torch.equal(rows.wait(), expected_rows(model, ids))
    service.start()
    after = await describe(service)
    assert after.tables == before  # the same region of the same generation
    assert [line["adopted"] for line in log_lines(service, "table ready")] == [False, True]
    again = await attach(service, model)
    assert torch.equal(again.start_gather(ids).wait(), expected_rows(model, ids))
    for table in (mapped, again):
        table.close()
    assert (after.open_regions, after.region_bytes > model.table.numel()) == (1, True)


async def test_a_remote_reader_goes_on_with_the_next_life(
    service: ServiceProcess, model: Model
) -> None:
    remote = RemoteTable(model.layouts()[0], service.address, CPU)
    ids = random_ids(model, 50)
    service.kill()
    rows = remote.start_gather(ids)
    service.start()
    assert torch.equal(rows.wait(), expected_rows(model, ids))
    remote.close()


async def test_a_remote_reader_without_a_service_fails_in_time(
    service: ServiceProcess, model: Model
) -> None:
    remote = RemoteTable(model.layouts()[0], service.address, CPU, retry_seconds=0.5)
    service.kill()
    with pytest.raises(ServiceError):
        remote.start_gather(random_ids(model, 5)).wait()
    remote.close()


async def test_a_changed_checkpoint_is_loaded_anew(run_dir: RunDir, tmp_path: Path) -> None:
    first = Model(tmp_path, make_checkpoint(tmp_path, seed=1))
    service = make_service(run_dir, tmp_path)
    service.start()
    old = await attach(service, first)
    assert service.stop() == 0
    second = Model(tmp_path, make_checkpoint(tmp_path, seed=2))
    service = make_service(run_dir, tmp_path)
    service.start()
    new = await attach(service, second)
    ids = random_ids(first, 100)
    for table, its_model in ((old, first), (new, second)):
        rows = table.start_gather(ids).wait()
        assert torch.equal(rows, expected_rows(its_model, ids))
        table.close()
    assert service.stop() == 0


async def test_an_unfinished_table_file_is_not_adopted(
    run_dir: RunDir, model: Model, service: ServiceProcess
) -> None:
    folder = run_dir.path / "offload" / "offload-0.tables"
    (path,) = folder.glob("*.table")
    service.kill()
    path.rename(path.with_name(path.name + ".partial"))  # as if killed before the rename
    (folder / "stale.table").write_bytes(b"of another model")
    service.start()
    assert [line["adopted"] for line in log_lines(service, "table ready")] == [False, False]
    mapped = await attach(service, model)
    ids = random_ids(model, 10)
    assert torch.equal(mapped.start_gather(ids).wait(), expected_rows(model, ids))
    mapped.close()
    assert sorted(p.name for p in folder.iterdir()) == ["lock", path.name]


async def test_a_model_without_tables_is_served_an_empty_list(
    run_dir: RunDir, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path)
    plain = config(1500, 4, 16)
    plain["text_config"]["ple_layer_ids"] = []
    (tmp_path / "config.json").write_text(json.dumps(plain))
    service = make_service(run_dir, tmp_path)
    service.start()
    assert not (await describe(service)).tables
    async with connect(service.address) as channel:
        stub = offload_pb2_grpc.OffloadServiceStub(channel)
        assert not (await stub.Attach(offload_pb2.AttachRequest(), timeout=5)).tables
    assert service.stop() == 0


def refusal(run_dir: RunDir, folder: Path) -> str:
    """Start on a folder that must be refused; returns the one line that it logs."""
    command = [sys.executable, "-m", "services.offload", "--model", str(folder)]
    command += ["--run-dir", str(run_dir.path)]
    ended = subprocess.run(
        command, env=child_environment(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    lines = [json.loads(text) for text in ended.stderr.splitlines()]
    (line,) = (line for line in lines if line["level"] != "info")
    return str(line["message"])


def test_a_truncated_checkpoint_is_refused_in_one_line_that_names_it(
    run_dir: RunDir, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(run_dir, tmp_path)
    for part in (path.name, "shard_", f"expected {size} bytes", f"found {size - 100} bytes"):
        assert part in message


def test_a_table_with_a_nan_is_refused_and_leaves_no_file(run_dir: RunDir, tmp_path: Path) -> None:
    table = make_checkpoint(tmp_path)
    shard = table.chunk(4)[2].clone()
    shard[-1, -1] = 0xFF
    name = PREFIX + "ngram_embedding.shard_2.weight"
    rewrite(tmp_path, {name: shard.view(torch.float8_e4m3fn)})
    message = refusal(run_dir, tmp_path)
    assert "NaN" in message and name in message
    assert [p.name for p in (run_dir.path / "offload").rglob("*.table*") if p.is_file()] == []


def log_lines(service: ServiceProcess, message: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in service.log().splitlines()]
    return [line for line in lines if line["message"] == message]
