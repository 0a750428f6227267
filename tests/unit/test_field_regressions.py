"""Regressions from the field: ``diff`` of the change names the established cause's effect.

One pair of configs for each change, in ``tests/fixtures/regressions``. What no config says cannot
be found by ``diff``; MISSED lists those with the reason, and the table is printed with ``-s``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fsdp_doctor.cli import main

FIXTURES = Path(__file__).parent.parent / "fixtures" / "regressions"


@dataclass(frozen=True)
class Case:
    """A change from before to after, and which way what it is known for goes."""

    name: str
    cause: str
    """In the vocabulary of findings."""
    key: str
    effects: dict[str, str] = field(default_factory=dict)
    """Category -> direction."""
    step_time: str | None = None
    options: tuple[str, ...] = ()
    reports: tuple[int, ...] = ()
    """Numbers of the public reports in ``../shared/cases``."""


CASES = [
    Case("ddp-bucket-view", "communication-buffers", "comm.bucket_view",
         {"communication": "down"}, "down", reports=(18,)),
    Case("ddp-unused-parameters", "find-unused-parameters", "ddp.find_unused_parameters",
         {}, "up", reports=(42,)),
    Case("fsdp1-offload", "offload-slow", "offload.params",
         {"parameters": "down"}, "up", reports=(21,)),
    Case("fsdp1-rate-limiter", "stream-reuse", "comm.limit_all_gathers",
         {"unsharded_parameters": "down", "communication": "down"}, reports=(32,)),
    Case("lightning-wrap", "wrap-granularity", "sharding.unit",
         {"unsharded_gradients": "either"}, reports=(14,)),
    Case("accelerate-fsdp-version", "precision-upcast", "sharding.impl", {"parameters": "up"},
         options=("--framework-version", "accelerate=1.10.1"), reports=(27,)),
    Case("accelerate-fp8", "fp8-copies", "precision.fp8",
         {"parameters": "up", "unsharded_parameters": "up"}, reports=(75,)),
    Case("expandable-segments", "fragmentation", "env.alloc_conf",
         {"reserved_unallocated": "down"}, reports=(28, 29)),
    Case("record-streams", "stream-reuse", "env.TORCH_NCCL_AVOID_RECORD_STREAMS",
         {"reserved_unallocated": "down", "communication": "down"}, reports=(25,)),
    Case("trl-chunked-loss", "logits", "loss_type", {"logits": "down"}, "up", reports=(23,)),
    Case("megatron-llama-optimizer", "optimizer-variant", "overlapped_distributed_optimizer",
         {"gradients": "down"}, "up", reports=(33,)),
    Case("gradient-sync", "gradient-sync", "comm.grad_sync",
         {"unsharded_gradients": "down"}, "up", reports=(31,)),
]  # fmt: skip

MISSED = {
    "a version of torch that needs more": (
        "version-change", "versions change, no field: compare names versions that differ", (17,)),
    "another version of torch that needs more, retries": (
        "communication-buffers", "as above", (69,)),
    "reduce-scatter copies in another stream": (
        "stream-reuse", "code of the framework, no field", (73,)),
    "transformers whose causal mask grew": (
        "version-change", "as above; no rule of ours knows that version's mask", (76,)),
    "Fabric against Trainer, both with offload": (
        "offload-slow", "two programs, one config: no field differs", (22,)),
    "a moving average of the weights in buffers": (
        "unsharded-copy", "code of the model, no field", (24,)),
    "logging that keeps the epoch's values": (
        "leak", "an argument of a call in the loop", (41,)),
    "norm layers checkpointed too": (
        "activations", "code of the framework: activation_checkpointing is on in both", (58,)),
}  # fmt: skip
"""What -> cause, why no config says it, reports."""
REPORTS = Path(__file__).parents[3] / "shared" / "cases"


def diff_of(case: Case, capsys: pytest.CaptureFixture[str]) -> dict:
    """Return the JSON of ``diff`` of a case's two configs."""
    sides = [str(next(FIXTURES.glob(f"{case.name}-{side}.*"))) for side in "ab"]
    assert main(["diff", *sides, "--json", *case.options]) == 0
    return json.loads(capsys.readouterr().out)


def directions(change: dict) -> dict[str, set[str]]:
    """Return category -> the directions that the effects give it."""
    found: dict[str, set[str]] = {}
    for effect in change["effects"]:
        found.setdefault(effect["category"], set()).add(effect["direction"])
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_established_cause_is_among_the_effects(case, capsys):
    """The changed field is there, with the category and the direction that were measured."""
    payload = diff_of(case, capsys)
    change = next((c for c in payload["changed"] if c["key"] == case.key), None)
    assert change is not None, [c["key"] for c in payload["changed"]]
    found = directions(change)
    for category, direction in case.effects.items():
        assert direction in found.get(category, set()), (category, found)
        assert {"up": "down", "down": "up"}.get(direction) not in found[category]
    if case.step_time is not None:
        assert change["step_time"]["direction"] == case.step_time
    assert all(effect["source"] for effect in change["effects"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_way_back_has_the_opposite_effects(case, capsys):
    """Undoing the change says the reverse, so that advice taken from it helps."""
    sides = [str(next(FIXTURES.glob(f"{case.name}-{side}.*"))) for side in "ba"]
    assert main(["diff", *sides, "--json", *case.options]) == 0
    payload = json.loads(capsys.readouterr().out)
    change = next(c for c in payload["changed"] if c["key"] == case.key)
    found = directions(change)
    turned = {"up": "down", "down": "up", "either": "either"}
    for category, direction in case.effects.items():
        assert turned[direction] in found[category]


def test_the_table_of_found_and_missed(capsys):
    """Printed for a reader (``pytest -s``); what is missed has a cause and a reason."""
    with capsys.disabled():
        for case in CASES:
            print(f"\nfound   {case.cause:24} {case.name}: {case.key}", end="")
        for what, (cause, why, _) in MISSED.items():
            print(f"\nmissed  {cause:24} {what}: {why}", end="")
        print()
    assert all(cause and why and reports for cause, why, reports in MISSED.values())


def test_every_report_of_a_change_is_in_the_table():
    """With the cause that was established for it. Needs ../shared."""
    if not REPORTS.is_dir():
        pytest.skip(f"no public reports in {REPORTS}")
    causes = {number: case.cause for case in CASES for number in case.reports}
    causes |= {number: cause for cause, _, reports in MISSED.values() for number in reports}
    told = {}
    for file in sorted(REPORTS.glob("case-*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        changed = any(key.endswith(".before") for key in report["config"])
        if report["kind"].endswith("regression") and changed:
            told[int(file.stem.removeprefix("case-"))] = report["cause"]
    assert told
    assert {number: causes.get(number) for number in told} == told
