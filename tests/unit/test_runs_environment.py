"""The facts about the machine that a run carries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsdp_doctor.profiler.environment import collect_environment, tf32_matmul


def test_tf32_is_read_through_the_newer_name_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that set ``fp32_precision`` may not be asked for ``allow_tf32``."""

    class Newer:
        fp32_precision = "tf32"

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mixed use of the old and the new name")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Newer())
    assert tf32_matmul()
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    assert not tf32_matmul()


def test_a_fact_that_cannot_be_had_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library raises when it is asked, the others' facts are there."""

    def broken() -> int:
        raise RuntimeError("no")

    monkeypatch.setattr(torch, "get_num_threads", broken)
    facts = collect_environment(torch.device("cpu"))
    assert facts["threads"] is None
    assert facts["torch"] == str(torch.__version__)


def test_variables_that_change_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches of Inductor, Dynamo and the TF32 override belong to the environment."""
    names = ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHDYNAMO_DISABLE", "NVIDIA_TF32_OVERRIDE")
    for name in names:
        monkeypatch.setenv(name, "1")
    variables = collect_environment(torch.device("cpu"))["variables"]
    assert {name: variables.get(name) for name in names} == dict.fromkeys(names, "1")
