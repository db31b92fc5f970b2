"""`python -m services.engine` with a real model: front process, core process, gRPC."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.checkpoint import CheckpointError
from services.common.errors import from_rpc_error
from services.common.lifecycle import EXIT_CANNOT_START
from services.engine.assembly import Assembly
from services.engine.flags import EngineFlags
from tests.front.helpers import (
    VOCAB,
    failure_of,
    kinds,
    make_request,
    read_all,
    tokens_of,
    wait_until,
    write_script,
)
from tests.front.process import log_lines, running_engine, start_engine
from tests.models.tiny import save_tiny

POISONED_TOKEN = 77
PROMPT = [(7 * i) % 500 + 8 for i in range(150)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose embedding of one token is not a number."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "qwen4_exp", "bf16")
    name = "model.language_model.embed_tokens.weight"
    shard = (
        folder
        / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    )
    tensors = load_file(shard)
    tensors[name][POISONED_TOKEN] = torch.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    return folder


async def test_generation_cancel_abort_and_numeric_failure(tiny: Path) -> None:
    async with running_engine(tiny, "--max-num-batched-tokens", "64") as engine:
        first = await read_all(engine.stub.Generate(make_request(PROMPT), timeout=30))
        again = await read_all(engine.stub.Generate(make_request(PROMPT), timeout=30))
        assert kinds(first)[:2] == ["accepted", "prompt_done"]
        assert first[0].accepted.prompt_tokens == len(PROMPT)
        assert len(tokens_of(first)) == first[-1].finished.completion_tokens
        assert tokens_of(first) == tokens_of(again)
        assert again[1].prompt_done.cached_tokens >= 64
        await engine.wait_until_idle()

        long_prompt = [(11 * i) % 500 + 8 for i in range(3000)]
        call = engine.stub.Generate(make_request(long_prompt), timeout=30)
        assert (await anext(aiter(call))).HasField("accepted")
        call.cancel()  # in the middle of 47 chunks of prefill
        await engine.wait_until_idle()

        call = engine.stub.Generate(
            make_request(PROMPT, stopping__max_tokens=3000, stopping__ignore_eos=True), timeout=30
        )
        async for event in call:
            if event.HasField("chunk"):
                break
        call.cancel()
        await engine.wait_until_idle()

        good = engine.stub.Generate(
            make_request(PROMPT, stopping__max_tokens=40, request_id="good"), timeout=30
        )
        bad = engine.stub.Generate(make_request([9, POISONED_TOKEN, 10]), timeout=30)
        bad_events, good_events = await asyncio.gather(read_all(bad), read_all(good))
        assert bad_events[-1].finished.reason == FinishReason.FINISH_REASON_ERROR
        assert bad_events[-1].finished.error == ErrorReason.ERROR_REASON_NUMERIC
        assert tokens_of(good_events) == tokens_of(first)[:40]
        await engine.wait_until_idle()


async def test_traces_of_the_steps_are_written_on_demand(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    async with running_engine(tiny, "--profile-dir", str(folder)) as engine:

        async def switch(start: bool) -> str:
            request = pb.ProfileEngineRequest(start=start)
            return (await engine.stub.ProfileEngine(request, timeout=60)).file

        async def refusal(start: bool) -> str:
            with pytest.raises(grpc.RpcError) as caught:
                await switch(start)
            error = from_rpc_error(caught.value)
            assert error.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
            return error.message

        assert "no trace" in await refusal(start=False)
        assert await switch(start=True) == ""
        assert "already" in await refusal(start=True)
        short = make_request(PROMPT[:8], stopping__max_tokens=2)
        await read_all(engine.stub.Generate(short, timeout=30))
        names = [await switch(start=False)]
        assert [file.name for file in folder.iterdir()] == names
        trace = json.loads(gzip.decompress((folder / names[0]).read_bytes()))
        assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) > 10
        assert tokens_of(await read_all(engine.stub.Generate(short, timeout=30)))


async def test_64_at_once_get_what_each_gets_alone(tiny: Path) -> None:
    prompts = [[(i * 13 + j * 7) % 400 + 80 for j in range(1 + i % 9)] for i in range(64)]
    async with running_engine(tiny, "--max-num-seqs", "64") as engine:

        async def answer(prompt: list[int]) -> list[int]:
            request = make_request(prompt, stopping__max_tokens=8)
            return tokens_of(await read_all(engine.stub.Generate(request, timeout=60)))

        together = await asyncio.gather(*(answer(prompt) for prompt in prompts))
        alone = [await answer(prompt) for prompt in prompts[::16]]
        assert together[::16] == alone
        assert all(together)
        await engine.wait_until_idle()


async def test_killed_core_is_reported_and_replaced(tiny: Path) -> None:
    async with running_engine(tiny) as engine:
        endless = make_request(PROMPT, stopping__max_tokens=3000, stopping__ignore_eos=True)
        calls = [engine.stub.Generate(endless, timeout=60) for _ in range(3)]
        for call in calls:
            async for event in call:
                if event.HasField("chunk"):
                    break
        core = engine.core_pid()
        os.kill(core, signal.SIGKILL)
        started = time.monotonic()
        errors = await asyncio.gather(*(failure_of(call) for call in calls))
        assert time.monotonic() - started < 5.0
        assert {e.reason for e in errors} == {ErrorReason.ERROR_REASON_ENGINE_LOST}
        await engine.wait_until_serving()
        assert engine.core_pid() != core
        events = await read_all(engine.stub.Generate(make_request(PROMPT), timeout=30))
        assert tokens_of(events)
        await engine.wait_until_idle()


async def test_core_dies_with_a_killed_front(tiny: Path) -> None:
    async with running_engine(tiny) as engine:
        core = engine.core_pid()
        os.kill(engine.process.pid, signal.SIGKILL)
        await wait_until(lambda: not Path(f"/proc/{core}").exists(), seconds=2.0)


async def test_sigterm_lets_the_running_request_finish(tiny: Path) -> None:
    async with running_engine(tiny) as engine:
        request = make_request(PROMPT, stopping__max_tokens=150, stopping__ignore_eos=True)
        call = engine.stub.Generate(request, timeout=60)
        assert (await anext(aiter(call))).HasField("accepted")
        engine.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: "draining" in engine.log.read_text())
        late = await failure_of(engine.stub.Generate(make_request(PROMPT), timeout=30))
        assert late.reason in (
            ErrorReason.ERROR_REASON_DRAINING,
            ErrorReason.ERROR_REASON_ENGINE_LOST,
        )
        events = await read_all(call)
        assert len(tokens_of(events)) == 150
        assert engine.process.wait(20) == 0


def maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


async def test_front_and_scripted_engine_run_without_torch(
    tiny: Path, model_folder: Path, tmp_path: Path
) -> None:
    async with running_engine(tiny) as engine:
        assert maps_torch(engine.core_pid())
        assert not maps_torch(engine.process.pid)
    script = write_script(tmp_path / "script.jsonl", {"when": {}, "text": "hello"})
    flags = ("--engine", "scripted", "--script", str(script))
    async with running_engine(model_folder, *flags) as engine:
        events = await read_all(engine.stub.Generate(make_request(), timeout=10))
        assert len(tokens_of(events)) == 5
        assert kinds(events).count("chunk") == 5
        assert not maps_torch(engine.process.pid)
        answer = await engine.describe()
        assert (answer.model.vocab_size, answer.model.name) == (VOCAB, "test-model")
        assert len(answer.model.tokenizer_sha256) == 64


def test_malformed_script_is_refused_at_start(
    model_folder: Path, tmp_path: Path, run_dir: Path
) -> None:
    script = write_script(tmp_path / "script.jsonl", {"text": "a"}, {"text": "b", "colour": 1})
    flags = ("--engine", "scripted", "--script", str(script))
    process = start_engine(model_folder, run_dir, *flags, log=tmp_path / "log")
    assert process.wait(60) == EXIT_CANNOT_START
    (line,) = log_lines(tmp_path / "log")
    assert line["level"] == "critical"
    assert "line 2" in line["message"]
    assert "colour" in line["message"]


async def test_describe_tells_what_runs(tiny: Path) -> None:
    async with running_engine(tiny, "--max-model-len", "1024") as engine:
        answer = await engine.describe()
    assert answer.model.name == "test-model"
    assert answer.model.family == "qwen4_exp"
    assert answer.model.max_model_len == 1024
    assert len(answer.model.fingerprint) == 64
    assert answer.weight_bytes > 1 << 20
    assert {g.kind for g in answer.cache_groups} == {"paged", "state"}
    assert all(g.total_pages == g.free_pages + g.cached_pages for g in answer.cache_groups)
    assert answer.device == "cpu"
    assert not answer.regions_pinned
    assert not answer.kvcache_connected


# Checkpoints that cannot be loaded: what is done to a good one, and what the log must name.


def missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def truncated_shard(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MysteryForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


def wrong_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_key_value_heads"] = 1
    (folder / "config.json").write_text(json.dumps(config))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


Damage = Callable[[Path], None]
DAMAGES: list[tuple[Damage, list[str]]] = [
    (missing_shard, ["model-00002-of-00002.safetensors"]),
    (truncated_shard, ["model-00001-of-00002.safetensors", "tensor"]),
    (unknown_architecture, ["MysteryForCausalLM", "config.json"]),
    (wrong_shape, ["layers.3.self_attn.k_proj.weight", "[128, 128]", "[64, 128]", "safetensors"]),
    (no_config, ["config.json"]),
]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="wh-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_damaged_checkpoint_is_named_with_file_and_tensor(
    tiny: Path, tmp_path: Path, damage: Damage, words: list[str]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    damage(folder)
    flags = EngineFlags(model=folder, kvcache_address="none", offload_address="none")
    with pytest.raises(CheckpointError) as caught:
        Assembly.build(flags)
    for word in words:
        assert word in str(caught.value)


def test_damaged_checkpoint_ends_the_service_with_one_log_line(
    tiny: Path, tmp_path: Path, run_dir: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    wrong_shape(folder)
    process = start_engine(folder, run_dir, log=tmp_path / "log")
    try:
        assert process.wait(60) == EXIT_CANNOT_START
    finally:
        process.kill()
    lines = log_lines(tmp_path / "log")
    assert not any("exception" in line for line in lines)
    (refusal,) = [line for line in lines if line["service"] == "engine-core"]
    assert refusal["level"] == "critical"
    for word in ("k_proj.weight", "safetensors", "[64, 128]"):
        assert word in refusal["message"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tensor-parallel-size", "2"], ["--tensor-parallel-size", "2", "only 1"]),
        (["--pipeline-parallel-size", "4"], ["--pipeline-parallel-size", "4", "only 1"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "0"]),
        (["--engine", "scripted"], ["--script"]),
        (["--device", "tpu"], ["--device", "tpu", "auto, cpu, cuda"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_bad_flag_is_refused(
    tmp_path: Path, run_dir: Path, flags: list[str], words: list[str]
) -> None:
    process = start_engine(tmp_path, run_dir, *flags, log=tmp_path / "log")
    assert process.wait(60) == 2
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    for word in words:
        assert word in text


def test_settings_that_do_not_fit_are_refused(tiny: Path, tmp_path: Path, run_dir: Path) -> None:
    flags = ("--max-model-len", "100000")
    process = start_engine(tiny, run_dir, *flags, log=tmp_path / "log")
    assert process.wait(60) == EXIT_CANNOT_START
    message = next(x["message"] for x in log_lines(tmp_path / "log") if x["level"] == "critical")
    assert "max_model_len" in message
    assert "100000" in message
