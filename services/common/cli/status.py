"""`warhorse status`: every process of the stack, its health, model, load and memory."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil
from warhorse.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    kvcache_pb2,
    kvcache_pb2_grpc,
    offload_pb2,
    offload_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

from services.common.cli.base import UserError, add_project
from services.common.cli.up import run_compose
from services.common.grpc_client import connect, socket_target
from services.common.supervisor.scale import instance_of, service_of
from services.common.supervisor.state import ServiceState, StackPaths, StackState

if TYPE_CHECKING:
    from services.common.cli.base import Subparsers

CALL_SECONDS = 2.0
COLUMNS = ("service", "pid", "healthy", "restarts", "memory_mb", "model", "load")


def add_commands(commands: Subparsers) -> None:
    """Register status."""
    status = commands.add_parser("status", help="the processes of the stack")
    status.add_argument("--json", action="store_true", help="a list of objects")
    status.add_argument("--docker", action="store_true", help="of the stack in containers")
    add_project(status).set_defaults(command=run_status)


def run_status(arguments: argparse.Namespace) -> int:
    """Print one line, or one object, per process. Exit code 1 unless all are healthy."""
    if arguments.docker:
        return run_compose(arguments.project, "ps", *(["--format", "json"] * arguments.json))
    paths = StackPaths.of(arguments.project)
    state = StackState.read(paths.file)
    if state is None or not state.alive:
        raise UserError("nothing is running")
    rows = asyncio.run(_rows(state, paths.run))
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    else:
        _print_table(rows)
    return 0 if all(row["healthy"] for row in rows) else 1


async def _rows(state: StackState, run_dir: Path) -> list[dict[str, Any]]:
    details = await asyncio.gather(
        *(_details(service, run_dir, state.model) for service in state.services)
    )
    return [
        {
            "service": service.service,
            "pid": service.pid,
            "healthy": service.healthy,
            "restarts": service.restarts,
            "last_exit": service.last_exit,
            "memory_mb": _memory_mb(service.pid),
            **detail,
        }
        for service, detail in zip(state.services, details, strict=True)
    ]


def _memory_mb(pid: int) -> float:
    """Resident memory of a process and its children, in units of 10^6 bytes."""
    if not pid:
        return 0.0
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return round(sum(p.memory_info().rss for p in family) / 1e6, 1)
    except psutil.NoSuchProcess:
        return 0.0


async def _details(service: ServiceState, run_dir: Path, model: str) -> dict[str, Any]:
    ask = {"engine": _engine, "tokenizer": _tokenizer, "kvcache": _kvcache, "offload": _offload}
    kind = service_of(service.service)
    if not service.healthy or kind not in ask:
        return {"model": "", "load": ""}
    target = socket_target(run_dir, kind, instance_of(service.service))
    async with connect(target) as channel:
        try:
            return await ask[kind](channel)
        except grpc.aio.AioRpcError as error:
            return {"model": "", "load": f"no answer: {error.code().name}"}


async def _engine(channel: grpc.aio.Channel) -> dict[str, Any]:
    stub = engine_pb2_grpc.EngineServiceStub(channel)
    info = await stub.DescribeEngine(engine_pb2.DescribeEngineRequest(), timeout=CALL_SECONDS)
    stream = stub.Load(engine_pb2.LoadRequest(), timeout=CALL_SECONDS)
    load = await anext(aiter(stream))
    stream.cancel()
    text = f"{load.running} running, {load.waiting} waiting, cache {load.kv_usage:.0%}"
    return {"model": info.model.name, "load": text}


async def _tokenizer(channel: grpc.aio.Channel) -> dict[str, Any]:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    request = tokenizer_pb2.DescribeTokenizerRequest()
    info = await stub.DescribeTokenizer(request, timeout=CALL_SECONDS)
    parsers = f"{info.reasoning_parser or 'none'}, {info.tool_call_parser or 'none'}"
    return {"model": info.model.name, "load": f"parsers {parsers}"}


async def _kvcache(channel: grpc.aio.Channel) -> dict[str, Any]:
    stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
    info = await stub.Stats(kvcache_pb2.StatsRequest(), timeout=CALL_SECONDS)
    used = f"{info.used_bytes / 1e6:.1f} of {info.capacity_bytes / 1e6:.0f} MB"
    return {"model": "", "load": f"{used}, {info.objects} objects, {info.sessions} sessions"}


async def _offload(channel: grpc.aio.Channel) -> dict[str, Any]:
    stub = offload_pb2_grpc.OffloadServiceStub(channel)
    info = await stub.DescribeOffload(offload_pb2.DescribeOffloadRequest(), timeout=CALL_SECONDS)
    size = sum(table.rows * table.row_bytes for table in info.tables)
    return {"model": "", "load": f"{len(info.tables)} tables, {size / 1e6:.1f} MB"}


def _print_table(rows: list[dict[str, Any]]) -> None:
    lines = [[str(row[column]) for column in COLUMNS] for row in rows]
    table = [[name.upper() for name in COLUMNS], *lines]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
