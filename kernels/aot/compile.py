"""Compile one variant for one target and read what it costs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from triton import knobs

from kernels.aot.stand_in import sample_launch, stand_in_for
from kernels.aot.variant import Variant
from kernels.backend import SHARED_KIB

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
BACKWARD = re.compile(r"\bBRA\S*\s.*?0x([0-9a-f]+)")


@dataclass(frozen=True)
class Report:
    """Cost of a compiled variant. `problem` is empty where it fits its target.

    stack_bytes: local memory of a thread, which holds its spills. loop_instructions: of the hot
    loop, 0 where it was not looked at. seconds: CPU time of compiling and reading the code.
    """

    label: str
    target: int
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    loop_instructions: int = 0
    loop_spills: int = 0
    problem: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compile_variant(variant: Variant, target: int, *, loops: bool = True) -> Report:
    """Compile for sm`target`, through Triton's cache; a failure to compile is a problem too.

    Without `loops` only code that has a stack is disassembled: without one nothing is spilled.
    One process must compile for one target only: Triton 3.6 keeps casts of the first it meets.
    """
    begin = _cpu_seconds()
    try:
        compiled = compiled_code(variant, target)
    except Exception as error:  # whatever the compiler raises is this variant's result
        return Report(variant.label, target, problem=f"{type(error).__name__}: {_last_line(error)}")
    with tempfile.NamedTemporaryFile(prefix="wh-aot-", suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        registers, stack = _resources(file.name)
        loop = hot_loop(_run("cuobjdump", "-sass", file.name)) if loops or stack else []
    loop_spills = sum(1 for text in loop if re.search(r"\b(LDL|STL)\b", text))
    shared = compiled.metadata.shared
    problem = "; ".join(_problems(shared, loop_spills, target))
    return Report(
        variant.label, target, registers, stack, shared, len(loop), loop_spills, problem,
        _cpu_seconds() - begin,
    )  # fmt: skip


def _cpu_seconds() -> float:
    """Of this process and the compilers that it has run."""
    return sum(os.times()[:4])


def _problems(shared: int, loop_spills: int, target: int) -> Iterator[str]:
    limit = SHARED_KIB[target] << 10
    if shared > limit:
        yield f"shared memory {shared} of {limit}"
    if loop_spills:
        yield f"{loop_spills} spill instructions in the hot loop"


def _last_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[-1][:200] if lines else ""


def compiled_code(variant: Variant, target: int) -> Any:
    """Triton's result for a launch of this variant on sm`target`, from its cache if it is there."""
    stand_in_for(target)
    arguments = sample_launch(variant)
    return variant.kernel.warmup(*arguments, grid=(1,), **variant.options)


def _run(tool: str, *arguments: str) -> str:
    command = [getattr(knobs.nvidia, tool).path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resources(cubin: str) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _run("cuobjdump", "-res-usage", cubin))
    assert found, "cuobjdump names no resources"
    return int(found[1]), int(found[2])


def hot_loop(sass: str) -> list[str]:
    """The instructions of the loop with the most tensor core work, or else of the longest.

    Of loops within each other that have such work the innermost counts: it runs most often.
    """
    rows = [(int(address, 16), text) for address, text in INSTRUCTION.findall(sass)]
    jumps = ((address, BACKWARD.search(text)) for address, text in rows)
    ranges = {(int(jump[1], 16), at) for at, jump in jumps if jump and int(jump[1], 16) < at}
    loops = {r: [text for at, text in rows if r[0] <= at <= r[1]] for r in ranges}
    work = {r: sum("MMA" in text for text in loop) for r, loop in loops.items()}
    innermost = [r for r in ranges if not any(work[i] and _within(i, r) for i in ranges)]
    hot = max(innermost, key=lambda r: (work[r], len(loops[r])), default=None)
    return loops[hot] if hot else []


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]
