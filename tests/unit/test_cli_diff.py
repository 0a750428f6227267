"""The command ``diff``."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.cli import main
from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.model.config import ConfigValue, EffectiveConfig
from fsdp_doctor.model.run import RunManifest
from fsdp_doctor.report.diff_text import render_diff
from fsdp_doctor.runs.writer import SCHEMA, write_manifest

GOLDEN = Path(__file__).parent.parent / "golden"
A, B = GOLDEN / "diff_a.yaml", GOLDEN / "diff_b.yaml"


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Run ``diff --json`` and return what it prints."""
    assert main(["diff", *args, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_text_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal text of one comparison is as recorded."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(GOLDEN)
    assert main(["diff", A.name, B.name]) == 0
    printed = capsys.readouterr().out
    assert printed == (GOLDEN / "diff_ab.stdout").read_text()
    assert max(len(line) for line in printed.splitlines()) <= 80


def test_json_has_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of the contract is there; bytes are integers."""
    result = run_json(capsys, str(A), str(B))
    assert (result["schema"], result["command"]) == (1, "diff")
    side = {"format": "spec", "framework": "torch", "version": None}
    more = {"resolved": True, "assumed": None, "unknown": [], "unresolved": []}
    assert result["a"] == {**side, **more}
    change = result["changed"][0]
    assert change["key"] == "sharding.reshard_after_forward"
    assert change["a"] == {
        "set": True,
        "value": True,
        "source": "default",
        "effective": True,
        "reason": "null: true, except for the root",
        "written": None,
    }
    assert change["native"]["b"] == ["config.fsdp2.reshard_after_forward"]
    effect = change["effects"][0]
    assert set(effect) == {"category", "direction", "bytes", "phase", "reason", "source"}
    assert isinstance(effect["bytes"], int)
    assert set(change["step_time"]) == {"direction", "reason"}
    assert {"key", "side", "reason"} == set(result["inert"][0])
    assert {"cosmetic", "unknown"} <= set(result)


def test_options_change_either_side(capsys: pytest.CaptureFixture[str]) -> None:
    """``--set-a`` and ``--set-b`` are applied before the comparison."""
    result = run_json(
        capsys, str(A), str(A), "--set-a", "world_size=4", "--set-b", "workload.micro_batch=8"
    )
    changed = {c["key"]: (c["a"]["value"], c["b"]["value"]) for c in result["changed"]}
    assert changed == {"world.size": (4, 8), "batch.micro": (2, 8)}
    assert next(c for c in result["changed"] if c["key"] == "world.size")["a"]["source"] == "cli"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("none.yaml", str(A)), "none.yaml: No such file"),
        ((str(A), str(GOLDEN)), "not a run directory"),
        ((str(A), str(B), "--set-b", "worldsize=2"), "did you mean world_size?"),
    ],
)
def test_unusable_input_ends_with_one_line(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and one line that says what is wrong."""
    assert main(["diff", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def manifest(**more: Any) -> RunManifest:
    """Return the manifest of a small run."""
    return RunManifest(
        schema=SCHEMA,
        name="run",
        tool_version="0",
        created="2026-01-01T00:00:00Z",
        status="completed",
        source="real_ranks",
        world_size=2,
        ranks=(0,),
        device_type="cpu",
        **more,
    )


def test_a_run_directory_is_read_by_its_spec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recorded run stands for the spec it carries, with the torch it ran on."""
    spec = {"name": "run", "world_size": 8, "config": {"strategy": "ddp"}}
    write_manifest(tmp_path, manifest(spec=spec, environment={"torch": "2.13.0"}))
    result = run_json(capsys, str(tmp_path), str(A))
    assert result["a"]["version"] == "2.13.0"
    assert "sharding.impl" in {change["key"] for change in result["changed"]}


def test_a_run_directory_with_an_effective_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config recorded at run time is used as it is; setting keys on it is refused."""
    fields = {"batch.micro": ConfigValue(set=True, value=7, source="runtime")}
    write_manifest(tmp_path, manifest(effective_config=fields))
    assert run_json(capsys, str(tmp_path), str(tmp_path))["changed"] == []
    assert main(["diff", str(tmp_path), str(A), "--set-a", "world_size=2"]) == 2
    assert "carries no spec" in capsys.readouterr().err


def test_a_run_without_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to compare in a run of a loop of one's own."""
    write_manifest(tmp_path, manifest())
    assert main(["diff", str(tmp_path), str(A)]) == 2
    assert "carries no config" in capsys.readouterr().err


def test_text_of_configs_is_not_markup() -> None:
    """Brackets are printed as they are and control characters cannot reach the terminal."""
    sides = [
        EffectiveConfig(
            format="x",
            framework="y",
            version=None,
            fields={
                "[bold]key": ConfigValue(
                    set=True, value=f"[red]{n}\x1b[2J", source="file", written=n
                )
            },
        )
        for n in (1, 2)
    ]
    stream = io.StringIO()
    render_diff(diff_configs(*sides), "[a]", "b\x07", stream)
    assert "[bold]key" in stream.getvalue()
    assert "[red]1?[2J -> [red]2?[2J" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_nothing_changed_is_said() -> None:
    """Two equal configs give one clear line."""
    config = EffectiveConfig(format="x", framework="y", version=None, fields={})
    stream = io.StringIO()
    render_diff(diff_configs(config, config), "a", "b", stream)
    assert "Nothing changed that moves memory or step time." in stream.getvalue()


@pytest.mark.parametrize("args", [["diff", str(A), str(B)], ["diff", "--help"], ["--help"]])
def test_heavy_packages_stay_unloaded(args: list[str]) -> None:
    """Neither help nor a diff of flat specs imports torch, pandas, scipy, matplotlib, deepdiff."""
    code = (
        "import sys; from fsdp_doctor.cli import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'pandas', 'scipy', 'matplotlib', 'deepdiff'} & set(sys.modules);"
        "sys.exit(f'loaded: {heavy}' if heavy else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
