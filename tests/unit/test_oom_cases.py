"""Failures from the field, where they are here: numbers exact, cause first in most; the misses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.logs.records import Failure
from fsdp_doctor.postmortem import PostMortem, examine

CASES = Path(__file__).parents[3] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.exists(), reason="the collected cases are not here")
NAMES = {
    "requested": "requested_bytes",
    "total": "total_bytes",
    "free": "free_bytes",
    "this_process_in_use": "process_bytes",
    "allocated": "allocated_bytes",
    "private_pools": "private_pool_bytes",
    "reserved_unallocated": "reserved_unallocated_bytes",
    "allowed": "limit_bytes",
    "reserved": "reserved_bytes",
}
ESTABLISHED = ("maintainer", "reporter", "PR author")
BEYOND_THE_LOG = {
    "fp8-copies": "a HIP message alone; only the config says FP8",
}
"""Causes that no line of the case's log speaks of."""


def cases() -> list[dict[str, Any]]:
    """Return the cases of kind oom that have a log."""
    found = [json.loads(path.read_text()) for path in sorted(CASES.glob("case-*.json"))]
    return [case for case in found if case["kind"] == "oom" and case.get("log")]


def examined(case: dict[str, Any], tmp_path: Path, *, config: bool = False) -> PostMortem:
    """Examine a case's log, perhaps with the facts of its config."""
    path = tmp_path / f"{case['id']}.log"
    path.write_text("\n".join(case["log"]) + "\n", encoding="utf-8")
    settings = None
    if config and case.get("config"):
        settings = tmp_path / f"{case['id']}.txt"
        pairs = (f"{key}: {json.dumps(value)}" for key, value in case["config"].items())
        settings.write_text("\n".join(pairs))
    return examine([path], settings)


def wrong_numbers(expected: dict[str, Any], failure: Failure) -> list[str]:
    """Return the names of the numbers that differ."""
    wrong = []
    for name, own in NAMES.items():
        if name not in expected:
            continue
        value = expected[name]
        value = value["bytes"] if isinstance(value, dict) else value
        if getattr(failure, own) != value:
            wrong.append(f"{name}: {getattr(failure, own)} != {value}")
    listed = [(entry["pid"], entry["bytes"]) for entry in expected.get("listed_processes", [])]
    if failure.processes != listed:
        wrong.append("listed_processes")
    if failure.device != expected["device"] or failure.backend != expected["backend"]:
        wrong.append("device")
    if failure.fragmentation != expected["fragmentation"]:
        wrong.append(f"fragmentation: {failure.fragmentation} != {expected['fragmentation']}")
    other = expected.get("other_processes_bytes_derived")
    if other is not None and abs((failure.other_processes_bytes or 0) - other) > 1:
        wrong.append("other_processes_bytes")
    return wrong


def test_numbers(tmp_path: Path) -> None:
    """In every case that has numbers they are right, as are those that follow from them."""
    wrong = {}
    counted = 0
    for case in cases():
        expected = case["expected"].get("numbers")
        if not expected:
            continue
        counted += 1
        failure = examined(case, tmp_path).triage.primary
        assert failure is not None, case["id"]
        found = wrong_numbers(expected, failure)
        if found:
            wrong[case["id"]] = found
    assert counted
    assert not wrong


def test_failed_ranks(tmp_path: Path) -> None:
    """Where a case names the failed rank and the log prints it, it is found."""
    wrong = {}
    for case in cases():
        rank = case["expected"].get("failed_rank")
        failure = examined(case, tmp_path).triage.primary
        if rank is None or failure is None:
            continue
        found = failure.rank if failure.rank is not None else failure.local_rank
        if found != rank:
            wrong[case["id"]] = (found, rank)
    assert not wrong


@pytest.mark.parametrize("config", [False, True], ids=["log alone", "log and config"])
def test_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, config: bool) -> None:
    """Of the established causes at least 80 % come first; misses are shown with their reasons.

    Of those that a line of the log speaks of, 95 % are among the first three.
    """
    rows, first, third, counted, hidden = [], 0, 0, 0, 0
    for case in cases():
        causes = [finding.cause for finding in examined(case, tmp_path, config=config).findings]
        established = case["cause_established_by"] in ESTABLISHED
        place = causes.index(case["cause"]) + 1 if case["cause"] in causes else None
        reason = "" if config else BEYOND_THE_LOG.get(case["cause"], "")
        if established:
            counted += 1
            hidden += bool(reason)
            first += place == 1
            third += place is not None and place <= 3
        if place != 1:
            kind = "established" if established else "unclear"
            got = ", ".join(causes[:3]) or "nothing"
            rows.append(
                f"{case['id']}  {kind:11}  {case['cause']:22}  place {place}: {got}  {reason}"
            )
    with capsys.disabled():
        print(f"\nfirst in {first} of {counted} established, among three in {third}; not first:")
        print("\n".join(rows))
    assert counted
    assert first >= 0.8 * counted
    assert third >= 0.95 * (counted - hidden)
