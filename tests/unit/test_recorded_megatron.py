"""Megatron's engines recorded on an H200: categories, closed forms, and the flag compare names.

P is 536,903,680 parameters; a padded buffer may hold a little more than P / ranks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.model.comparison import Attribution, Comparison
from fsdp_doctor.model.memory import Anatomy, Category
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import steady_peak_bytes

RECORDED = Path(__file__).parent.parent.parent / "profiles" / "h200-megatron"
RUNS = sorted(path.parent for path in RECORDED.glob("of-*/*/run.json"))
PARAMETERS = 536_903_680
LAYER, OUTSIDE = 50_335_744, 2 * 32_768 * 2_048
"""Elements of one layer (4 h h + 2 h f + 2 h) and of embedding and head."""
PADDING = 1.003
WORLDS = pytest.mark.parametrize("ranks", [2, 8])


@cache
def recorded(ranks: int, name: str) -> Run:
    """Read a recorded run, once."""
    return load_run(RECORDED / f"of-{ranks}" / name)


def series(ranks: int, name: str) -> RankSeries:
    """Return the rank of a recorded run."""
    return recorded(ranks, name).ranks[0]


def anatomy(ranks: int, name: str) -> Anatomy:
    """Return what filled the peak."""
    found = series(ranks, name).anatomy
    assert found is not None
    return found


def compared(ranks: int, a: str, b: str) -> Comparison:
    """Compare two recorded runs of one rank."""
    return compare_runs([recorded(ranks, a)], [recorded(ranks, b)])


def rows(comparison: Comparison, phase: str | None = None) -> dict[str | None, Attribution]:
    """Return the division of rank 0's allocated peak, by category."""
    return {
        row.category: row
        for row in comparison.attribution
        if (row.metric, row.rank, row.phase) == ("peak_allocated_bytes", 0, phase)
    }


def near(found: float | None, told: float) -> bool:
    """Whether a size is what a formula tells, but for padding."""
    assert found is not None
    return abs(told) / PADDING <= abs(found) <= abs(told) * PADDING and found * told > 0


@pytest.mark.parametrize("directory", RUNS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_what_fills_the_peak_is_known(directory: Path) -> None:
    """At the peak of every engine `unknown` is at most 2 %, and categories sum to the peak."""
    run = recorded(int(directory.parent.name.removeprefix("of-")), directory.name)
    found = run.ranks[0].anatomy
    assert run.manifest.status == "completed"
    assert found is not None
    assert found.categories.get(Category.UNKNOWN, 0) <= 0.02 * found.peak_allocated_bytes
    assert sum(found.categories.values()) == found.peak_allocated_bytes
    assert found.peak_allocated_bytes == steady_peak_bytes(run.ranks[0])
    for phase in found.phases.values():
        assert sum(phase.categories.values()) == phase.peak_allocated_bytes


@WORLDS
@pytest.mark.parametrize(
    ("name", "weights", "gradients", "state"),
    [
        ("ddp", 1, 1, 1),
        ("distopt", 1, 1, 0),
        ("fsdp-none", 1, 1, 1),
        ("fsdp-optim", 1, 1, 0),
        ("fsdp-grads", 1, 0, 0),
        ("fsdp-params", 0, 0, 0),
    ],
)
def test_states_are_those_of_the_closed_forms(
    ranks: int, name: str, weights: int, gradients: int, state: int
) -> None:
    """2 bytes of weight, 4 of gradient and 12 of state an element, whole (1) or divided (0)."""
    found = anatomy(ranks, name).categories
    for category, width, whole in (
        (Category.PARAMETERS, 2, weights),
        (Category.GRADIENTS, 4, gradients),
        (Category.OPTIMIZER_STATE, 12, state),
    ):
        assert near(found[category], width * PARAMETERS / (1 if whole else ranks))


@WORLDS
def test_ddp_to_distributed_optimizer(ranks: int) -> None:
    """The strategy is named; state falls by 12 bytes an element, but for the rank's share."""
    comparison = compared(ranks, "ddp", "distopt")
    row = rows(comparison, "optimizer")[Category.OPTIMIZER_STATE]
    assert row.keys == ("sharding.strategy",)
    told = -12 * PARAMETERS * (1 - 1 / ranks)
    assert near(row.value, told)
    assert near(row.predicted, told)


@WORLDS
def test_optimizer_to_all_sharded(ranks: int) -> None:
    """With optim_grads_params gradients and weights are divided too, the model is gathered."""
    found = rows(compared(ranks, "fsdp-optim", "fsdp-params"))
    assert {row.keys for row in found.values()} == {("sharding.strategy",)}
    for category, told in (
        (Category.GRADIENTS, -4 * PARAMETERS * (1 - 1 / ranks)),
        (Category.PARAMETERS, -2 * PARAMETERS * (1 - 1 / ranks)),
        (Category.UNSHARDED_PARAMETERS, 2 * PARAMETERS),
    ):
        assert near(found[category].value, told)
        assert near(found[category].predicted, told)


@WORLDS
def test_default_communication_unit_gathers_the_whole_model(ranks: int) -> None:
    """Unset, the whole model is gathered; two layers' worth: embedding, head and two layers."""
    for name, elements in (
        ("fsdp-params", PARAMETERS),
        ("fsdp-params-small-unit", OUTSIDE + 2 * LAYER),
    ):
        whole = anatomy(ranks, name).categories[Category.UNSHARDED_PARAMETERS]
        assert near(whole, 2 * elements)
    comparison = compared(ranks, "fsdp-params", "fsdp-params-small-unit")
    row = rows(comparison)[Category.UNSHARDED_PARAMETERS]
    assert row.keys == ("comm.unit_elems",)
    assert near(row.predicted, row.value)
    finding = comparison.findings[0]
    assert finding.flags == ("comm.unit_elems",)
    assert "fell by" in finding.claim


@WORLDS
def test_optim_grads_keeps_gradients_whole(ranks: int) -> None:
    """What sharding takes out of gradients waits whole; reserved memory is no smaller."""
    found = rows(compared(ranks, "fsdp-optim", "fsdp-grads"))
    assert near(found[Category.UNSHARDED_GRADIENTS].value, 4 * PARAMETERS)
    assert near(found[Category.GRADIENTS].value, -4 * PARAMETERS * (1 - 1 / ranks))
    optim, grads = (
        steady_peak_bytes(series(ranks, name), counter="reserved_bytes")
        for name in ("fsdp-optim", "fsdp-grads")
    )
    assert optim is not None
    assert grads is not None
    assert grads >= optim


@WORLDS
def test_bf16_gradients(ranks: int) -> None:
    """2 bytes an element less in the buffer of the distributed optimizer, 2 more at DDP's peak."""
    row = rows(compared(ranks, "ddp", "ddp-bf16-grads"))[Category.GRADIENTS]
    assert row.keys == ("precision.grad",)
    assert near(row.value, 2 * PARAMETERS)
    row = rows(compared(ranks, "distopt", "distopt-bf16-grads"), "backward")[Category.GRADIENTS]
    assert row.keys == ("precision.grad",)
    assert near(row.value, -2 * PARAMETERS)


@WORLDS
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recompute(ranks: int, kind: str) -> None:
    """Forward saves less; the fields of recomputation are named for it and no other is."""
    row = rows(compared(ranks, "distopt", f"distopt-recompute-{kind}"), "backward")
    found = row[Category.ACTIVATIONS]
    assert "recompute.mode" in found.keys
    assert all(key.startswith("recompute.") for key in found.keys)
    assert found.value < -700 << 20


@WORLDS
def test_double_buffer(ranks: int) -> None:
    """Two layers' weights and gradients stay allocated between steps, and the flag is named."""
    small = "fsdp-params-small-unit"
    comparison = compared(ranks, small, f"{small}-double-buffer")
    assert comparison.findings[0].flags == ("comm.double_buffer",)
    metric = next(m for m in comparison.metrics if m.name == "resident_bytes" and m.rank == 0)
    assert near(metric.delta, (2 + 4) * 2 * LAYER)


@WORLDS
def test_optimizer_offload(ranks: int) -> None:
    """From 0 to 1 the moments leave, 8 bytes an element; main weights stay, by the formula too."""
    row = rows(compared(ranks, "distopt-offload-0", "distopt-offload-all"))
    found = row[Category.OPTIMIZER_STATE]
    assert found.keys == ("offload.optimizer_fraction",)
    assert near(found.value, -8 * PARAMETERS / ranks)
    assert near(found.predicted, -8 * PARAMETERS / ranks)
