"""When a pair of runs is a controlled experiment, and when it is not."""

from dataclasses import replace

import pytest
from builders import DEFAULT_PEAKS, GIB, make_change, make_diff, make_effect, make_run

from fsdp_doctor.attribution.compare import compare_with_diff
from fsdp_doctor.model.run import Failure, ModelSizes

RESHARD = "sharding.reshard_after_forward"
CHANGE = make_change(RESHARD, True, False, make_effect("unsharded_parameters", "up", GIB))
MORE = {**DEFAULT_PEAKS, "backward": {**DEFAULT_PEAKS["backward"], "unknown": GIB}}
ENVIRONMENT = {"torch": "2.11.0"}
SMALL = ModelSizes(parameters=10, parameter_bytes=40)
GPT = {"workload": {"model": {"layers": 2}}}
OWN = {"workload": {"model": {"factory": "mine:build"}}}


def levels(a, b, change=CHANGE):
    """Return the levels of the peak's rows, over all ranks, of B that holds 1 GiB more."""
    result = compare_with_diff(a, b, make_diff(change))
    return {
        row.level
        for row in result.attribution
        if (row.metric, row.rank, row.phase) == ("peak_allocated_bytes", None, None)
    }


def run_of_git(commit, *, dirty=False, spec=OWN, **more):
    """Return a run recorded in a git folder of this state."""
    git = None if commit is None else {"commit": commit, "dirty": dirty}
    return make_run(spec=spec, environment={**ENVIRONMENT, "git": git}, **more)


def test_the_only_difference_is_the_cause():
    """A field that alone differs gets all allocated bytes; with another driver it does not."""
    assert levels([make_run()], [make_run(peaks=MORE)]) == {2}
    other = make_run(peaks=MORE, environment={"torch": "2.12.0"})
    beside = compare_with_diff([make_run()], [other], make_diff(CHANGE))
    assert all(row.keys == () for row in beside.attribution)
    assert "is the only field that changed" in beside.findings[0].evidence[-1].text


@pytest.mark.parametrize(
    "b",
    [
        {"tool_version": "1"},
        {"sizes": SMALL},
        {"environment": {}},
        {"environment": {"torch": "2.11.0", "variables": {"NCCL_P2P_DISABLE": "1"}}},
        {"failure": Failure(kind="exception", message="no", step=3)},
        {"source": "one_rank"},
    ],
    ids=["tool", "model", "no-environment", "variable", "failed", "source"],
)
def test_anything_else_that_differs_is_no_controlled_pair(b):
    """Another tool, model, environment or a failed run: the lone field gets no level 2."""
    assert 2 not in levels([make_run()], [make_run(peaks=MORE, **b)])


def test_wrap_units_are_no_other_model():
    """A field that cuts the same model into other units is controlled: its units follow from it."""
    units = replace(SMALL, unit_parameters=(4, 6))
    assert levels([make_run(sizes=SMALL)], [make_run(peaks=MORE, sizes=units)]) == {2}


def test_all_launches_count():
    """A third launch on another driver takes the level away."""
    side = [make_run(peaks=MORE) for _ in range(2)]
    assert levels([make_run()], side) == {2}
    third = make_run(peaks=MORE, environment={"torch": "2.11.0", "driver": "580"})
    assert levels([make_run()], [*side, third]) == {None}


def test_host_threads_are_excepted():
    """The number of host threads moves time, and is said to, but never allocated bytes."""
    a = make_run(environment={**ENVIRONMENT, "threads": 16})
    b = make_run(environment={**ENVIRONMENT, "threads": 1}, peaks=MORE)
    assert levels([a], [b]) == {2}
    (warning,) = compare_with_diff([a], [b], make_diff(CHANGE)).warnings
    assert warning == (
        "these runs also differ in threads: 16 -> 1: that can move time, not allocated memory"
    )


def test_a_changed_model_field_explains_other_sizes():
    """More layers are another model: then sizes are what the field changed."""
    layers = make_change("model.layers", 8, 16, make_effect("parameters", "up"))
    a, b = make_run(sizes=SMALL), make_run(sizes=replace(SMALL, parameters=20), peaks=MORE)
    assert levels([a], [b], layers) == {2}
    assert levels([a], [b]) == {None}


def test_an_own_model_needs_one_clean_commit():
    """Another or a dirty commit may be another model; without git nothing speaks against it."""
    a = run_of_git("1")
    assert levels([a], [run_of_git("1", peaks=MORE)]) == {2}
    assert levels([a], [run_of_git("2", peaks=MORE)]) == {None}
    assert levels([a], [run_of_git("1", dirty=True, peaks=MORE)]) == {None}
    assert levels([a], [run_of_git(None, peaks=MORE)]) == {None}
    assert levels([run_of_git(None)], [run_of_git(None, peaks=MORE)]) == {2}


def test_the_built_in_model_does_not_depend_on_git():
    """The packaged GPT is the same whatever folder the command ran in."""
    a, b = run_of_git("1", spec=GPT), run_of_git("2", dirty=True, spec=GPT, peaks=MORE)
    assert levels([a], [b]) == {2}
    assert compare_with_diff([a], [b], make_diff(CHANGE)).warnings == ()


def test_an_effect_that_a_controlled_pair_contradicts_loses_its_direction():
    """A category that fell at the peaks is not said to rise; where more may differ, it is."""
    change = make_change(
        RESHARD,
        True,
        False,
        make_effect("unknown", "down", -GIB),
        make_effect("activations", "up"),
        make_effect("unsharded_parameters", "up", GIB),
    )
    other = {"environment": {"torch": "2.12.0"}}
    told = []
    for beside in ({}, other):
        b = make_run(peaks=MORE, **beside)
        result = compare_with_diff([make_run()], [b], make_diff(change))
        told.append([(e.direction, e.bytes) for e in result.diff.changed[0].effects])
    assert told[0] == [("either", None), ("up", None), ("up", GIB)]
    assert told[1] == [("down", -GIB), ("up", None), ("up", GIB)]
