"""Compile one variant for one target and read what it costs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.aot.variant import Variant

KIB = 1024
# Shared memory of one block, bytes: CUDA programming guide, limits by compute capability.
SHARED_LIMIT = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB}
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
BACKWARD = re.compile(r"\bBRA\S*\s.*?0x([0-9a-f]+)")


@dataclass(frozen=True)
class Report:
    """Cost of a compiled variant. `problem` is empty where it fits its target."""

    label: str
    target: int
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    loop_instructions: int = 0
    loop_spills: int = 0
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compile_variant(variant: Variant, target: int) -> Report:
    """Compile for sm`target`, through Triton's cache; a failure to compile is a problem too.

    One process must compile for one target only: Triton 3.6 keeps casts of the first it meets.
    """
    try:
        compiled = _compile(variant, target)
    except Exception as error:  # whatever the compiler raises is this variant's result
        return Report(variant.label, target, problem=f"{type(error).__name__}: {_last_line(error)}")
    registers, spills = _resources(compiled.asm["ptx"], target)
    loop = _hot_loop(_disassemble(compiled.asm["cubin"]))
    loop_spills = sum(1 for text in loop if re.search(r"\b(LDL|STL)\b", text))
    shared = compiled.metadata.shared
    problems = []
    if shared > SHARED_LIMIT[target]:
        problems.append(f"shared memory {shared} of {SHARED_LIMIT[target]}")
    if loop_spills:
        problems.append(f"{loop_spills} spill instructions in the hot loop")
    return Report(
        variant.label, target, registers, spills, shared, len(loop), loop_spills,
        "; ".join(problems),
    )  # fmt: skip


def _last_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[-1][:200] if lines else ""


def _compile(variant: Variant, target: int) -> Any:
    names = variant.kernel.arg_names
    signature = {name: variant.arguments.get(name, "constexpr") for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in names if name in variant.aligned
    }
    source = ASTSource(variant.kernel, signature, variant.constants, attributes)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [getattr(knobs.nvidia, tool).path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def _resources(ptx: str, target: int) -> tuple[int, int]:
    """Registers of a thread and bytes spilled: the assembler says so, the cubin does not."""
    with tempfile.TemporaryDirectory(prefix="wh-aot-") as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        name = f"sm_{target}{'a' if target >= 90 else ''}"
        output = str(Path(folder, "kernel.cubin"))
        log = _run("ptxas", "-v", f"--gpu-name={name}", str(source), "-o", output).stderr
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return int(registers[0]), sum(map(int, spills))


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(prefix="wh-aot-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("cuobjdump", "-sass", file.name).stdout


def _hot_loop(sass: str) -> list[str]:
    """The instructions of the loop with the most tensor core work, or else of the longest."""
    rows = [(int(address, 16), text) for address, text in INSTRUCTION.findall(sass)]
    loops = []
    for address, text in rows:
        jump = BACKWARD.search(text)
        if jump and int(jump[1], 16) < address:
            start = int(jump[1], 16)
            loops.append([text for at, text in rows if start <= at <= address])
    return max(loops, key=lambda loop: (sum("MMA" in text for text in loop), len(loop)), default=[])
