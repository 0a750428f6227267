"""Imports point one way, and torch is imported only where training happens."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "fsdp_doctor"

SHARED = {"errors", "units", "redact", "gpus", "gpus_table", "__init__"}
MAY_IMPORT = {
    "model": set(),
    "runs": {"model"},
    "memory": {"model"},
    "logs": {"model"},
    "training": {"model"},
    "config": {"model", "runs"},
    "postmortem": {"model", "memory", "logs", "runs", "config"},
    "jobs": {"model", "logs", "runs", "config", "postmortem"},
    "profiler": {"model", "runs", "memory", "training", "config"},
    "simulator": {"model", "memory", "training", "config", "profiler"},
    "attribution": {"model", "runs", "config"},
    "fit": {"model", "runs", "config", "profiler", "simulator"},
    "report": {"model", "runs", "config", "attribution", "logs", "postmortem"},
    "cli": {
        "model",
        "runs",
        "config",
        "memory",
        "attribution",
        "jobs",
        "report",
        "profiler",
        "postmortem",
        "simulator",
        "fit",
    },
}
"""Package -> packages it may import, besides itself and the shared small files."""

TRAINING_SIDE = ("training/", "profiler/", "simulator/")
TORCH_FREE = (
    "launch",
    "plan",
    "ranks",
    "spawn",
    "supervise",
    "estimate",
    "request",
    "summarise",
    "roofline",
    "collectives",
    "tape",
    "extend",
)
HEAVY = {"torch", "pandas", "matplotlib", "scipy", "deepdiff"}


SOURCES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Return the modules a file imports, anywhere in it or (``top_level_only``) when imported."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    """A package imports only packages below it."""
    own = path.relative_to(PACKAGE).parts[0]
    if own not in MAY_IMPORT:
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "fsdp_doctor" and len(parts) > 1:
            assert parts[1] in MAY_IMPORT[own] | {own} | SHARED, f"{path}: {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_stays_where_training_happens(path: Path) -> None:
    """Only training, profiler and simulator import torch, and of those not what launches it."""
    relative = str(path.relative_to(PACKAGE))
    uses_torch = any(name.split(".")[0] == "torch" for name in imports(path))
    if uses_torch:
        assert relative.startswith(TRAINING_SIDE)
        assert path.stem not in TORCH_FREE


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_libraries_are_imported_where_they_are_used(path: Path) -> None:
    """Outside training no module imports torch, pandas, matplotlib, scipy or deepdiff on top."""
    if str(path.relative_to(PACKAGE)).startswith(TRAINING_SIDE):
        return
    top = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert not top & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["profile", "--help"], ["compare", "--help"], ["report", "--help"]],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """Help and version of every command load no heavy library."""
    program = (
        "import sys; from fsdp_doctor.cli import main; code = main(sys.argv[1:]); "
        f"print(sorted({HEAVY!r} & set(sys.modules)), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] 0"
