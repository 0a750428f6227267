"""Real out-of-memory failures with a known cause, recorded on an H200 by ``record_ooms.py``.

The oracle of the cause is what was done to the job (``case.json``), of the phase what the job was
doing, of the numbers torch's own counters, which it prints in its message.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import pickle
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.model.memory import Category
from fsdp_doctor.postmortem import PostMortem, examine
from fsdp_doctor.postmortem.snapshot_facts import GROUPS

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "recorded" / "ooms"
NAMES = sorted(path.name for path in RECORDED.iterdir())
MiB, GiB = 1 << 20, 1 << 30
PHASES = {"checkpoint": "checkpoint_save", "evaluation": "evaluation"}
"""Phase of a fault that is none of a step; that of the others has no name."""
LOG_TELLS_LESS = {"fsdp2-one-unit": "that the unit is the whole model is not in the log"}
"""Cases whose log alone does not put the cause first, and why."""
MAX_KEPT_BYTES = 300_000


@cache
def truth(name: str) -> dict[str, Any]:
    """What was done, and where it failed."""
    told: dict[str, Any] = json.loads((RECORDED / name / "case.json").read_text())
    return told


@cache
def examined(name: str, *, snapshot: bool = True) -> PostMortem:
    """The post-mortem of a case from its log and config, and from its snapshot."""
    folder = RECORDED / name
    shown = [folder / "snapshot.pickle.gz"] if snapshot else []
    return examine([folder / "log.txt"], folder / "config.json", shown)


@pytest.mark.parametrize("name", NAMES)
def test_cause_is_first(name: str) -> None:
    """With log and snapshot the cause that was put in comes first, and that is an answer."""
    found = examined(name)
    assert found.findings[0].cause == truth(name)["cause"]
    assert found.verdict["enough"]


@pytest.mark.parametrize("name", NAMES)
def test_log_alone(name: str) -> None:
    """The log alone puts the cause first but for what it cannot tell."""
    first = examined(name, snapshot=False).findings[0].cause
    assert (first == truth(name)["cause"]) == (name not in LOG_TELLS_LESS)


@pytest.mark.parametrize("name", NAMES)
def test_phase_and_step(name: str) -> None:
    """The phase is that in which the job failed; a snapshot also tells the step of a phase."""
    told, found = truth(name), examined(name)
    primary, snapshot = found.triage.primary, found.snapshot
    assert primary is not None
    assert snapshot is not None
    in_step = told["phase"] != "fault"
    assert primary.phase == (told["phase"] if in_step else PHASES.get(told["fault"], "unknown"))
    if in_step and snapshot.oom is not None:
        assert snapshot.focus.step == told["step"]
    assert primary.moment != "first_step" or told["step"] == 0


@pytest.mark.parametrize("name", [n for n in NAMES if "Tried to" in truth(n)["error"]])
def test_numbers_are_those_of_torch(name: str) -> None:
    """Request, allocated and idle bytes of the snapshot are those that torch's message prints, to
    its last decimal; every category adds up; no evidence is larger than what was reserved.
    """
    found = examined(name)
    primary, snapshot = found.triage.primary, found.snapshot
    assert primary is not None
    assert snapshot is not None
    assert snapshot.oom is not None
    focus = snapshot.focus
    assert primary.limit_bytes is None or abs(primary.limit_bytes - truth(name)["limit_bytes"]) < (
        0.011 * GiB
    )
    for logged, own in (
        (primary.requested_bytes, snapshot.oom.requested_bytes),
        (primary.allocated_bytes, focus.allocated_bytes),
        (primary.reserved_unallocated_bytes, focus.reserved_bytes - focus.allocated_bytes),
    ):
        assert logged is not None
        assert abs(logged - own) <= 0.006 * (GiB if logged >= GiB else 512 * MiB)
    assert sum(focus.categories.values()) == focus.allocated_bytes
    for finding in found.findings:
        for evidence in finding.evidence:
            if evidence.file == snapshot.path and evidence.bytes is not None:
                limit = focus.reserved_bytes + snapshot.oom.requested_bytes
                assert evidence.bytes <= max(limit, snapshot.oom.device_free_bytes or 0)


CLAIMED = {"activations": "activations", "logits": "logits", "state-does-not-fit": "state"}


@pytest.mark.parametrize("name", [n for n in NAMES if truth(n)["cause"] in CLAIMED])
def test_claims_hold_what_they_say(name: str) -> None:
    """The bytes of "X hold ..." are those of the categories, and more than half of all."""
    found = examined(name)
    assert found.snapshot is not None
    focus = found.snapshot.focus
    members = GROUPS[CLAIMED[truth(name)["cause"]]]
    held = sum(focus.categories.get(category.value, 0) for category in members)
    assert held > 0.5 * focus.allocated_bytes
    assert held in [evidence.bytes for evidence in found.findings[0].evidence]


@pytest.mark.parametrize("name", [n for n in NAMES if truth(n)["cause"] == "leak"])
def test_leaks_are_measured(name: str) -> None:
    """What stays at every step is what the job kept, and the code that keeps it is named."""
    snapshot = examined(name).snapshot
    assert snapshot is not None
    assert snapshot.growth is not None
    kept = truth(name)["arguments"]["mib"] * MiB
    assert snapshot.growth.per_step_bytes == kept
    suspect = snapshot.growth.suspects[0]
    assert suspect.bytes == suspect.count * kept
    assert "faults.py" in suspect.frames[0]


@pytest.mark.parametrize("name", [n for n in NAMES if truth(n)["cause"] == "fragmentation"])
def test_free_pieces_are_measured(name: str) -> None:
    """The free pieces are the segments but for what pins them, none as large as the request."""
    snapshot = examined(name).snapshot
    assert snapshot is not None
    assert snapshot.oom is not None
    unit, pieces = (truth(name)["arguments"][key] for key in ("mib", "pieces"))
    made = pieces * (unit * MiB - unit * MiB // 32)
    assert made <= snapshot.oom.free_bytes <= 1.05 * made
    assert unit // 2 * MiB <= snapshot.oom.largest_free_bytes < unit * MiB


def test_kept_outputs_are_logits() -> None:
    """What an evaluation keeps is told as logits, batch by batch: tokens x vocabulary x 2 or 4."""
    for name, width in (("ddp-evaluation", 2), ("fsdp2-evaluation-expandable", 2)):
        snapshot = examined(name).snapshot
        assert snapshot is not None
        spec = json.loads((RECORDED / name / "config.json").read_text())["workload"]
        batch = spec["micro_batch"] * spec["sequence_length"] * spec["model"]["vocab"] * width
        top = snapshot.focus.top_allocations[0]
        assert top.category is Category.LOGITS
        assert top.bytes >= 10 * batch
        assert top.bytes / batch == pytest.approx(top.count, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_small_and_nameless(name: str) -> None:
    """A recording is below 300 kB and holds no path of the machine it was made on."""
    folder = RECORDED / name
    assert sum(path.stat().st_size for path in folder.iterdir()) < MAX_KEPT_BYTES
    for path in (folder / "log.txt", folder / "case.json"):
        roots = set(re.findall(r"(?<![\w.:/])/(\w+)/", path.read_text()))
        assert roots <= {"workspace", "pytorch"}


def nameless(name: str) -> dict[str, Any]:
    """A recorded snapshot without annotations, its job's own functions all called ``run``."""
    snapshot: dict[str, Any] = pickle.loads(
        gzip.decompress((RECORDED / name / "snapshot.pickle.gz").read_bytes())
    )
    snapshot["external_annotations"] = []
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for holder in (*blocks, *(event for trace in snapshot["device_traces"] for event in trace)):
        for frame in holder.get("frames") or ():
            if "benchmarks/ooms" in frame["filename"]:
                frame |= {"filename": "/workspace/train.py", "name": "run"}
    return snapshot


@pytest.mark.parametrize("name", ["ddp-checkpoint", "fsdp2-evaluation-expandable"])
def test_what_piles_up_needs_no_name(name: str, tmp_path: Path) -> None:
    """Copies of the state and kept outputs are told from a snapshot alone in which no function is
    called after what it does: by sizes, and by forwards that no backward follows.
    """
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(nameless(name)))
    assert examine([path]).findings[0].cause == truth(name)["cause"]


@pytest.mark.parametrize("name", ["ddp-checkpoint", "fsdp2-checkpoint", "ddp-evaluation",
                                  "fsdp2-evaluation-expandable"])  # fmt: skip
def test_piles_are_measured(name: str) -> None:
    """What piled up is nearly all of what nothing else explains, or of the logits."""
    snapshot = examined(name).snapshot
    assert snapshot is not None
    pile = snapshot.state_copies or snapshot.kept_outputs
    assert pile is not None
    kind = "unknown" if truth(name)["fault"] == "checkpoint" else "logits"
    assert pile.bytes == pytest.approx(snapshot.focus.categories[kind], rel=0.01)
    assert pile.blocks >= 10


def test_page_is_what_is_found() -> None:
    """``docs/oom-recorded.md`` is what ``record_ooms.py --diagnose --markdown`` writes."""
    script = ROOT / "benchmarks" / "ooms" / "table.py"
    spec = importlib.util.spec_from_file_location("ooms_table", script)
    assert spec is not None
    assert spec.loader is not None
    table = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    rows = [
        table.row_of(RECORDED / name, examined(name), examined(name, snapshot=False))
        for name in NAMES
    ]
    assert (ROOT / "docs" / "oom-recorded.md").read_text() == table.markdown(rows)
