"""The command ``check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_files import GOLDEN, assert_golden

from fsdp_doctor.cli import main

SCRIPT = GOLDEN / "check_megatron.sh"
VIOLATION = {
    "rule",
    "severity",
    "fields",
    "values",
    "message",
    "fix",
    "versions",
    "source",
    "file",
    "line",
}


def run_json(capsys: pytest.CaptureFixture[str], status: int, *args: str) -> dict[str, Any]:
    """Run ``check --json``, expect an exit status, and return what it prints."""
    assert main(["check", *args, "--json"]) == status
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("name", "golden", "args"),
    [
        ("check_accelerate.yaml", "check_accelerate.txt", []),
        (
            "check_megatron.sh",
            "check_megatron.txt",
            ["--framework-version", "megatron-core=0.19.2", "--gpu", "h100", "--world-size", "8"],
        ),
    ],
)
def test_text_at_80_columns(
    name: str,
    golden: str,
    args: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The terminal text of two configs is as recorded, and no line is too long."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(GOLDEN)
    assert main(["check", name, *args]) == 1
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert_golden(golden, printed)


def test_json_has_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of a violation is there; errors come first."""
    result = run_json(capsys, 1, str(SCRIPT), "--framework-version", "megatron-core=0.19.2")
    assert (result["schema"], result["command"]) == (1, "check")
    first = result["violations"][0]
    assert set(first) == VIOLATION
    assert first["severity"] == "error"
    rules = {violation["rule"] for violation in result["violations"]}
    assert {"MG023", "MG027", "MG101", "MT003"} <= rules


def test_versions_decide(capsys: pytest.CaptureFixture[str]) -> None:
    """The same script breaks other rules in another version."""
    args = (str(SCRIPT), "--framework-version", "megatron-lm=0.17")
    rules = {violation["rule"] for violation in run_json(capsys, 1, *args)["violations"]}
    assert "MT001" in rules
    assert "MT001a" not in rules


def test_warnings_alone_do_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 is for errors only."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 8}))
    result = run_json(capsys, 0, str(path), "--framework-version", "deepspeed=0.19.5")
    assert [v["rule"] for v in result["violations"]] == ["DS007"]


def test_files_joined_by_plus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer's file and a DeepSpeed file are each checked by their own rules."""
    trainer, engine = tmp_path / "args.yaml", tmp_path / "ds.json"
    trainer.write_text("per_device_train_batch_size: 1\nbf16: true\nfp16: true\noutput_dir: x\n")
    engine.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
            }
        )
    )
    result = run_json(capsys, 1, f"{trainer}+{engine}")
    assert {"HF016", "DS001"} <= {v["rule"] for v in result["violations"]}


def test_a_spec_that_torch_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A spec that cannot be resolved is checked by what is written in it."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "world_size: 8\nconfig:\n  strategy: fsdp1\n  fsdp1: {sharding_strategy: HYBRID_SHARD}\n"
    )
    result = run_json(capsys, 1, str(path))
    assert "PT001" in {v["rule"] for v in result["violations"]}


def test_a_sound_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing found is said in one line, with status 0."""
    path = tmp_path / "spec.yaml"
    path.write_text("world_size: 8\nconfig: {strategy: fsdp2}\n")
    assert main(["check", str(path)]) == 0
    assert "Nothing found by" in capsys.readouterr().out


def test_keys_without_effect_are_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A written key that the resolver knows to be inert is noted once, with place and reason."""
    path = tmp_path / "spec.yaml"
    path.write_text("world_size: 8\nconfig:\n  strategy: ddp\n  optimizer: {momentum: 0.5}\n")
    result = run_json(capsys, 0, str(path))
    assert [v["rule"] for v in result["violations"]] == ["PT019"]
    path.write_text(
        "world_size: 8\nconfig:\n  strategy: ddp\n"
        "  gradient_accumulation: {steps: 1, sync: last_microbatch}\n"
    )
    (note,) = run_json(capsys, 0, str(path))["violations"]
    assert (note["rule"], note["severity"], note["line"]) == ("inert", "note", 4)
    assert "one micro step" in note["message"]


def test_undecided_rules_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text names the option that would decide them."""
    path = tmp_path / "args.yaml"
    path.write_text(
        "MODEL_ARGS:\n  --num-layers: 2\n  --micro-batch-size: 1\n"
        "  --tensor-model-parallel-size: 2\n"
    )
    assert main(["check", str(path)]) == 0
    assert "give --gpu" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.yaml"], "none.yaml: No such file"),
        ([str(SCRIPT), "--gpu", "abacus"], "unknown GPU 'abacus'"),
        ([str(SCRIPT), "--world-size", "0"], "--world-size"),
        ([str(SCRIPT), "--framework-version", "0.19"], "not of the form NAME=VERSION"),
        ([str(SCRIPT), "--format", "nothing"], "unknown format"),
    ],
)
def test_unusable_input(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and a message that says what is wrong."""
    assert main(["check", *args]) == 2
    assert message in capsys.readouterr().err


def test_text_of_configs_is_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are printed as they are, and control characters cannot reach the terminal."""
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: '[red]X\\u001b[2J{distributed_type}'\nnum_processes: 2\n"
        'compute_environment: LOCAL_MACHINE\nfsdp_config: {fsdp_version: "[/]\\e[31m"}\n'
    )
    assert main(["check", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "AC008" in printed
    assert "[red]X" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("name", "arch"),
    [("H100", 9.0), ("NVIDIA A100-SXM4-80GB", 8.0), ("blackwell", 10.0), ("gb200", 10.0)],
)
def test_gpu_names(name: str, arch: float) -> None:
    """GPUs are known by their own names and their architecture's."""
    from fsdp_doctor.config.rules.gpu_names import architecture_of

    assert architecture_of(name) == arch
