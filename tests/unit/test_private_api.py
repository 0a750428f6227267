"""The simulator says at once when torch's private API is not what it knows."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from fsdp_doctor.simulator.private_api import NAMES, missing_names
from fsdp_doctor.simulator.request import DryRunRequest

torch = pytest.importorskip("torch")

SIMULATOR = Path(__file__).parent.parent.parent / "fsdp_doctor" / "simulator"


@pytest.mark.parametrize("strategy", NAMES)
def test_this_torch_has_all_names(strategy: str) -> None:
    """The tested version lacks nothing."""
    assert list(missing_names(strategy)) == []


@pytest.mark.parametrize(
    ("strategy", "module", "name"),
    [
        ("fsdp2", "torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty"),
        ("fsdp1", "torch.distributed.fsdp._flat_param", "_same_storage"),
        ("ddp", "torch.optim.optimizer", "_foreach_supported_types"),
    ],
)
def test_a_name_that_is_gone_is_named(
    strategy: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's version, before anything is patched; the run does not begin."""
    from fsdp_doctor.simulator.dry_run import answer

    monkeypatch.delattr(importlib.import_module(module), name)
    raw = {"name": "job", "world_size": 2, "config": {"strategy": strategy}}
    found = answer(DryRunRequest(spec=raw, rank=0, steps=1, workspace_bytes=0))
    assert found.estimate is None
    assert found.input_error is not None
    assert f"torch {torch.__version__} lacks {module}.{name}" in found.input_error


def test_what_compat_replaces_is_in_the_list() -> None:
    """Every attribute that ``compat`` replaces is looked for at start."""
    listed = {
        name.rpartition(":")[2].rpartition(".")[2] for names in NAMES.values() for name in names
    }
    calls = [
        node
        for node in ast.walk(ast.parse((SIMULATOR / "compat.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_replace"
    ]
    own = {"_check_can_pin"}
    replaced = {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}
    assert len(replaced) > 8
    assert replaced - own <= listed
