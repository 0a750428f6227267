"""What is to be recorded of Megatron on a GPU can be: specs, rules, checkpoints, pairs."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.cli import main
from fsdp_doctor.config.megatron_support import WRONG, broken_rules
from fsdp_doctor.config.spec import load_written_spec

PROFILES = Path(__file__).parent.parent.parent / "profiles"
FOLDER = PROFILES / "h200-megatron"
SPECS = sorted((FOLDER / "specs").glob("*.yaml"))
VERSIONS = {"megatron-core": "0.19.2", "megatron-fsdp": "0.6.1", "torch": "2.11.0"}
PAIRS = re.findall(r"^\| `([\w-]+)` \| `([\w-]+)` \|", (FOLDER / "README.md").read_text(), re.M)


@pytest.fixture(scope="module")
def sets() -> dict[str, Any]:
    """The sets of profiles/record.py that belong to this folder."""
    found = runpy.run_path(str(PROFILES / "record.py"))["SETS"]
    return {name: made for name, made in found.items() if name.startswith("h200-megatron/")}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_check_finds_no_error(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the versions that record them no spec breaks a rule that stops or spoils a job."""
    given = [f"{name}={version}" for name, version in VERSIONS.items()]
    versions = [part for text in given for part in ("--framework-version", text)]
    assert main(["check", str(path), *versions, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["framework"], answer["version"]) == ("megatron-core", "0.19.2")


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_spec_runs_as_one_rank(sets: dict[str, Any], ranks: int) -> None:
    """Each of at least 24 specs may be played as one rank of 2 and of 8, and none is left out."""
    recording = sets[f"h200-megatron/of-{ranks}"]
    assert recording.paths() == SPECS
    assert len(SPECS) >= 24
    for path in SPECS:
        spec = load_written_spec(path, [f"world_size={ranks}"]).spec
        assert broken_rules(spec, fake=True, versions=VERSIONS) == [], path.stem


def test_checkpoints_of_three_engines(sets: dict[str, Any]) -> None:
    """One real rank may save in each of three formats; nothing is refused."""
    formats = set()
    for name, recording in sets.items():
        if "/checkpoint-" not in name:
            continue
        (path,) = recording.paths()
        arguments = list(recording.arguments)
        form = arguments[arguments.index("--checkpoint") + 1]
        spec = load_written_spec(path, ["world_size=1"]).spec
        refused = broken_rules(replace(spec, checkpoint=form), versions=VERSIONS)
        assert [v.rule for v in refused if v.rule not in WRONG] == [], name
        formats.add(form)
    assert formats == {"torch_dist", "fsdp_dtensor", "torch_dcp"}


def test_pairs_differ_in_one_setting() -> None:
    """Every pair to compare exists, and its specs differ in one field or in the engine alone."""
    names = {path.stem: load_written_spec(path).spec for path in SPECS}
    assert len(PAIRS) >= 7
    for a, b in PAIRS:
        left, right = names[a], names[b]
        assert left.workload == right.workload, (a, b)
        assert left.config != right.config, (a, b)
