"""What the command refuses, and what it takes from the environment, before anything starts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.common.cli import up
from services.common.cli.main import main
from services.common.supervisor.state import StackState


@pytest.mark.parametrize("port", ["0", "-1", "65536", "abc", "1" * 30, "8000.5"])
def test_a_port_that_cannot_be_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", f"--port={port}"])
    assert f"--port: {port!r} is not a port" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "Upper", "a" * 64, "a\n"])
@pytest.mark.parametrize("command", [["up"], ["down"], ["status"], ["logs", "engine"], ["chat"]])
def test_a_project_that_is_no_folder_name_is_refused(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--project", name])
    assert "--project" in capsys.readouterr().err


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables with which `up` would start services."""
    found: dict[str, Any] = {}

    def foreground(_: object, __: object, variables: dict[str, str], ___: object) -> int:
        found.update(variables)
        return 0

    monkeypatch.setattr(up, "_foreground", foreground)
    monkeypatch.setattr(up, "_check_port", lambda host, port: None)
    return found


def test_settings_come_from_the_environment_and_flags_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, Any]
) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text("")
    monkeypatch.chdir(tmp_path)
    given = {"HOME": tmp_path, "MODEL": tmp_path, "PORT": 8123, "HOST": "127.0.0.2",
             "SERVED_MODEL_NAME": "org/model/x", "SCRIPT": script.name}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"WARHORSE_{name}", str(value))
    assert main(["up"]) == 0
    assert variables["WARHORSE_MODEL"] == str(tmp_path.resolve())
    assert variables["WARHORSE_PORT"] == "8123"
    assert variables["WARHORSE_GATEWAY_HOST"] == "127.0.0.2"
    assert variables["WARHORSE_SERVED_MODEL_NAME"] == "org/model/x"
    assert variables["WARHORSE_SCRIPT"] == str(script)
    assert main(["up", "--port", "8124", "--served-model-name", "y"]) == 0
    assert (variables["WARHORSE_PORT"], variables["WARHORSE_SERVED_MODEL_NAME"]) == ("8124", "y")


def test_a_home_that_cannot_hold_state_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "file"
    home.write_text("")
    monkeypatch.setenv("WARHORSE_HOME", str(home))
    assert main(["up"]) == 1
    assert "WARHORSE_HOME" in capsys.readouterr().err
    assert not variables


def test_only_one_up_of_a_project_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARHORSE_HOME", str(tmp_path))
    monkeypatch.setattr(up, "_check_port", lambda host, port: None)
    codes: list[int] = []

    def again(*_: object) -> int:
        monkeypatch.setattr(up, "_foreground", lambda *_: 0)
        codes.append(main(["up"]))
        return 0

    monkeypatch.setattr(up, "_foreground", again)
    assert main(["up"]) == 0
    assert codes == [1]
    assert "another `up`" in capsys.readouterr().err
    assert main(["up"]) == 0


@pytest.mark.parametrize("content", ["", '{"pid": 1', "[]", '{"pid": 1}', '{"services": [1]}'])
def test_a_damaged_report_counts_as_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "supervisor.json"
    file.write_text(content)
    assert StackState.read(file) is None


class Echo(BaseHTTPRequestHandler):
    """A chat endpoint that answers with the last message it got; other paths with HTML."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/chat/completions":
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"<html>")
            return
        delta = {"content": json.loads(body)["messages"][-1]["content"]}
        frame = {"choices": [{"delta": delta}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(frame)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("text", "echoed"), [("hi", "hi\n"), ("a\udcffb", "a\ufffdb\n"), ("", "\n")]
)
def test_chat_sends_any_argument(
    url: str, text: str, echoed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", f"{url}/", text]) == 0
    assert capsys.readouterr().out == echoed


@pytest.mark.parametrize("path", ["/elsewhere", ":x", "/\n"])
def test_chat_names_a_url_that_is_no_gateway(
    url: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", url + path, "hi"]) == 1
    assert capsys.readouterr().err.startswith("warhorse: http://127.0.0.1:")
