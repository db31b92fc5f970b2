"""The real tokenizer, the real engine front with a script, and the real gateway, as processes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.service_process import ROOT, RunDir, ServiceProcess, child_environment
from tests.tokenizer.support import byte_level_definition

MODEL = "scripted"
MAX_MODEL_LEN = 4096
TEMPLATE = ROOT / "services" / "engine" / "checkpoints" / "nano" / "chat_template.jinja"
TOKENIZER = "warhorse.v1.TokenizerService"
ENGINE = "warhorse.v1.EngineService"


def write_model_folder(folder: Path, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """config.json, a trained byte-level tokenizer, a chat template; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    definition = byte_level_definition()
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    size = len(definition["model"]["vocab"]) + len(definition["added_tokens"])
    text = {"vocab_size": size, "max_position_embeddings": max_model_len}
    config = {"model_type": "qwen4_exp", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return folder


class GatewayProcess:
    """`python -m services.gateway` on a free port."""

    def __init__(self, run_dir: Path, flags: Sequence[str] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in stop)
        command = [sys.executable, "-m", "services.gateway", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--run-dir", str(run_dir), *flags]
        self.process = subprocess.Popen(
            command, env=child_environment(), stderr=self._log, cwd=ROOT, text=True
        )

    def wait_until_healthy(self, seconds: float = 30.0) -> None:
        """Until /health says 200."""
        deadline = time.monotonic() + seconds
        while not self._healthy():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """Everything that it has logged."""
        self._log.seek(0)
        return self._log.read()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.terminate()
        status = self.process.wait(20)
        self._log.close()
        return status


@dataclass
class Pipeline:
    """All processes of a scripted deployment."""

    tokenizer: ServiceProcess
    engines: list[ServiceProcess]
    gateway: GatewayProcess
    run_dir: Path

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return self.gateway.url


@contextmanager
def running_pipeline(
    script: Sequence[dict[str, Any]],
    gateway_flags: Sequence[str] = (),
    engines: int = 1,
    max_model_len: int = MAX_MODEL_LEN,
) -> Iterator[Pipeline]:
    """Start everything and wait until requests can be served."""
    run = RunDir()
    with ExitStack() as stack:
        stack.callback(run.close)
        model = write_model_folder(run.path / "model", max_model_len)
        common = ["--model", str(model), "--served-model-name", MODEL]
        tokenizer = ServiceProcess("tokenizer", TOKENIZER, run.path, common)
        stack.callback(tokenizer.stop)
        tokenizer.start()
        file = run.path / "script.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in script))
        flags = [*common, "--engine", "scripted", "--script", str(file)]
        flags += ["--kvcache-address", "none", "--offload-address", "none"]
        started = []
        for number in range(engines):
            engine = ServiceProcess("engine", ENGINE, run.path, flags, f"engine-{number}")
            stack.callback(engine.stop)
            engine.start()
            started.append(engine)
        addresses = ",".join(engine.address for engine in started)
        gateway = GatewayProcess(run.path, ["--engine-address", addresses, *gateway_flags])
        stack.callback(gateway.stop)
        gateway.wait_until_healthy()
        yield Pipeline(tokenizer, started, gateway, run.path)
