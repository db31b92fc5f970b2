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
OPERATIONS = sorted(OWNERS - WITHOUT_LAUNCHES | {"mla"})
# For rows that are not whole words, which no released table has.
NOT_SHIPPED = {"gather_bytes"}
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


@each_operation
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
    tests = Path(__file__).with_name(f"test_{operation}_triton.py")
    named = [function.name for function in replaying(ast.parse(tests.read_text()))]
    assert named
    assert all("graph" in name for name in named)  # what `-k graph` of docs/kernels.md selects


def replaying(module: ast.Module) -> Iterator[ast.FunctionDef]:
    """The tests for a card that capture a graph and replay it."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            calls = {ast.unparse(c.func) for c in ast.walk(node) if isinstance(c, ast.Call)}
            marked = GPU_MARK in {ast.unparse(mark) for mark in node.decorator_list}
            if marked and "torch.cuda.graph" in calls and "graph.replay" in calls:
                yield node
