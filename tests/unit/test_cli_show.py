"""The command ``show``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from golden_files import GOLDEN, assert_golden

from fsdp_doctor.cli import main
from fsdp_doctor.model.config import ConfigValue, EffectiveConfig
from fsdp_doctor.report.show_text import render_show

ACCELERATE = GOLDEN / "check_accelerate.yaml"


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Run ``show --json`` and return what it prints."""
    assert main(["show", *args, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_text_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal text of a spec is as recorded, and no line is too long."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(GOLDEN)
    assert main(["show", "diff_a.yaml"]) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert_golden("show_spec.txt", printed)


def test_json_has_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    """Fields are keyed canonically, with value, source, effect and reason."""
    result = run_json(capsys, str(ACCELERATE))
    assert (result["schema"], result["command"]) == (1, "show")
    strategy = result["fields"]["sharding.strategy"]
    assert {"set", "value", "source", "effective", "reason"} <= set(strategy)
    assert strategy["value"] == "optim_grads_params"
    ignored = result["fields"]["fsdp_config.fsdp_reshard_after_forward"]
    assert ignored["effective"] is False
    assert ignored["reason"]


def test_the_assumed_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a version the output warns which one was taken; with one it does not."""
    result = run_json(capsys, str(ACCELERATE))
    assert result["assumed"] in result["warnings"]
    known = run_json(capsys, str(ACCELERATE), "--framework-version", "accelerate=1.15.0")
    assert known["assumed"] is None


def test_a_key_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """``--set`` acts on native keys before they are resolved."""
    args = (str(ACCELERATE), "--set", "fsdp_config.fsdp_version=2")
    fields = run_json(capsys, *args, "--set", "fsdp_config.fsdp_reshard_after_forward=true")
    assert fields["fields"]["sharding.impl"]["value"] == "fsdp2"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.yaml"], "none.yaml: No such file"),
        ([str(ACCELERATE), "--format", "nothing"], "unknown format"),
        ([str(ACCELERATE), "--framework-version", "x"], "not of the form NAME=VERSION"),
        ([str(ACCELERATE), "--set", "novalue"], "not of the form KEY=VALUE"),
    ],
)
def test_unusable_input(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and one line that says what is wrong."""
    assert main(["show", *args]) == 2
    assert message in capsys.readouterr().err


def test_secrets_and_markup_of_configs() -> None:
    """Tokens are redacted, brackets printed as they are, control characters replaced."""
    token = "hf_" + "a" * 30
    config = EffectiveConfig(
        format="x",
        framework="y",
        version=None,
        fields={
            "hub_token": ConfigValue(set=True, value="secret-value", source="file"),
            "name": ConfigValue(set=True, value=f"[bold]{token}\x1b[2J", source="file"),
        },
        unknown=("[/]\x07",),
        unresolved=(f"$X is {token}",),
    )
    stream = io.StringIO()
    render_show(config, "c", stream)
    printed = stream.getvalue()
    assert token not in printed
    assert "secret-value" not in printed
    assert "[bold]" in printed
    assert not {"\x1b", "\x07"} & set(printed)


def test_an_unresolved_framework_shows_native_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mapping of no known framework is shown as written, and said to be so."""
    path = tmp_path / "any.yaml"
    path.write_text("some_tool:\n  depth: 3\n")
    assert main(["show", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "keys are as written" in printed
    assert "depth" in printed
