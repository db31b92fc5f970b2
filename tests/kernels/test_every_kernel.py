"""Every operation with kernels has variants, benchmark cases, a graph test and a README."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from triton.runtime.jit import KernelInterface

from kernels.aot.registry import KERNELS
from kernels.aot.variant import Variant
from kernels.backend import TARGETS

# The ceiling of the benchmark, and steps that the attention kernels share.
WITHOUT_LAUNCHES = {"bench", "split_keys"}
OWNERS = {path.relative_to(KERNELS).parts[0] for path in KERNELS.rglob("triton.py")}
# mla has no kernel of its own: its launches are those of sparse_attention.
FOLDER = Path(__file__).parent
OPERATIONS = sorted(OWNERS - WITHOUT_LAUNCHES | {"mla"})
# For rows that are not whole words, which no released table has.
NOT_SHIPPED = {"gather_bytes"}
# The path of quant_linear and moe where its package is installed; their cases measure it.
MEASURED_BY_OTHERS = {"humming"}
GPU_MARK = "pytest.mark.gpu"

each_operation = pytest.mark.parametrize("operation", OPERATIONS)


def part(operation: str, module: str) -> ModuleType:
    return importlib.import_module(f"kernels.{operation}.{module}")


def variants_of(operation: str, target: int) -> list[Variant]:
    return list(part(operation, "variants").variants(target))


def test_the_operations_are_found() -> None:
    assert len(OPERATIONS) > 20 and {"moe", "quant_linear", "sampling"} <= set(OPERATIONS)


@each_operation
@pytest.mark.parametrize("target", TARGETS)
def test_variants_give_every_argument_once(operation: str, target: int) -> None:
    found = variants_of(operation, target)
    assert found
    for variant in found:
        given = [*variant.arguments, *variant.constants]
        assert sorted(given) == sorted(variant.kernel.arg_names), variant.label


@cache
def shipped_kernels() -> set[object]:
    """The kernels of all variants: an operation may launch another's."""
    return {variant.kernel.fn for op in OPERATIONS for variant in variants_of(op, TARGETS[0])}


@each_operation
def test_every_kernel_that_is_launched_has_a_variant(operation: str) -> None:
    launched = {
        kernel.fn
        for kernel in vars(part(operation, "launch")).values()
        if isinstance(kernel, KernelInterface) and kernel.fn.__name__ not in NOT_SHIPPED
    }
    assert launched <= shipped_kernels()


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - MEASURED_BY_OTHERS))
def test_the_benchmark_has_cases_of_its_own_names(operation: str) -> None:
    cases = list(part(operation, "bench").cases())
    assert cases
    assert {case.operation for case in cases} == {operation}
    assert len({case.name for case in cases}) == len(cases)


@each_operation
def test_a_readme_says_what_it_computes(operation: str) -> None:
    text = (KERNELS / operation / "README.md").read_text()
    assert text.startswith(f"# {operation}\n") and len(text.split()) > 40


@each_operation
def test_a_gpu_test_replays_a_captured_graph(operation: str) -> None:
    tests = [ast.parse(path.read_text()) for path in FOLDER.glob(f"test_{operation}_*.py")]
    # The name is what `-k graph` of docs/kernels.md selects.
    assert any("graph" in name for module in tests for name in replaying(module))


def replaying(module: ast.Module) -> Iterator[str]:
    """The names of tests for a card that capture a graph and replay it."""
    shared = [x.value for x in module.body if isinstance(x, ast.Assign) and names_marks(x)]
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = {
                ast.unparse(x) for top in (*node.decorator_list, *shared) for x in ast.walk(top)
            }
            calls = {ast.unparse(x.func) for x in ast.walk(node) if isinstance(x, ast.Call)}
            if GPU_MARK in marks and {"torch.cuda.graph", "graph.replay"} <= calls:
                yield node.name


def names_marks(assignment: ast.Assign) -> bool:
    return [ast.unparse(target) for target in assignment.targets] == ["pytestmark"]
