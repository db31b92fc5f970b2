"""Time from `./warhorse up` to a stack that answers: `./warhorse bench start [--rounds 3]`.

Each round starts the five processes on the default model with the command that users type, waits
until it returns, asks one question and stops the stack. The clock runs from before the command,
so the interpreter's start and the check of the installed packages count.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import httpx

from services.common.supervisor.state import ROOT

QUESTION = {"messages": [{"role": "user", "content": "What is 23 + 58?"}], "max_tokens": 1}


def main() -> None:
    """Print one line per round and the median."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    times = []
    with tempfile.TemporaryDirectory(prefix="wh-") as home:
        for number in range(rounds):
            ready, answered = one_start(home)
            times.append(ready)
            say(f"round {number + 1}: ready after {ready:.1f} s, answered after {answered:.1f} s")
    say(f"median: ready after {statistics.median(times):.1f} s")


def one_start(home: str) -> tuple[float, float]:
    """Seconds until `up` returned and until the first answer."""
    environment = {**os.environ, "WARHORSE_HOME": home}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(ROOT / "warhorse"), "up", "--detach", "--port", str(port)]
    began = time.monotonic()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    ready = time.monotonic() - began
    try:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        httpx.post(url, json=QUESTION, timeout=60).raise_for_status()
        return ready, time.monotonic() - began
    finally:
        down = [str(ROOT / "warhorse"), "down"]
        subprocess.run(down, env=environment, check=True, stdout=subprocess.DEVNULL)


def say(text: str) -> None:
    """A line for the reader."""
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
