"""Comparisons of whole runs."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from builders import (
    DEFAULT_PEAKS,
    GIB,
    MIB,
    make_anatomy,
    make_change,
    make_diff,
    make_effect,
    make_rank,
    make_run,
)

from fsdp_doctor.attribution.compare import compare_runs, compare_with_diff, effective_config
from fsdp_doctor.attribution.payload import comparison_to_payload
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.memory import MemoryCounters
from fsdp_doctor.model.run import Failure, ModelSizes, PhaseRecord, TimeBreakdown

RESHARD = "sharding.reshard_after_forward"


def peaks_with(**more):
    """Return the default peaks with ``category=bytes`` added in backward."""
    return {**DEFAULT_PEAKS, "backward": {**DEFAULT_PEAKS["backward"], **more}}


def reshard_change(size=GIB, step_time="down"):
    """Return a change of resharding that adds ``size`` unsharded parameters."""
    return make_change(
        RESHARD,
        True,
        False,
        make_effect("unsharded_parameters", "up", size),
        step_time=step_time,
    )


def find(comparison, name, *, rank=None, phase=None, category=None):
    """Return the one metric of this place."""
    (metric,) = [
        m
        for m in comparison.metrics
        if (m.name, m.rank, m.phase, m.category) == (name, rank, phase, category)
    ]
    return metric


def timed_launches(rng, count, *, seconds=0.1, sd=0.005, **options):
    """Return launches of 12 timed steps that differ by ``sd`` (log)."""
    runs = []
    for _ in range(count):
        level = seconds * np.exp(rng.normal(0, sd))
        times = list(level * np.exp(rng.normal(0, 0.005, 12)))
        runs.append(make_run(times=times, **options))
    return runs


def test_identical_runs_blame_nothing():
    """Equal memory is ``same`` everywhere and no field is named, whatever changed."""
    result = compare_with_diff([make_run()], [make_run()], make_diff(reshard_change()))
    assert {m.verdict for m in result.metrics if m.unit == "bytes"} == {"same"}
    assert result.attribution == ()
    assert result.findings == ()


def test_below_the_threshold_nothing_is_blamed():
    """A rise of less than 1 MiB or 0.1 % is shown in bytes, called same, and not attributed."""
    b = make_run(peaks=peaks_with(unsharded_parameters=3 * MIB))
    result = compare_with_diff([make_run()], [b], make_diff(reshard_change()))
    metric = find(result, "peak_allocated_bytes")
    assert (metric.delta, metric.verdict) == (3 * MIB, "same")
    assert result.attribution == ()


def test_the_field_that_did_it_is_named_with_bytes_and_advice():
    """The claim names rank, change, category and formula; the advice undoes the change."""
    b = make_run(peaks=peaks_with(unsharded_parameters=GIB))
    decoy = make_change("seed", 0, 1)
    result = compare_with_diff([make_run()], [b], make_diff(decoy, reshard_change()))
    metric = find(result, "peak_allocated_bytes", rank=0)
    assert (metric.a, metric.b, metric.verdict) == (4 * GIB, 5 * GIB, "worse")
    assert metric.interval is None
    rows = [r for r in result.attribution if r.rank == 0 and r.phase is None]
    assert [(r.keys, r.value, r.level) for r in rows] == [((RESHARD,), GIB, 1)]
    finding = result.findings[0]
    assert finding.claim == (
        "peak allocated memory of rank 0 rose by 1.00 GiB; sharding.reshard_after_forward "
        "true -> false accounts for 1.00 GiB of it in unsharded_parameters (predicted 1.00 GiB)"
    )
    assert (finding.level, finding.flags, finding.severity) == (1, (RESHARD,), "warning")
    assert finding.advice[0].saves_bytes == GIB
    assert "step time" in finding.advice[0].cost
    assert not any("seed" in f.flags for f in result.findings)


def test_advice_speaks_the_users_language():
    """The change is undone in the native key and spelling, the canonical one beside it."""
    change = reshard_change()
    native = replace(change.a, native=("config.fsdp1.sharding_strategy",), written="FULL_SHARD")
    b = make_run(peaks=peaks_with(unsharded_parameters=GIB))
    result = compare_with_diff([make_run()], [b], make_diff(replace(change, a=native)))
    assert result.findings[0].advice[0].change == (
        "set config.fsdp1.sharding_strategy back to FULL_SHARD "
        "(sharding.reshard_after_forward true)"
    )


def test_unexplained_growth_is_a_finding():
    """Growth that no field touches is said to be unexplained."""
    b = make_run(peaks=peaks_with(unknown=GIB))
    decoy = make_change("optimizer.learning_rate", 1e-4, 3e-4)
    result = compare_with_diff([make_run()], [b], make_diff(reshard_change(), decoy))
    assert result.findings[0].cause == "unexplained"
    assert "not explained by any changed field" in result.findings[0].claim
    assert all(row.keys == () for row in result.attribution)


def test_joint_fields_are_told_as_not_divided():
    """Two fields on one category give one finding with both flags and no advice to undo one."""
    other = make_change("wrap", "block", "none", make_effect("unsharded_parameters", "up"))
    b = make_run(peaks=peaks_with(unsharded_parameters=GIB))
    result = compare_with_diff([make_run()], [b], make_diff(reshard_change(), other))
    finding = result.findings[0]
    assert finding.flags == (RESHARD, "wrap")
    assert "not divided" in finding.claim
    assert finding.advice == ()
    assert finding.level == 0


def test_several_categories_of_one_field_are_told_apart():
    """The claim does not net a rise in one category with a fall in another."""
    change = make_change(
        RESHARD,
        True,
        False,
        make_effect("unsharded_parameters", "up", 3 * GIB),
        make_effect("activations", "either"),
    )
    b = make_run(peaks=peaks_with(unsharded_parameters=3 * GIB, activations=GIB))
    claim = compare_with_diff([make_run()], [b], make_diff(change)).findings[0].claim
    assert claim.endswith(
        "accounts for +3.00 GiB in unsharded_parameters (predicted +3.00 GiB), "
        "-1.00 GiB in activations"
    )


def test_a_field_that_works_against_the_rise_is_a_note():
    """What lowered the peak while it rose is told without advice."""
    saves = make_change("recompute.mode", "none", "full", make_effect("activations", "down"))
    b = make_run(peaks=peaks_with(unsharded_parameters=3 * GIB, activations=GIB))
    result = compare_with_diff([make_run()], [b], make_diff(saves, reshard_change(3 * GIB)))
    (note,) = [f for f in result.findings if f.flags == ("recompute.mode",)]
    assert (note.severity, note.advice) == ("note", ())
    assert "may have changed that by -1.00 GiB in activations" in note.claim


def test_anatomy_that_differs_from_the_timed_peak_leaves_a_rest():
    """When timed steps differ more than the observed ones the rest is unexplained."""
    observed = peaks_with(unsharded_parameters=GIB)
    timed = peaks_with(unsharded_parameters=GIB + 64 * MIB)
    series = make_rank(0, peaks=timed, times=[0.1])
    anatomy = make_rank(0, peaks=observed).anatomy
    b = make_run(ranks=[replace(series, anatomy=anatomy)], world_size=1)
    a = make_run(world_size=1, times=[0.1])
    result = compare_with_diff([a], [b], make_diff(reshard_change()))
    rows = [r for r in result.attribution if r.rank == 0 and r.phase is None]
    assert [(r.keys, r.category, r.value) for r in rows] == [
        ((RESHARD,), "unsharded_parameters", GIB),
        ((), None, 64 * MIB),
    ]


def test_without_anatomy_the_total_goes_to_the_only_memory_field():
    """A log has peaks but no categories: the one field that touches memory may have done it."""
    b = make_run(peaks=peaks_with(unsharded_parameters=GIB), anatomy=False)
    result = compare_with_diff([make_run(anatomy=False)], [b], make_diff(reshard_change()))
    rows = [r for r in result.attribution if r.rank is None and r.phase is None]
    assert [(r.keys, r.category, r.value, r.level) for r in rows] == [((RESHARD,), None, GIB, 1)]


def test_set_up_phase_that_held_nothing_is_divided():
    """Parameters built on the device in B only: 0 bytes in A's init have no categories."""
    init = PhaseRecord(step=-1, phase="init", peak=MemoryCounters(allocated_bytes=0))
    series = []
    for size in (0, GIB):
        categories = {"parameters": size} if size else {}
        record = replace(init, peak=MemoryCounters(allocated_bytes=size))
        anatomy = make_anatomy({"init": categories, **DEFAULT_PEAKS})
        series.append(replace(make_rank(0), setup=(record,), anatomy=anatomy))
    a, b = (make_run(ranks=[s], world_size=1) for s in series)
    change = make_change("init.device", "meta", "cuda", make_effect("parameters", "up"))
    result = compare_with_diff([a], [b], make_diff(change))
    rows = [r for r in result.attribution if r.rank == 0]
    assert [(r.phase, r.category, r.keys) for r in rows] == [
        ("init", "parameters", ("init.device",))
    ]


def test_trifles_get_a_row_but_no_finding():
    """A few KiB beside a rise of 1 GiB are listed and not told."""
    inputs = make_change("batch.micro", 1, 2, make_effect("inputs", "up"))
    b = make_run(peaks=peaks_with(unsharded_parameters=GIB, inputs=4096))
    result = compare_with_diff([make_run()], [b], make_diff(inputs, reshard_change()))
    assert any(r.keys == ("batch.micro",) for r in result.attribution)
    assert not any("batch.micro" in f.flags for f in result.findings)


def test_resident_reserved_and_outside_are_attributed():
    """Resident memory by category; what reserved grows beyond allocated is its own category."""
    resident = {"parameters": GIB, "optimizer_state": 3 * GIB}
    state = make_change("optimizer", "sgd", "adamw", make_effect("optimizer_state", "up"))
    nccl = make_change("nccl.buffers", 1, 2, make_effect("outside_pytorch", "up"))
    a = make_run(reserved=6 * GIB, device_used=7 * GIB)
    b = make_run(reserved=8 * GIB, device_used=10 * GIB, resident=resident)
    result = compare_with_diff([a], [b], make_diff(state, nccl))
    by_metric = {
        (r.metric, r.category): (r.keys, r.value)
        for r in result.attribution
        if r.rank is None and r.phase is None
    }
    assert by_metric == {
        ("peak_reserved_bytes", "reserved_unallocated"): ((), 2 * GIB),
        ("resident_bytes", "optimizer_state"): (("optimizer",), 2 * GIB),
        ("outside_pytorch_bytes", "outside_pytorch"): (("nccl.buffers",), GIB),
    }


def test_reserved_of_single_launches_is_unclear_within_three_percent():
    """Reserved memory of identical launches differs, so a small difference is no verdict."""
    result = compare_with_diff(
        [make_run(reserved=100 * GIB)], [make_run(reserved=102 * GIB)], make_diff()
    )
    metric = find(result, "peak_reserved_bytes")
    assert metric.verdict == "unclear"
    assert "identical launches" in metric.warnings[0]


def test_values_that_vary_between_launches_are_not_exact():
    """Overlapping launches are unclear with a warning; ranges apart are firm."""
    a = [make_run(reserved=n * GIB) for n in (6, 8, 7)]
    b = [make_run(reserved=n * GIB) for n in (7, 9, 8)]
    c = [make_run(reserved=n * GIB) for n in (11, 12, 13)]
    overlapping = find(compare_with_diff(a, b, make_diff()), "peak_reserved_bytes")
    assert overlapping.verdict == "unclear"
    assert any("varies between the launches of A" in w for w in overlapping.warnings)
    assert find(compare_with_diff(a, c, make_diff()), "peak_reserved_bytes").verdict == "worse"


def test_cpu_runs_compare_the_observed_step():
    """Without counters in timed steps memory is that of the last observed step."""
    options = {"times": [0.1] * 10, "timed_memory": False, "device_type": "cpu"}
    b = make_run(peaks=peaks_with(activations=5 * GIB), **options)
    result = compare_with_diff([make_run(**options)], [b], make_diff())
    assert find(result, "peak_allocated_bytes").delta == 3 * GIB
    assert find(result, "category_bytes", category="activations").delta == 3 * GIB
    with pytest.raises(ValueError, match="unpack"):
        find(result, "peak_reserved_bytes")


def test_three_launches_find_a_slower_config():
    """Doubled step time is worse with an interval, halves throughput, and names candidates."""
    rng = np.random.default_rng(0)
    a, b = timed_launches(rng, 3), timed_launches(rng, 3, seconds=0.2)
    change = make_change("recompute.mode", "none", "full", step_time="up")
    result = compare_with_diff(a, b, make_diff(change, reshard_change()))
    step, tokens = find(result, "step_time_s"), find(result, "tokens_per_s")
    assert step.verdict == tokens.verdict == "worse"
    assert step.interval[0] < step.relative < step.interval[1]
    assert step.n_launches == (3, 3)
    assert step.p < 0.001
    (finding,) = [f for f in result.findings if f.cause == "step-time"]
    assert finding.flags == ("recompute.mode",)
    assert finding.level == 0


def test_a_slower_step_names_the_phases_that_moved():
    """Of the phases that rose only those with a tenth of the step's change or more are named."""
    a = {"times": [0.3] * 12, "phase_times": {"forward": [0.1] * 12, "backward": [0.2] * 12}}
    b = {"times": [0.34] * 12, "phase_times": {"forward": [0.136] * 12, "backward": [0.2036] * 12}}
    result = compare_with_diff(
        [make_run(**a) for _ in range(3)], [make_run(**b) for _ in range(3)], make_diff()
    )
    assert find(result, "phase_time_s", phase="backward").verdict == "worse"
    (finding,) = [f for f in result.findings if f.cause == "step-time"]
    assert "rose by 13.3 %, in forward;" in finding.claim
    assert [e.text for e in finding.evidence] == [
        "step_time_s: 300.0 ms -> 340.0 ms",
        "phase_time_s of forward: 100.0 ms -> 136.0 ms",
    ]


def test_single_launches_give_no_time_verdict_and_say_what_is_needed():
    """One launch a side: unclear, with a warning that asks for three."""
    rng = np.random.default_rng(0)
    a, b = timed_launches(rng, 1), timed_launches(rng, 1, seconds=0.2)
    result = compare_with_diff(a, b, make_diff(make_change("k", 1, 2, step_time="up")))
    step = find(result, "step_time_s")
    assert step.verdict == "unclear"
    assert any("at least 3 interleaved launches" in w for w in step.warnings)
    assert not any(f.cause == "step-time" for f in result.findings)


def test_identical_launches_get_no_time_verdict_by_chance():
    """In 60 comparisons of equal configs with 1 % launch noise none is worse or better."""
    rng = np.random.default_rng(42)
    for _ in range(60):
        a, b = timed_launches(rng, 3, sd=0.01), timed_launches(rng, 3, sd=0.01)
        result = compare_with_diff(a, b, make_diff())
        assert find(result, "step_time_s").verdict in ("same", "unclear")


def test_more_tokens_per_step_are_compared_by_throughput():
    """Twice the tokens in 1.5 times the time: no word on the step, the job is faster."""
    rng = np.random.default_rng(4)
    a = timed_launches(rng, 3, tokens_per_step=1000)
    b = timed_launches(rng, 3, seconds=0.15, tokens_per_step=2000)
    result = compare_with_diff(a, b, make_diff())
    step = find(result, "step_time_s")
    assert (step.verdict, step.comparable) == ("unclear", False)
    assert find(result, "tokens_per_s").verdict == "better"
    assert any("tokens_per_step differs" in w for w in result.warnings)
    (finding,) = (f for f in result.findings if f.cause == "throughput")
    assert finding.claim == "throughput rose by 33.5 %, by steps of different work"


def test_the_step_is_as_long_as_its_slowest_rank():
    """Step time is the maximum over ranks per step, not a mean."""
    ranks = [make_rank(0, times=[0.1, 0.3] * 6), make_rank(1, times=[0.3, 0.1] * 6)]
    run = make_run(ranks=ranks)
    step = find(compare_with_diff([run], [run], make_diff()), "step_time_s")
    assert step.a == pytest.approx(0.3)


def test_phases_and_breakdown_are_compared():
    """Phase times and the parts of the profiled step appear with phase and category."""
    times = {"times": [0.3] * 12, "phase_times": {"forward": [0.1] * 12, "backward": [0.2] * 12}}
    slower = {"times": [0.4] * 12, "phase_times": {"forward": [0.1] * 12, "backward": [0.3] * 12}}

    def breakdown(wait):
        return [
            TimeBreakdown(
                phase="backward",
                wall_s=0.2,
                kernel_s=0.1,
                exposed_communication_s=wait,
                communication_s=wait,
                copy_s=0.0,
                idle_s=0.0,
            )
        ]

    a = [make_run(**times, breakdown=breakdown(0.05)) for _ in range(3)]
    b = [make_run(**slower, breakdown=breakdown(0.15)) for _ in range(3)]
    result = compare_with_diff(a, b, make_diff())
    assert find(result, "phase_time_s", phase="backward").verdict == "worse"
    assert find(result, "phase_time_s", phase="forward").verdict == "same"
    exposed = find(result, "phase_time_s", phase="backward", category="exposed_communication")
    assert (exposed.verdict, exposed.relative) == ("worse", pytest.approx(2.0))
    copies = find(result, "phase_time_s", phase="backward", category="copy")
    assert (copies.verdict, copies.interval) == ("unclear", None)


def test_one_rank_runs_warn_that_communication_is_missing():
    """Times of one rank alone carry a warning, also against a run of real ranks."""
    rng = np.random.default_rng(0)
    a = timed_launches(rng, 1)
    b = timed_launches(rng, 1, source="one_rank")
    result = compare_with_diff(a, b, make_diff())
    assert any("lack communication" in w for w in find(result, "step_time_s").warnings)
    assert any(w.startswith("source differs") for w in result.warnings)


def test_missing_values_are_none_and_unclear():
    """What only one side recorded is None on the other, never invented."""
    a, b = make_run(device_used=9 * GIB, reserved=8 * GIB), make_run()
    metric = find(compare_with_diff([a], [b], make_diff()), "outside_pytorch_bytes")
    assert (metric.a, metric.b, metric.delta, metric.relative) == (GIB, None, None, None)
    assert metric.verdict == "unclear"
    assert metric.warnings == ("not recorded in B",)


def test_a_run_without_any_number_is_refused():
    """A failed run without steps, an empty side, and sides without common numbers are errors."""
    failure = Failure(kind="launch", message="no free port")
    empty = make_run("b", ranks=[], failure=failure)
    with pytest.raises(InputError, match="no free port"):
        compare_runs([make_run()], [empty])
    with pytest.raises(InputError, match="no run to compare"):
        compare_runs([], [make_run()])
    memory_only, time_only = make_run(), make_run(peaks={}, times=[0.1])
    with pytest.raises(InputError, match="band"):
        compare_runs([make_run()], [make_run()], band=-0.01)
    with pytest.raises(InputError, match="no number in common"):
        compare_with_diff([memory_only], [time_only], make_diff())


def test_runs_without_config_are_compared_but_not_attributed():
    """A run of the user's own loop has no config: metrics yes, attribution no, and it says so."""
    b = make_run(peaks=peaks_with(activations=9 * GIB))
    result = compare_runs([make_run()], [b])
    assert find(result, "peak_allocated_bytes").verdict == "worse"
    assert all(row.keys == () for row in result.attribution)
    assert any("no config is recorded in A and B" in w for w in result.warnings)


def test_what_differs_besides_the_config_is_said():
    """World size, device, model and environment are warnings with their meaning."""
    a = make_run(
        sizes=ModelSizes(parameters=10, parameter_bytes=40),
        environment={"torch": "2.10.0", "variables": {"NCCL_DEBUG": "INFO"}},
    )
    b = make_run(
        world_size=4,
        device_name="NVIDIA B200",
        sizes=ModelSizes(parameters=20, parameter_bytes=80),
        environment={"torch": "2.11.0", "variables": {"PYTORCH_ALLOC_CONF": "x:1"}},
    )
    text = "\n".join(compare_with_diff([a], [b], make_diff()).warnings)
    assert "world_size differs (2 -> 4)" in text
    assert "device_name differs" in text
    assert "model differs (10 parameters -> 20 parameters)" in text
    assert "torch: 2.10.0 -> 2.11.0" in text
    assert "variables.PYTORCH_ALLOC_CONF: not known -> x:1" in text


def test_config_of_a_run_is_read_from_its_manifest():
    """Framework version is the recorded torch; fields are those of the manifest."""
    config = effective_config(make_run(config={"batch.micro": 2}))
    assert (config.format, config.framework, config.version) == ("run", "torch", "2.11.0")
    assert config.fields["batch.micro"].value == 2


def test_payload_follows_the_json_contract():
    """Joint rows have a null key, unexplained rows their own list, and all of it is JSON."""
    other = make_change("wrap", "block", "none", make_effect("unsharded_parameters", "up"))
    b = make_run(peaks=peaks_with(unsharded_parameters=GIB, unknown=GIB))
    result = compare_with_diff([make_run()], [b], make_diff(reshard_change(), other))
    payload = json.loads(msgspec.json.encode(comparison_to_payload(result)))
    joint = payload["attribution"][0]
    assert (joint["key"], joint["keys"]) == (None, [RESHARD, "wrap"])
    assert payload["unexplained"][0]["category"] == "unknown"
    assert payload["unexplained"][0].keys() == joint.keys()
    names = "metric rank phase category key share value unit level first_in last_out"
    assert set(names.split()) | {"interacts_with", "evidence"} <= joint.keys()
    names = "name unit better rank phase category a b delta relative interval n_launches n_steps"
    assert set(names.split()) | {"p", "verdict", "warnings"} <= payload["metrics"][0].keys()
    change = payload["changed"][0]
    assert change["a"] == {
        "set": True, "value": True, "source": "file", "effective": True, "reason": None,
    }  # fmt: skip
    assert isinstance(payload["attribution"][0]["value"], int)
    assert change["native"] == {"a": [], "b": []}
