"""The checks behind `warhorse dev`: each returns 0 when it passes and says what is wrong."""

from __future__ import annotations

import ast
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from services.common.cli.base import UserError, say
from services.common.cli.settings_page import PAGE, settings_page
from services.common.cli.up import COMPOSE_FILE, compose_command
from services.common.supervisor.state import ROOT

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
FORBIDDEN_IMPORTS = ("pickle", "multiprocessing.shared_memory")


def run(*command: str, cwd: Path = ROOT, **environment: str) -> int:
    """Run a program in the checkout; its exit code."""
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, check=False).returncode


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def check_lint() -> int:
    """ruff's rules and format."""
    return max(run(_tool("ruff"), "check", "."), run(_tool("ruff"), "format", "--check", "."))


def check_types() -> int:
    """mypy, strict in services."""
    return run(sys.executable, "-m", "mypy", "services", "kernels")


def check_protos() -> int:
    """buf lint, and generated code equal to what the contracts give."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "protos"
        shutil.copytree(ROOT / "protos", copy)
        code = max(run(_tool("buf"), "lint", cwd=copy), generate(copy))
        names = [p.relative_to(copy) for p in copy.rglob("*") if p.name.endswith(GENERATED)]
        stale = [n for n in names if not _same(copy / n, ROOT / "protos" / n)]
    for name in stale:
        say(f"protos/{name} is stale; remake it with ./warhorse dev generate")
    return max(code, int(bool(stale)))


def generate(protos: Path) -> int:
    """Remake the gRPC code in a folder of protos."""
    return run(str(protos / "generate.sh"), PYTHON=sys.executable)


def _same(one: Path, other: Path) -> bool:
    return other.exists() and filecmp.cmp(one, other, shallow=False)


def check_compose() -> int:
    """The compose file against the specification's own program; needs no engine."""
    try:
        compose = compose_command()
    except UserError as error:
        say(str(error))
        return 1
    command = [*compose, "--file", str(COMPOSE_FILE), "config", "--quiet"]
    return run(*command, WARHORSE_MODEL="/")


def check_docs() -> int:
    """docs/configuration.md equal to what the settings give."""
    if PAGE.exists() and PAGE.read_text() == settings_page():
        return 0
    say(f"{PAGE.relative_to(ROOT)} is stale; remake it with ./warhorse dev generate")
    return 1


def check_imports() -> int:
    """No pickle, no named shared memory, no print in services."""
    faults = [fault for path in _sources() for fault in _import_faults(path)]
    for fault in faults:
        say(fault)
    return int(bool(faults))


def _import_faults(path: Path) -> Iterator[str]:
    relative = path.relative_to(ROOT)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom) and relative.parts[0] != "tests":
            for module in set(_modules(node)) & set(FORBIDDEN_IMPORTS):
                yield f"{relative}:{node.lineno}: imports {module}"
        in_service = relative.parts[0] == "services"
        if in_service and isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield f"{relative}:{node.lineno}: print in a service"


def _modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def check_sizes() -> int:
    """The ten largest files and functions; over the budget fails. GPU kernels may be long."""
    files = sorted(((len(p.read_text().splitlines()), p) for p in _sources()), reverse=True)
    functions = sorted((f for p in _sources() for f in _functions(p)), reverse=True)
    say("largest files:")
    for lines, path in files[:10]:
        say(f"  {lines:5}  {path.relative_to(ROOT)}")
    say("largest functions:")
    for lines, place in functions[:10]:
        say(f"  {lines:5}  {place}")
    long = [lines for lines, place in functions if "triton.py" not in place]
    return int(files[0][0] > MAX_FILE_LINES or max(long) > MAX_FUNCTION_LINES)


def _functions(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def _sources() -> list[Path]:
    folders = ("services", "kernels", "tests")
    found = (p for folder in folders for p in (ROOT / folder).rglob("*.py"))
    return sorted(p for p in found if "__pycache__" not in p.parts)


def check_hygiene() -> int:
    """The hooks of .pre-commit-config.yaml but for the one that runs these checks."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run(_tool("pre-commit"), "run", "--all-files", SKIP="checks", PATH=path)


CHECKS: dict[str, Callable[[], int]] = {
    "lint": check_lint,
    "types": check_types,
    "protos": check_protos,
    "compose": check_compose,
    "docs": check_docs,
    "imports": check_imports,
    "hygiene": check_hygiene,
    "sizes": check_sizes,
}
