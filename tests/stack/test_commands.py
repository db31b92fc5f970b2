"""What a user types: up, status, chat, curl, down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

from services.common.supervisor.state import ROOT
from tests.stack.conftest import SERVICES, Stack, free_port, running

pytestmark = pytest.mark.slow

BODY = {"messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0}


def test_status_lists_five_healthy_processes(stack: Stack) -> None:
    rows = stack.status()
    assert set(rows) == set(SERVICES)
    assert all(row["healthy"] and row["pid"] > 0 and row["memory_mb"] > 1 for row in rows.values())
    assert rows["engine"]["model"] == "nano-qwen3.8-flash-next"
    table = stack.command("status").stdout.splitlines()
    assert table[0].split()[:3] == ["SERVICE", "PID", "HEALTHY"]
    assert len(table) == 6


def test_chat_answers_the_sum(stack: Stack) -> None:
    done = stack.command("chat", "What is 23 + 58?")
    assert done.returncode == 0, done.stderr
    assert "81" in done.stdout


def test_curl_gets_the_answer_whole_and_as_a_stream(stack: Stack) -> None:
    curl = ["curl", "-sS", f"{stack.url}/v1/chat/completions", "-H",
            "Content-Type: application/json", "-d"]  # fmt: skip
    whole = json.loads(subprocess.check_output([*curl, json.dumps(BODY)]))
    message = whole["choices"][0]["message"]
    assert "81" in message["content"]
    output = subprocess.check_output([*curl, json.dumps({**BODY, "stream": True})], text=True)
    frames = [line.removeprefix("data: ") for line in output.splitlines() if line]
    assert frames[-1] == "[DONE]"
    deltas = [json.loads(f)["choices"][0]["delta"] for f in frames[:-1]]
    for name in ("content", "reasoning_content"):
        joined = "".join(delta.get(name) or "" for delta in deltas)
        assert joined == message[name]


def test_up_twice_is_refused_and_the_first_goes_on(stack: Stack) -> None:
    again = stack.up()
    assert again.returncode == 1
    assert "already running" in again.stderr
    assert stack.command("chat", "What is 2 + 3?").returncode == 0


def test_a_port_in_use_is_named(stack: Stack, tmp_path: Path) -> None:
    other = Stack(tmp_path, port=stack.port)
    refused = other.up()
    assert refused.returncode == 1
    assert f"--port {stack.port}" in refused.stderr


def test_up_in_the_foreground_prints_url_and_curl_line_and_ctrl_c_stops_all(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    terminal = subprocess.Popen(
        [str(ROOT / "warhorse"), "up", "--port", str(stack.port)], env=stack.environment, cwd=ROOT,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert terminal.stdout is not None
    try:
        assert stack.url in terminal.stdout.readline()
        curl = terminal.stdout.readline()
        answer = json.loads(subprocess.check_output(["sh", "-c", f"{curl.strip()} -sS"]))
        assert answer["choices"][0]["message"]["content"]
        pids = [row["pid"] for row in stack.report().values()]
    finally:
        os.killpg(terminal.pid, signal.SIGINT)  # what a terminal does
    assert terminal.wait(30) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not stack.paths.run.exists()


def test_up_works_at_once_after_the_supervisor_was_killed_in_mid_stream(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "home")
    with running(stack):
        old = [row["pid"] for row in stack.status().values()]
        body = {**BODY, "stream": True, "max_tokens": 3000, "ignore_eos": True}
        request = Request(
            f"{stack.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=30) as stream:
            stream.readline()
            os.kill(json.loads(stack.paths.file.read_text())["pid"], signal.SIGKILL)
            again = stack.up()
        assert again.returncode == 0, again.stderr
        assert not [pid for pid in old if psutil.pid_exists(pid)]
        rows = stack.status()
        assert all(row["healthy"] and "no answer" not in row["load"] for row in rows.values())
        assert "81" in stack.command("chat", "What is 23 + 58?").stdout


def test_a_scripted_engine_replays_text_byte_for_byte(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    text = "why\n</think>\n\nLook 🐎.\n\n<tool_call>\n<function=f>\n<parameter=a>\nx y\n" \
           "</parameter>\n</function>\n</tool_call><|im_end|>"  # fmt: skip
    line = {"when": {}, "text": text, "token_ids": None, "chunk": 1, "delay_ms": 0,
            "finish_reason": "stop"}  # fmt: skip
    script.write_text(json.dumps(line) + "\n")
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "string"}}}}}  # fmt: skip
    stack = Stack(tmp_path / "home", port=free_port())
    with running(stack, "--engine", "scripted", "--script", str(script)):
        answer = stack.client().chat.completions.create(
            model="nano-qwen3.8-flash-next",
            messages=[{"role": "user", "content": "go"}],
            tools=[tool],  # type: ignore[list-item]
        )
        message = answer.choices[0].message
        assert message.content == "Look 🐎."
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "why"
        assert message.tool_calls is not None
        assert message.tool_calls[0].to_dict()["function"] == {
            "name": "f", "arguments": '{"a": "x y"}',
        }  # fmt: skip
        assert answer.choices[0].finish_reason == "tool_calls"
