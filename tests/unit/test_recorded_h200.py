"""The runs recorded on an H200: categories, counts, and the flag that `compare` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.model.comparison import Attribution, Comparison
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import steady_peak_bytes

RECORDED = Path(__file__).parent.parent.parent / "profiles" / "h200"
RUNS = sorted(path.parent for path in RECORDED.glob("world-*/*/run.json"))
RESHARD = "sharding.reshard_after_forward"


def compared(a: str, b: str) -> Comparison:
    """Compare two recorded runs of one rank of 2."""
    world = RECORDED / "world-2"
    return compare_runs([load_run(world / a)], [load_run(world / b)])


def rows(comparison: Comparison, phase: str | None = None) -> list[Attribution]:
    """Return the division of rank 0's allocated peak."""
    found = [
        row
        for row in comparison.attribution
        if (row.metric, row.rank, row.phase) == ("peak_allocated_bytes", 0, phase)
    ]
    metric = next(
        m
        for m in comparison.metrics
        if (m.name, m.rank, m.phase) == ("peak_allocated_bytes", 0, phase)
    )
    assert sum(row.value for row in found) == metric.delta
    return found


def by_category(found: list[Attribution]) -> dict[str | None, Attribution]:
    """Return the rows by category."""
    return {row.category: row for row in found}


def test_at_least_twenty_configurations_of_each_world_size() -> None:
    """One rank of 2, of 8 and of 64 are recorded in at least 20 configurations each."""
    for world in (2, 8, 64):
        assert len([run for run in RUNS if run.parent.name == f"world-{world}"]) >= 20


@pytest.mark.parametrize("directory", RUNS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_what_fills_the_peak_is_known(directory: Path) -> None:
    """At the peak `unknown` is at most 2 %; states equal the count from shapes to the byte."""
    run = load_run(directory)
    assert run.manifest.status == "completed"
    (series,) = run.ranks
    anatomy = series.anatomy
    assert anatomy is not None
    unknown = anatomy.categories.get(Category.UNKNOWN, 0)
    assert unknown <= 0.02 * anatomy.peak_allocated_bytes
    assert sum(anatomy.categories.values()) == anatomy.peak_allocated_bytes
    assert anatomy.peak_allocated_bytes == steady_peak_bytes(series)
    optimizer = anatomy.phases[Phase.OPTIMIZER].categories
    for name in ("parameters", "gradients", "optimizer_state"):
        assert optimizer.get(name, 0) == anatomy.expected_bytes[name]


def test_reshard_after_forward() -> None:
    """Turned off: all of the rise is unsharded parameters, to the byte of the formula."""
    (row,) = rows(compared("fsdp2-reshard", "fsdp2-no-reshard"))
    assert (row.keys, row.category) == ((RESHARD,), Category.UNSHARDED_PARAMETERS)
    assert row.value == 2 * 953_223_168 == row.predicted


def test_checkpointing() -> None:
    """Turned on: the flag is named; activations fall in forward by all that is saved."""
    comparison = compared("fsdp2-reshard", "fsdp2-checkpoint-full")
    assert {row.keys for row in rows(comparison)} == {("recompute.mode",)}
    forward = by_category(rows(comparison, "forward"))[Category.ACTIVATIONS]
    assert forward.keys == ("recompute.mode",)
    assert forward.value < -4 << 30


def test_checkpointing_moves_the_peak() -> None:
    """What backward lost is told of backward; the optimizer's bytes are no activations there."""
    comparison = compared("fsdp2-reshard", "fsdp2-checkpoint-full")
    finding = comparison.findings[0]
    assert "fell by 2.95 GiB; in backward, where A peaked, it fell by 3.96 GiB" in finding.claim
    assert "-4.76 GiB in activations" in finding.claim
    assert finding.claim.endswith("the peak is now the optimizer's 8.95 GiB, which did not change")
    whole = by_category(rows(comparison))[Category.TEMPORARIES]
    assert "the peak moved from backward to optimizer" in whole.evidence
    assert "being recomputed" not in whole.evidence
    backward = by_category(rows(comparison, "backward"))[Category.TEMPORARIES]
    assert "being recomputed" in backward.evidence
    assert backward.value == 148 << 20


def test_bf16_to_fp32() -> None:
    """The compute dtype is named for activations, gathered parameters and their buffers."""
    found = by_category(rows(compared("fsdp2-reshard", "fsdp2-reshard-fp32")))
    for category in (Category.ACTIVATIONS, Category.UNSHARDED_PARAMETERS, Category.COMMUNICATION):
        assert found[category].keys == ("precision.compute",)
        assert found[category].value > 0


def test_accumulation_without_sync() -> None:
    """Reduced after the last micro batch only: whole fp32 gradients, by the formula's bytes."""
    comparison = compared("fsdp2-accumulate-sync", "fsdp2-accumulate-no-sync")
    found = rows(comparison)
    assert {row.keys for row in found if abs(row.value) > 1 << 20} == {("comm.grad_sync",)}
    whole = by_category(found)[Category.UNSHARDED_GRADIENTS]
    assert whole.value == whole.predicted == 4 * 953_223_168


def test_ddp_to_fsdp2() -> None:
    """Parameters and optimizer state fall to one half: the strategy, to the byte of the formula."""
    found = by_category(rows(compared("ddp", "fsdp2-reshard")))
    for category, elements in ((Category.PARAMETERS, 1), (Category.OPTIMIZER_STATE, 2)):
        row = found[category]
        assert row.keys == ("sharding.strategy",)
        assert row.value == row.predicted == -2 * elements * 953_223_168
    assert "sharding.impl" in found[Category.COMMUNICATION].keys


def test_factorial_with_decoys() -> None:
    """Three fields and two decoys: decoys get nothing, what cannot be divided is shown joint."""
    comparison = compared("factorial-reshard-save-batch1", "factorial-keep-checkpoint-batch2")
    changed = {change.key for change in comparison.diff.changed}
    assert changed == {RESHARD, "recompute.mode", "batch.micro"}
    decoys = {change.key for change in comparison.diff.cosmetic}
    assert {"optimizer.learning_rate", "seed"} <= decoys
    assert all(set(row.keys) <= changed for row in comparison.attribution)
    backward = by_category(rows(comparison, "backward"))
    assert backward[Category.ACTIVATIONS].keys == ("batch.micro", "recompute.mode")
    assert backward[Category.UNSHARDED_PARAMETERS].keys == (RESHARD,)
    assert backward[Category.LOGITS].keys == ("batch.micro",)


@pytest.mark.parametrize("b", ["fsdp2-decoys", "fsdp2-foreach"])
def test_nothing_is_blamed_for_no_change(b: str) -> None:
    """Fields that move nothing, and a default written out, leave every peak as it was."""
    comparison = compared("fsdp2-reshard", b)
    allocated = [m for m in comparison.metrics if m.name == "peak_allocated_bytes"]
    assert allocated
    assert all((m.verdict, m.delta) == ("same", 0) for m in allocated)
    assert not [row for row in comparison.attribution if row.keys]


def test_out_of_memory() -> None:
    """An OOM on CUDA is recorded with rank, step, phase and request, and what filled the memory."""
    run = load_run(RECORDED / "oom" / "fsdp2-reshard")
    failure = run.manifest.failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.step, failure.phase) == (
        "device_oom", 0, 0, Phase.BACKWARD,
    )  # fmt: skip
    assert failure.requested_bytes == 500 << 20
    anatomy = run.ranks[0].anatomy
    assert anatomy is not None
    assert anatomy.categories[Category.ACTIVATIONS] > anatomy.peak_allocated_bytes // 2
