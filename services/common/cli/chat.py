"""`warhorse chat`: one question, or a conversation at the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx

from services.common.cli.base import UserError, add_project
from services.common.supervisor.state import StackPaths, StackState

if TYPE_CHECKING:
    from services.common.cli.base import Subparsers


def add_commands(commands: Subparsers) -> None:
    """Register chat."""
    chat = commands.add_parser("chat", help="ask the served model")
    chat.add_argument("text", nargs="?", help="the question; without it a conversation starts")
    chat.add_argument("--url", help="of the gateway; default: the running stack")
    chat.add_argument("--max-tokens", type=int)
    chat.add_argument("--show-reasoning", action="store_true")
    add_project(chat).set_defaults(command=run_chat)


def run_chat(arguments: argparse.Namespace) -> int:
    """Print the answer as it comes."""
    url = (arguments.url or _running_url(arguments.project)).rstrip("/")
    messages: list[dict[str, str]] = []
    given = arguments.text
    for question in _questions() if given is None else [_valid_text(given)]:
        messages.append({"role": "user", "content": question})
        answer = _ask(url, messages, arguments)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _questions() -> Iterator[str]:
    while True:
        sys.stdout.write("> ")
        sys.stdout.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            sys.stdout.write("\n")
            return
        text = line.decode("utf-8", errors="replace").strip()
        if text:
            yield text


def _valid_text(argument: str) -> str:
    """An argument of the command line; bytes of it that are not UTF-8 become U+FFFD."""
    return os.fsencode(argument).decode("utf-8", errors="replace")


def _running_url(project: str) -> str:
    state = StackState.read(StackPaths.of(project).file)
    if state is None or not state.alive:
        raise UserError("nothing is running; start it with ./warhorse up, or give --url")
    return state.url


def _ask(url: str, messages: list[dict[str, str]], arguments: argparse.Namespace) -> str:
    body = {"messages": messages, "stream": True, "max_tokens": arguments.max_tokens}
    pieces = []
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(None, connect=5)
        ) as response:
            for delta in _deltas(response):
                if arguments.show_reasoning:
                    sys.stdout.write(delta.get("reasoning_content") or "")
                pieces.append(delta.get("content") or "")
                sys.stdout.write(pieces[-1])
                sys.stdout.flush()
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise UserError(f"{url}: {error}") from error
    sys.stdout.write("\n")
    return "".join(pieces)


def _deltas(response: httpx.Response) -> Iterator[dict[str, Any]]:
    if response.status_code != 200:
        raise UserError(_refusal(response))
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        frame = json.loads(line.removeprefix("data: "))
        if "error" in frame:
            raise UserError(_message(frame))
        yield from (choice["delta"] for choice in frame["choices"])


def _refusal(response: httpx.Response) -> str:
    """The message of an answer that is not a stream; other servers send other bodies."""
    try:
        return _message(json.loads(response.read()))
    except (ValueError, KeyError, TypeError):
        return f"{response.url} answered with status {response.status_code}"


def _message(body: dict[str, Any]) -> str:
    return str(body["error"]["message"])
