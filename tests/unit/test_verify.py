"""``verify``: rules before training, the twin under plain DDP, and what counts as agreement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.cli import main
from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.profiler.verification import _agreement, _small, _twin

FSDP = {"dist": {"use_megatron_fsdp": True}, "model": {"bf16": True}}


def spec(**config: Any) -> ProfileSpec:
    """Return a spec with this config."""
    return spec_from_mapping({"name": "x", "config": config}, "x.yaml")


def test_torch_dist_under_megatron_fsdp_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint format that does not fit ends with status 1 and the rule, without training."""
    path = tmp_path / "s.yaml"
    path.write_text(
        "config:\n  strategy: megatron\n  megatron:\n    dist: {use_megatron_fsdp: true}\n"
        "    ddp: {data_parallel_sharding_strategy: optim_grads_params}\n"
    )
    assert main(["verify", str(path), "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["verification"]
    assert found["verdict"] == "failed"
    assert found["checkpoint"] == "torch_dist"
    failed = [check for check in found["checks"] if check["status"] == "failed"]
    assert any(check["rule"] == "MG024" for check in failed)
    unseen = [check["name"] for check in found["checks"] if check["status"] == "not_checked"]
    assert unseen == ["memory", "communication"]


def test_twin_is_plain_ddp_in_the_same_precision() -> None:
    """The twin keeps model, batches and gradient dtype, and drops everything that shards."""
    asked = spec(
        strategy="megatron",
        megatron={**FSDP, "ddp": {"megatron_fsdp_main_grads_dtype": "float32"}},
    )
    twin = _twin(_small(asked, 2, "cpu"))
    assert twin.config.megatron.engine == "megatron_ddp"
    assert twin.config.megatron.ddp.grad_reduce_in_fp32 is True
    assert twin.config.megatron.model == asked.config.megatron.model
    assert twin.workload == asked.workload
    assert twin.checkpoint is None


def test_torch_twin_computes_in_the_policys_dtype() -> None:
    """An FSDP2 policy in bf16 is compared with DDP under bf16 autocast, its norm computed."""
    asked = spec(strategy="fsdp2", fsdp2={"mp_policy": {"param_dtype": "bfloat16"}})
    small = _small(asked, 2, "cpu")
    twin = _twin(small)
    assert small.config.optimizer.max_grad_norm == 1e9
    assert (twin.config.strategy, twin.config.precision.autocast) == ("ddp", "bfloat16")
    assert small.checkpoint == "torch_dcp"


@pytest.mark.parametrize(
    ("ours", "status"),
    [
        ({0: 1.0, 1: 2.0}, "passed"),
        ({0: 1.0, 1: 2.01}, "passed"),
        ({0: 1.414, 1: 2.0}, "failed"),
        ({0: float("nan"), 1: 2.0}, "failed"),
        ({}, "not_checked"),
    ],
)
def test_agreement(ours: dict[int, float], status: str) -> None:
    """Norms agree within one percent in bf16; the worst step decides; nothing is not a pass."""
    asked = spec(strategy="megatron", megatron=FSDP)
    assert _agreement("gradients", ours, {0: 1.0, 1: 2.0}, asked).status == status
