"""Both storages and both forms of tables: the same rows, and what each life leaves to the next."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from warhorse.v1 import offload_pb2, offload_pb2_grpc

from services.common.checkpoint import Checkpoint
from services.common.errors import ServiceError
from services.common.grpc_client import connect
from services.common.ngram.layout import TableLayout
from services.common.ngram_table import find_tables
from services.engine.runtime.remote_table import RemoteTable
from services.engine.runtime.tables import MappedTable, attach_tables
from services.engine.runtime.tables_api import TableSource
from services.offload.config import Storage
from services.offload.tables import open_tables
from tests.offload.checkpoint import make_checkpoint
from tests.offload.conftest import make_service
from tests.offload.engram import make_engram
from tests.service_process import RunDir, ServiceProcess

CPU = torch.device("cpu")
HEADS = 6
STORAGES: tuple[Storage, ...] = ("memory", "file")
SUFFIX: dict[Storage, str] = {"memory": ".table", "file": ".checked"}
ALL = [(form, storage) for form in ("ple", "engram") for storage in STORAGES]


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder and the served bytes of each of its tables."""

    path: Path
    tables: dict[str, torch.Tensor]

    def layouts(self) -> tuple[TableLayout, ...]:
        with Checkpoint.open(self.path) as checkpoint:
            return find_tables(checkpoint)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    ple, engram = (tmp_path_factory.mktemp(name) for name in ("ple", "engram"))
    return {
        "ple": Folder(ple, {"qwen4_exp.layers.1.ple": make_checkpoint(ple, parts=5)}),
        "engram": Folder(engram, make_engram(engram)),
    }


async def attach(service: ServiceProcess, folder: Folder) -> dict[str, MappedTable]:
    return await attach_tables(
        service.address, service.run_dir, folder.layouts(), client_id="engine-0", device=CPU
    )


def some_ids(table: torch.Tensor, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, len(table), (tokens, HEADS), generator=generator)
    ids[0, 0], ids[-1, -1] = 0, len(table) - 1
    return ids


def rows_of(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table[ids].flatten(1)


def ready(service: ServiceProcess) -> list[object]:
    lines = [json.loads(line) for line in service.log().splitlines()]
    return [line["adopted"] for line in lines if line["message"] == "table ready"]


@pytest.mark.parametrize(("form", "storage"), ALL)
async def test_tables_are_the_checkpoint_s_and_outlive_and_re_adopt(
    run_dir: RunDir, folders: dict[str, Folder], form: str, storage: Storage
) -> None:
    folder = folders[form]
    count = len(folder.tables)
    service = make_service(run_dir, folder.path, "--table-storage", storage)
    service.start()
    mapped = await attach(service, folder)
    assert sorted(mapped) == sorted(folder.tables)
    source = TableSource(mapped)
    remote = [RemoteTable(layout, service.address, CPU) for layout in folder.layouts()]
    for number, (name, table) in enumerate(folder.tables.items()):
        for tokens in (1, 43, 700):
            ids = some_ids(table, tokens)
            for pending in (source.start_gather(name, ids), remote[number].start_gather(ids)):
                rows = pending.wait()
                assert rows.dtype == torch.uint8
                assert torch.equal(rows, rows_of(table, ids))
    service.kill()  # the mapping needs nobody
    for name, table in folder.tables.items():
        ids = some_ids(table, 60)
        assert torch.equal(source.start_gather(name, ids).wait(), rows_of(table, ids))
    service.start()
    assert ready(service) == [False] * count + [True] * count
    again = await attach(service, folder)
    for name, table in folder.tables.items():
        ids = some_ids(table, 2)
        assert torch.equal(again[name].start_gather(ids).wait(), rows_of(table, ids))
    for closable in (*mapped.values(), *again.values(), *remote):
        closable.close()
    assert service.stop() == 0


@pytest.mark.parametrize("storage", STORAGES)
async def test_what_is_served_is_described_with_its_storage(
    run_dir: RunDir, folders: dict[str, Folder], storage: Storage
) -> None:
    service = make_service(run_dir, folders["engram"].path, "--table-storage", storage)
    service.start()
    async with connect(service.address) as channel:
        stub = offload_pb2_grpc.OffloadServiceStub(channel)
        answer = await stub.DescribeOffload(offload_pb2.DescribeOffloadRequest(), timeout=5)
    in_memory = storage == "memory"
    for served, layout in zip(answer.tables, folders["engram"].layouts(), strict=True):
        wanted = "TABLE_STORAGE_" + storage.upper()
        assert offload_pb2.TableStorage.Name(served.storage) == wanted
        assert served.HasField("region") == in_memory
        assert (served.row_values, served.row_scale_bytes) == (64, 2)
        assert not served.HasField("hash") and served.engram_hash.image_token_id == 500
        assert list(served.engram_hash.head_sizes) == list(layout.hash.head_sizes)
    assert answer.open_regions == (2 if in_memory else 0)
    assert service.stop() == 0


@pytest.mark.parametrize("storage", STORAGES)
def test_changed_files_are_read_anew(tmp_path: Path, storage: Storage) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def life() -> list[bool]:
        tables = open_tables(folder.layouts(), storage, run, "test")
        for table in tables:
            ids = torch.arange(table.layout.rows).numpy()
            out = torch.empty(table.layout.rows, table.layout.row_bytes, dtype=torch.uint8)
            table.reader.take(ids, out.numpy())
            assert torch.equal(out, folder.tables[table.layout.name])
            table.close()
        return [t.adopted for t in tables]

    folder = Folder(tmp_path / "model", make_engram(tmp_path / "model"))
    assert [life(), life()] == [[False] * 2, [True] * 2]
    folder = Folder(folder.path, make_engram(folder.path, seed=6))
    assert [life(), life()] == [[False] * 2, [True] * 2]
    # Equal in content, but written again: the values may differ where no sample was taken.
    times = folder.path / "model-00002-of-00002.safetensors"
    os.utime(times, ns=(1, 1))
    assert [life(), life()] == [[False] * 2, [True] * 2]


@pytest.mark.parametrize(("first", "second"), [STORAGES, STORAGES[::-1]])
def test_another_storage_removes_what_the_former_kept(
    tmp_path: Path, folders: dict[str, Folder], first: Storage, second: Storage
) -> None:
    layouts = folders["engram"].layouts()
    for storage in (first, second):
        for table in open_tables(layouts, storage, tmp_path, "test"):
            table.close()
        assert {p.name for p in tmp_path.iterdir()} == {t.name + SUFFIX[storage] for t in layouts}


def test_rows_left_in_the_files_take_no_room(tmp_path: Path, folders: dict[str, Folder]) -> None:
    for table in open_tables(folders["engram"].layouts(), "file", tmp_path, "test"):
        assert table.region is None
        table.close()
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 1000


def test_an_unfinished_check_is_not_taken_over(tmp_path: Path, folders: dict[str, Folder]) -> None:
    layouts = folders["engram"].layouts()
    for table in open_tables(layouts, "file", tmp_path, "test"):
        table.close()
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name + ".partial"))  # as if killed before the rename
    again = open_tables(layouts, "file", tmp_path, "test")
    assert [t.adopted for t in again] == [False, False]
    for table in again:
        table.close()


@pytest.mark.parametrize("storage", STORAGES)
async def test_an_engine_with_another_tokenization_is_refused(
    run_dir: RunDir, folders: dict[str, Folder], tmp_path: Path, storage: Storage
) -> None:
    served = folders["engram"]
    other = Folder(tmp_path, make_engram(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"image_token_id": 500', '"image_token_id": 501'))
    service = make_service(run_dir, served.path, "--table-storage", storage)
    service.start()
    with pytest.raises(ServiceError, match="comes from another checkpoint"):
        await attach(service, other)
    assert service.stop() == 0
