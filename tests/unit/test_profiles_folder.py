"""What profiles/ holds is what profiles/record.py says it does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

PROFILES = Path(__file__).parent.parent.parent / "profiles"

sys.path.insert(0, str(PROFILES))
import record  # noqa: E402

sys.path.remove(str(PROFILES))


@pytest.mark.parametrize("name", sorted(record.SETS))
def test_a_set_is_recorded_whole_or_not_at_all(name: str) -> None:
    """No run is left over, and none is forgotten."""
    recorded = {path.parent.name for path in (PROFILES / name).glob("*/run.json")}
    wanted = {path.stem for path in record.SETS[name].paths()}
    assert wanted
    assert recorded in (set(), wanted)


@pytest.mark.parametrize("name", sorted(record.SETS))
def test_runs_were_made_with_the_arguments_of_their_set(name: str) -> None:
    """World size and kind of run are those the command asks for."""
    arguments = record.SETS[name].arguments
    worlds = [int(b) for a, b in pairwise(arguments) if a == "--one-rank-of"]
    for path in (PROFILES / name).glob("*/run.json"):
        run = json.loads(path.read_text())
        assert (run["source"] == "one_rank") == bool(worlds)
        if worlds:
            assert run["world_size"] == worlds[0]


def test_what_is_recorded_is_not_recorded_again(tmp_path: Path) -> None:
    """A set that was cut short goes on with what is missing, an interrupted run included."""
    name = "h200/world-8"
    first, second, *_ = record.SETS[name].paths()
    (tmp_path / name / first.stem).mkdir(parents=True)
    run = tmp_path / name / first.stem / "run.json"
    run.write_text('{"status": "completed"}')
    lacking = record.missing(name, tmp_path)
    assert first not in lacking
    assert second in lacking
    run.write_text('{"status": "interrupted"}')
    assert first in record.missing(name, tmp_path)


def test_the_list_counts_what_is_missing() -> None:
    """The recorded sets lack nothing; the status of a list is 0."""
    done = subprocess.run(
        [sys.executable, PROFILES / "record.py", "--list", "h200/world-2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "h200/world-2: 33 specs, 0 not recorded\n"


def test_recorded_blocks_are_named_once(tmp_path: Path) -> None:
    """Naming what a Megatron run recorded moves bytes the first time; a second time nothing."""
    run = PROFILES / "h200-megatron" / "of-8" / "fsdp-params"
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "rank-00000.jsonl"
    kept = path.read_text()
    named, told = '"unsharded_gradients","subcategory":"reduce_scatter_queue"', '"frames"'
    assert named in kept
    assert told in kept
    path.write_text(kept.replace(named, '"temporaries","subcategory":null'))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["record"] == "anatomy":
            places = (line["categories"], line["phases"]["backward"]["categories"])
            for categories in places:
                categories["temporaries"] += categories.pop("unsharded_gradients")
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    script = [sys.executable, PROFILES / "relabel.py", copy]
    for _ in range(2):
        subprocess.run(script, check=True, capture_output=True)
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert found == [json.loads(line) for line in kept.splitlines()]
