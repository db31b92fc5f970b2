"""The data-plane benchmark runs to its end and prints every figure."""

from __future__ import annotations

import subprocess
import sys


def test_the_benchmark_prints_hops_and_ratios() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.shm"]
    sizes = ["--tensor-mib", "2", "--rounds", "2", "--hops", "50"]
    done = subprocess.run(
        command + sizes,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    lines = done.stdout.splitlines()
    for start in ("ring hop, asleep: p50", "ring hop, polling: p50", "2 MiB, memcpy, private: p50"):
        assert any(line.startswith(start) for line in lines)
    assert sum("x memcpy" in line for line in lines) == 4
