"""``check`` applies Megatron's rules to this tool's own Megatron specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.cli import main
from fsdp_doctor.config.spec import load_spec, spec_to_mapping
from fsdp_doctor.model.run import RunManifest
from fsdp_doctor.runs.writer import write_manifest

OLD, NEW = "megatron-core=0.16.1", "megatron-core=0.19.2"
DDP = "config.megatron.ddp"
SPEC = """world_size: 2
workload:
  model: {layers: 8, hidden: 2048, heads: 16, vocab: 32768}
config:
  strategy: megatron
  megatron:
"""
FSDP = "    dist: {use_megatron_fsdp: true}\n"
OVERLAP = "overlap_grad_reduce: true, overlap_param_gather: true"
ZERO3 = f"{FSDP}    ddp: {{{OVERLAP}, data_parallel_sharding_strategy: optim_grads_params"
OWN_FORMAT = "    checkpoint: {ckpt_format: fsdp_dtensor}\n"
SMALL_UNIT = "suggested_communication_unit_size: 100000000"


def check(
    capsys: pytest.CaptureFixture[str], path: Path, version: str | None = NEW
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run ``check --json``; return the exit status and the violations by rule."""
    versions = [] if version is None else ["--framework-version", version]
    status = main(["check", str(path), *versions, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["framework"] == "megatron-core"
    found = {violation["rule"]: violation for violation in answer["violations"]}
    found.pop("inert", None)  # Megatron-FSDP sets the overlaps itself: a note
    return status, found


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Return a function that writes a spec with these lines under ``config.megatron``."""

    def written(sections: str, more: str = "") -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(f"{SPEC}{sections}{more}")
        return path

    return written


@pytest.mark.parametrize(
    "sections",
    [
        "    ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true}\n",
        f"{ZERO3}, {SMALL_UNIT}}}\n{OWN_FORMAT}",
    ],
)
def test_nothing_is_found_in_sound_specs(
    capsys: pytest.CaptureFixture[str], write: Any, sections: str
) -> None:
    """The distributed optimizer, and ZeRO-3 in small units with its own format, break no rule."""
    assert check(capsys, write(sections)) == (0, {})


@pytest.mark.parametrize(
    ("sections", "rule", "severity", "field"),
    [
        (f"{ZERO3}}}\n", "MT003", "warning", f"{DDP}.suggested_communication_unit_size"),
        (
            f"{FSDP}    ddp: {{data_parallel_sharding_strategy: optim_grads, {SMALL_UNIT}}}\n",
            "MT004",
            "warning",
            f"{DDP}.data_parallel_sharding_strategy",
        ),
        (
            f"{ZERO3}, {SMALL_UNIT}, megatron_fsdp_main_grads_dtype: bfloat16}}\n",
            "MT005",
            "warning",
            f"{DDP}.megatron_fsdp_main_grads_dtype",
        ),
        (
            f"{FSDP}    ddp: {{outer_dp_sharding_strategy: optim}}\n",
            "MG046",
            "error",
            f"{DDP}.outer_dp_sharding_strategy",
        ),
        (
            "    model: {recompute_granularity: full}\n",
            "MG093",
            "error",
            "config.megatron.model.recompute_granularity",
        ),
    ],
)
def test_traps_are_told_by_the_specs_own_keys(  # noqa: PLR0917 (a table)
    capsys: pytest.CaptureFixture[str],
    write: Any,
    sections: str,
    rule: str,
    severity: str,
    field: str,
) -> None:
    """Each trap has its rule, the key as the spec spells it, and the line where it stands."""
    status, found = check(capsys, write(sections, OWN_FORMAT if "dist" in sections else ""))
    assert found[rule]["severity"] == severity
    assert field in found[rule]["fields"]
    assert found[rule]["line"] >= SPEC.count("\n") + 1
    assert status == (severity == "error")


@pytest.mark.parametrize(
    ("more", "severity", "field"),
    [
        ("", "warning", "config.megatron.checkpoint.ckpt_format"),
        (
            "    checkpoint: {ckpt_format: torch_dist}\n",
            "error",
            "config.megatron.checkpoint.ckpt_format",
        ),
        ("checkpoint: torch_dist\n", "error", "checkpoint"),
    ],
)
def test_a_format_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], write: Any, more: str, severity: str, field: str
) -> None:
    """An error where a format is written or asked for, a warning where it is only the default."""
    status, found = check(capsys, write(f"{ZERO3}, {SMALL_UNIT}}}\n", more))
    assert list(found) == ["MG024"]
    assert found["MG024"]["severity"] == severity
    assert field in found["MG024"]["fields"]
    assert status == (severity == "error")


def test_rules_follow_the_version(capsys: pytest.CaptureFixture[str], write: Any) -> None:
    """Wrong gradients of 0.16 are an error there only; so is the standalone package beside it."""
    sharded = "data_parallel_sharding_strategy: optim, overlap_grad_reduce: true"
    path = write(f"{FSDP}    ddp: {{{sharded}}}\n", OWN_FORMAT)
    assert "MG058" in check(capsys, path, OLD)[1]
    assert check(capsys, path, NEW)[1] == {}
    path.write_text("config: {strategy: megatron_fsdp}\n")
    assert "MG126" in check(capsys, path, OLD)[1]
    assert check(capsys, path, NEW)[1] == {}


def test_a_run_is_checked_by_the_version_it_ran_with(
    capsys: pytest.CaptureFixture[str], write: Any, tmp_path: Path
) -> None:
    """A run's spec is checked as a spec is, by the megatron-core that it recorded."""
    spec = load_spec(write(f"{FSDP}    ddp: {{overlap_param_gather: true}}\n", OWN_FORMAT))
    manifest = RunManifest(
        schema=1,
        name="x",
        tool_version="0",
        created="2026-01-01T00:00:00+00:00",
        status="completed",
        source="real_ranks",
        world_size=2,
        ranks=(0, 1),
        device_type="cpu",
        spec=spec_to_mapping(spec),
        environment={"torch": "2.13.0", "megatron_core": "0.16.1"},
    )
    (tmp_path / "run").mkdir()
    write_manifest(tmp_path / "run", manifest)
    status, found = check(capsys, tmp_path / "run", None)
    assert status == 1
    assert found["MG059"]["severity"] == "error"
