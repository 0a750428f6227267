"""Dividing memory among fields by simulated points, with a simulator made of arithmetic."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from builders import make_anatomy, make_run

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.attribution.payload import comparison_to_payload
from fsdp_doctor.attribution.what_if import Simulation
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.spec import spec_from_mapping, spec_to_mapping
from fsdp_doctor.model.estimate import PhaseEstimate, RankEstimate, StepEstimate
from fsdp_doctor.report import render_comparison

MIB = 1 << 20
BASE = {
    "name": "a",
    "world_size": 2,
    "workload": {"model": {"layers": 2}, "micro_batch": 1},
    "config": {"strategy": "fsdp2", "fsdp2": {"reshard_after_forward": True}},
}


def spec_of(name, **paths):
    """Return BASE as a spec with dotted keys (``__`` for a dot) set."""
    raw = spec_to_mapping(spec_from_mapping(BASE, "test"))
    raw["name"] = name
    for path, value in paths.items():
        *parents, last = path.split("__")
        section = raw
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
    return spec_from_mapping(raw, "test")


def peaks_of(spec):
    """Return phase -> category -> bytes: batch x (1 or 4 with all activations), and parameters."""
    saved = 1 if spec.config.activation_checkpointing.mode == "full" else 4
    batch = spec.workload.micro_batch
    gathered = 100 if spec.config.fsdp2.reshard_after_forward else 300
    return {
        "forward": {"parameters": 1000 * MIB, "activations": 50 * batch * saved * MIB},
        "backward": {
            "parameters": 1000 * MIB,
            "unsharded_parameters": gathered * MIB,
            "activations": 100 * batch * saved * MIB,
        },
    }


def estimate_of(spec):
    """Return the same as a simulation tells it."""
    anatomy = make_anatomy(peaks_of(spec), {"parameters": 1000 * MIB})
    step = StepEstimate(
        peak_allocated_bytes=anatomy.peak_allocated_bytes,
        peak_reserved_bytes=0,
        peak_reserved_low_bytes=0,
        peak_phase=anatomy.peak_phase,
        resident_bytes=1000 * MIB,
        resident=anatomy.resident,
        categories=anatomy.categories,
        phases={
            name: PhaseEstimate(
                peak_allocated_bytes=part.peak_allocated_bytes,
                peak_reserved_bytes=0,
                end_allocated_bytes=0,
                categories=part.categories,
            )
            for name, part in anatomy.phases.items()
        },
    )
    return RankEstimate(
        rank=0, first_step=step, steady=step, top_allocations=(), setup_peak_bytes=0
    )


class Simulator:
    """Answers by arithmetic and remembers what it was asked."""

    def __init__(self, failing=lambda _spec: None):
        self.asked = []
        self.failing = failing

    def __call__(self, spec, *, rank, device, workspace_bytes):
        """Take note of the spec and answer."""
        self.asked.append(spec)
        return self.failing(spec) or estimate_of(spec)


def run_of(spec, extra=None, **more):
    """Return a run of a spec that held what ``peaks_of`` says, and ``extra`` in backward."""
    peaks = peaks_of(spec)
    for category, size in (extra or {}).items():
        peaks["backward"][category] = peaks["backward"].get(category, 0) + size
    run = make_run(peaks=peaks, resident={"parameters": 1000 * MIB}, **more)
    manifest = replace(
        run.manifest,
        spec=spec_to_mapping(spec),
        effective_config=dict(resolve_spec(spec).fields),
        device_type="cpu",
        world_size=spec.world_size,
    )
    return replace(run, manifest=manifest)


def compared(b, extra=None, *, simulator=None, always=False, **more):
    """Compare BASE with checkpointing to ``b``; ``more`` goes to B's run."""
    a = spec_of("a", config__activation_checkpointing={"mode": "full"})
    simulator = simulator or Simulator()
    simulation = Simulation(simulate=simulator, always=always)
    return compare_runs([run_of(a)], [run_of(b, extra, **more)], simulation=simulation), simulator


def peak_rows(comparison):
    """Return the rows of the peak over all ranks."""
    return [
        row
        for row in comparison.attribution
        if (row.metric, row.rank, row.phase) == ("peak_allocated_bytes", None, None)
    ]


def test_an_interaction_is_divided_between_both_fields():
    """Batch and checkpointing multiply: alone 1 and 3, together 7; shares are 2.5 and 4.5."""
    comparison, simulator = compared(spec_of("b", workload__micro_batch=2))
    rows = {row.keys: row for row in peak_rows(comparison)}
    assert len(simulator.asked) == 4
    assert {keys: row.value for keys, row in rows.items()} == {
        ("batch.micro",): 250 * MIB,
        ("recompute.mode",): 450 * MIB,
    }
    batch = rows[("batch.micro",)]
    assert (batch.first_in, batch.last_out) == (100 * MIB, 400 * MIB)
    assert batch.interacts_with == ("recompute.mode",)
    assert batch.level == 1
    (pair,) = [i for i in comparison.what_if.interactions if i.phase is None]
    assert pair.value == 300 * MIB


def test_advice_saves_what_undoing_one_field_saves():
    """Setting one factor of a product back saves more than its share."""
    comparison, _ = compared(spec_of("b", workload__micro_batch=2))
    saves = {f.flags: f.advice[0].saves_bytes for f in comparison.findings if f.advice}
    assert saves == {("batch.micro",): 400 * MIB, ("recompute.mode",): 600 * MIB}
    assert "how much depends on recompute.mode" in next(
        f.claim for f in comparison.findings if f.flags == ("batch.micro",)
    )


def test_a_field_without_effect_gets_nothing():
    """A changed field that moves no byte is told with a share of 0 and has no row."""
    b = spec_of("b", workload__micro_batch=2, config__optimizer={"weight_decay": 0.1})
    comparison, _ = compared(b)
    assert all("optimizer.weight_decay" not in row.keys for row in comparison.attribution)
    shares = {s.keys: s.value for s in comparison.what_if.shares if s.phase is None}
    assert shares.get(("optimizer.weight_decay",), 0) == 0


def test_what_was_measured_beyond_the_simulation_is_unexplained():
    """Bytes that the simulation does not show stay with no field, and the miss is told."""
    b = spec_of("b", workload__micro_batch=2)
    comparison, _ = compared(b, {"temporaries": 70 * MIB})
    (rest,) = [row for row in peak_rows(comparison) if not row.keys]
    assert (rest.category, rest.value) == ("temporaries", 70 * MIB)
    metric = next(
        m
        for m in comparison.metrics
        if (m.name, m.rank, m.phase) == ("peak_allocated_bytes", None, None)
    )
    assert sum(row.value for row in peak_rows(comparison)) == metric.delta
    missed = {
        (m.phase, m.category): m.miss
        for m in comparison.what_if.misses
        if m.miss and m.metric.startswith("peak")
    }
    assert missed == {(None, "temporaries"): 70 * MIB, ("backward", "temporaries"): 70 * MIB}


def test_a_simulation_that_disagrees_is_no_prediction():
    """A category whose simulated change is far from the measured one keeps level 0."""
    comparison, _ = compared(spec_of("b", workload__micro_batch=2), {"activations": 400 * MIB})
    rows = [row for row in peak_rows(comparison) if row.category == "activations"]
    assert {row.level for row in rows if row.keys} == {0}
    assert sum(row.value for row in rows if not row.keys) == 400 * MIB


def test_bytes_that_a_run_names_otherwise_are_still_divided():
    """200 MiB gathered are temporaries in the run: no prediction, but the field has its share; two
    categories that miss in one direction are a miss, which divides nothing.
    """
    b = spec_of("b", workload__micro_batch=2, config__fsdp2={"reshard_after_forward": False})
    named = {"unsharded_parameters": -200 * MIB, "temporaries": 200 * MIB}
    missed = {"unsharded_parameters": -200 * MIB, "parameters": -50 * MIB}
    shares = []
    for extra in (named, missed):
        comparison, _ = compared(b, extra)
        rows = [row for row in peak_rows(comparison) if row.category == "unsharded_parameters"]
        by_keys = {row.keys: row for row in rows}
        shares.append(by_keys.pop(("sharding.reshard_after_forward",), None))
        assert sum(row.value for row in rows) == 0
    assert shares[0] is not None
    assert (shares[0].value, shares[0].level) == (200 * MIB, 0)
    assert shares[1] is None


def test_one_field_is_not_simulated_unless_asked():
    """A lone changed field costs no simulation by default; where it alone differs, never."""
    other = {"environment": {"torch": "0"}}
    _, simulator = compared(spec_of("b"), **other)
    assert simulator.asked == []
    comparison, simulator = compared(spec_of("b"), always=True, **other)
    assert len(simulator.asked) == 2
    assert comparison.what_if is not None
    comparison, simulator = compared(spec_of("b"), always=True)
    assert simulator.asked == []
    assert {row.level for row in peak_rows(comparison)} == {2}


def test_a_field_beside_one_that_cannot_matter_is_simulated():
    """Two fields changed, one of which may touch memory: the simulation tells all of its bytes."""
    b = spec_of("b", config__optimizer={"max_grad_norm": 1.0})
    comparison, simulator = compared(b)
    assert len(simulator.asked) == 4
    assert {row.keys: row.share for row in peak_rows(comparison)} == {("recompute.mode",): 1.0}


def test_a_point_that_cannot_run_is_an_outcome():
    """A combination that the simulator refuses is left out and told, and shares still sum up."""

    def failing(spec):
        lonely = spec.workload.micro_batch == 2 and spec.config.activation_checkpointing.mode
        return "cannot run" if lonely == "full" else None

    b = spec_of("b", workload__micro_batch=2)
    comparison, _ = compared(b, simulator=Simulator(failing))
    assert [p.failure for p in comparison.what_if.points if p.failure] == ["cannot run"]
    shares = {s.keys: s for s in comparison.what_if.shares if s.phase is None}
    assert shares[("batch.micro",)].one_sided
    assert sum(s.value for s in shares.values()) == 700 * MIB


def test_compilation_is_left_to_its_known_effects():
    """Both sides are simulated uncompiled, and bytes beyond that may be compilation's: level 0."""
    b = spec_of("b", workload__micro_batch=2, config__compile=True)
    comparison, simulator = compared(b, {"activations": -60 * MIB})
    assert not any(spec.config.compile for spec in simulator.asked)
    assert comparison.what_if.not_simulated == ("compile.enabled",)
    told = {row.keys: (row.value, row.level) for row in peak_rows(comparison)}
    assert told[("compile.enabled",)] == (-60 * MIB, 0)


def test_an_end_that_cannot_be_simulated_leaves_the_known_effects():
    """When A or B itself cannot be simulated, a warning says why and effects stand in."""
    b = spec_of("b", workload__micro_batch=2)
    comparison, _ = compared(b, simulator=Simulator(lambda _spec: "no such model"))
    assert comparison.what_if is None
    assert any("not simulated: no such model" in text for text in comparison.warnings)
    assert {row.level for row in peak_rows(comparison)} == {0}


def test_every_row_can_be_traced():
    """Each row names runs and points that the payload lists, with what turns A into them."""
    comparison, _ = compared(spec_of("b", workload__micro_batch=2))
    payload = comparison_to_payload(comparison)
    points = {point["id"]: point for point in payload["what_if"]["points"]}
    for row in payload["attribution"]:
        assert {"A", "B"} <= set(row["rests_on"])
        assert set(row["rests_on"]) - {"A", "B"} <= set(points)
    assert points["S1"]["overrides"] == [
        "config.activation_checkpointing.mode=none",
        "workload.micro_batch=2",
    ]


@pytest.mark.parametrize("fmt", ["terminal", "markdown", "html"])
def test_reports_show_shares_and_points(fmt):
    """Every report shows each field's share; those with room show the points too."""
    a = spec_of("a", config__activation_checkpointing={"mode": "full"})
    b = spec_of("b", workload__micro_batch=2)
    simulation = Simulation(simulate=Simulator())
    runs = [run_of(a)], [run_of(b)]
    text = render_comparison(compare_runs(*runs, simulation=simulation), *runs, fmt)
    assert "64.3 %" in text
    assert "equal to the byte" in " ".join(text.split())
    plain = html.unescape(re.sub(r"<[^>]*>", "", text))
    assert ("workload.micro_batch=2" in plain) == (fmt != "terminal")
