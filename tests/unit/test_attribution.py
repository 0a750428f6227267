"""Which field a memory difference is put down to."""

import pytest
from builders import GIB, MIB, make_change, make_effect
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_doctor.attribution.attribute import Split, attribute_split
from fsdp_doctor.attribution.candidates import agrees, blame
from fsdp_doctor.model.comparison import Metric

CATEGORIES = ("parameters", "activations", "unsharded_parameters", "rounding", "unknown")
RESHARD = "sharding.reshard_after_forward"


def make_split(a, b, *, phases=("backward",), total=None):
    """Return a split of the peak; ``total`` is the metric's delta when it is not the sum."""
    delta = sum(b.values()) - sum(a.values()) if total is None else total
    metric = Metric(
        name="peak_allocated_bytes",
        unit="bytes",
        better="lower",
        rank=0,
        phase=None,
        category=None,
        a=sum(a.values()),
        b=sum(a.values()) + delta,
        delta=delta,
        relative=None,
        verdict="worse",
    )
    return Split(metric=metric, a=a, b=b, phases=phases)


sides = st.dictionaries(st.sampled_from(CATEGORIES), st.integers(0, 1 << 40))
effects = st.builds(
    make_effect,
    st.sampled_from(CATEGORIES),
    st.sampled_from(["up", "down", "none", "either"]),
    st.none() | st.integers(-(1 << 40), 1 << 40),
    st.sampled_from([None, "forward", "backward"]),
)
changes = st.lists(
    st.builds(
        lambda key, found: make_change(key, 1, 2, *found),
        st.sampled_from(["a", "b", "c", "d"]),
        st.lists(effects, max_size=4),
    ),
    max_size=4,
    unique_by=lambda change: change.key,
)


@given(sides, sides, changes, st.integers(-(1 << 30), 1 << 30))
@settings(deadline=None)
def test_rows_sum_to_the_delta_exactly(a, b, changed, rest):
    """Attributed, joint and unexplained bytes sum to the peak's delta, as integers."""
    total = sum(b.values()) - sum(a.values()) + rest
    rows = attribute_split(make_split(a, b, total=total), changed)
    assert sum(row.value for row in rows) == total
    assert all(isinstance(row.value, int) for row in rows)


@given(sides, sides, changes)
@settings(deadline=None)
def test_only_fields_with_a_fitting_effect_are_named(a, b, changed):
    """Every named field has an effect on that category in that phase; unexplained has no level."""
    by_key = {change.key: change for change in changed}
    for row in attribute_split(make_split(a, b), changed):
        assert (row.level is None) == (not row.keys)
        for key in row.keys:
            assert any(
                effect.category == row.category
                and effect.direction != "none"
                and effect.phase in (None, "backward")
                for effect in by_key[key].effects
            )


def test_single_field_with_agreeing_formula_is_level_1():
    """One field that touches the category, its formula within 3 %: predicted."""
    change = make_change(RESHARD, True, False, make_effect("unsharded_parameters", "up", GIB))
    (row,) = attribute_split(
        make_split({"unsharded_parameters": 0}, {"unsharded_parameters": GIB + 20 * MIB}), [change]
    )
    assert row.keys == (RESHARD,)
    assert (row.level, row.value, row.predicted) == (1, GIB + 20 * MIB, GIB)
    assert row.share == 1.0


@pytest.mark.parametrize("size", [None, GIB // 2])
def test_single_field_without_agreeing_formula_is_level_0(size):
    """No formula, or one that is off, leaves it at ``may``."""
    change = make_change(RESHARD, True, False, make_effect("unsharded_parameters", "up", size))
    (row,) = attribute_split(make_split({}, {"unsharded_parameters": GIB}), [change])
    assert (row.keys, row.level) == ((RESHARD,), 0)


def test_two_fields_are_joint_and_not_divided():
    """Two fields that touch one category share one row, even when one has a formula."""
    changed = [
        make_change("batch.micro", 1, 2, make_effect("activations", "up", GIB)),
        make_change("recompute.mode", "full", "none", make_effect("activations", "up")),
    ]
    (row,) = attribute_split(make_split({}, {"activations": 3 * GIB}), changed)
    assert row.keys == ("batch.micro", "recompute.mode")
    assert (row.level, row.value, row.predicted) == (0, 3 * GIB, None)


def test_decoys_get_nothing():
    """A changed field without effects, or with none on memory, is never named."""
    changed = [
        make_change("seed", 0, 1),
        make_change("log.interval", 1, 2, make_effect("activations", "none")),
        make_change("batch.micro", 1, 2, make_effect("activations", "up")),
        make_change("optimizer.eps", 1, 2, make_effect("activations", "up", 0)),
    ]
    (row,) = attribute_split(make_split({}, {"activations": GIB}), changed)
    assert row.keys == ("batch.micro",)


def test_fields_that_work_against_each_other_stay_joint():
    """The net of two opposing fields is put down to both; a lone opposing one explains nothing."""
    lowers = make_change("recompute.mode", "none", "full", make_effect("activations", "down"))
    raises = make_change("batch.micro", 1, 2, make_effect("activations", "up"))
    split = make_split({}, {"activations": GIB})
    (row,) = attribute_split(split, [lowers, raises])
    assert row.keys == ("recompute.mode", "batch.micro")
    assert row.level == 0
    assert row.evidence.endswith("(recompute.mode works against the others)")
    (row,) = attribute_split(split, [lowers])
    assert row.keys == ()
    assert "would lower it" in row.evidence


def test_opposing_formulas_that_together_fit_stay_joint():
    """A rise of 3 less a fall of 1 that was measured as 2 is put down to both."""
    changed = [
        make_change("batch.micro", 1, 2, make_effect("activations", "up", 3 * GIB)),
        make_change("recompute.mode", "none", "full", make_effect("activations", "down", -GIB)),
    ]
    found = blame(changed, "activations", None, 2 * GIB)
    assert found.keys == ("batch.micro", "recompute.mode")
    assert (found.level, found.predicted) == (0, 2 * GIB)


def test_effect_of_another_phase_does_not_count():
    """An effect in the optimizer step explains nothing of a peak in backward."""
    change = make_change(
        "optimizer.foreach", False, True, make_effect("temporaries", "up", GIB, "optimizer")
    )
    split = make_split({}, {"temporaries": GIB})
    assert attribute_split(split, [change])[0].keys == ()
    moved = make_split({}, {"temporaries": GIB}, phases=("backward", "optimizer"))
    (row,) = attribute_split(moved, [change])
    assert row.keys == ()
    assert row.evidence.endswith("the peak moved from backward to optimizer")


def test_between_two_phases_only_an_agreeing_formula_of_all_phases_counts():
    """Where the peak moved, sharded state is still its formula's; what merely may fit is not."""
    sharded = make_change("sharding", 1, 2, make_effect("parameters", "up", GIB))
    saved = make_change("recompute.mode", "full", "none", make_effect("activations", "up"))
    moved = make_split({}, {"parameters": GIB, "activations": GIB}, phases=("forward", "backward"))
    rows = {row.category: row for row in attribute_split(moved, [sharded, saved])}
    assert (rows["parameters"].keys, rows["parameters"].level) == (("sharding",), 1)
    assert rows["activations"].keys == ()


def test_untouched_categories_stay_unexplained():
    """What no field touches is printed with its share, not spread."""
    change = make_change(RESHARD, True, False, make_effect("unsharded_parameters", "up"))
    rows = attribute_split(
        make_split({}, {"unsharded_parameters": 3 * GIB, "unknown": GIB}), [change]
    )
    assert [(row.keys, row.value) for row in rows] == [((RESHARD,), 3 * GIB), ((), GIB)]
    assert rows[1].share == 0.25


def test_small_differences_are_not_confirmed_by_the_absolute_tolerance():
    """In a small run a formula 300 KiB off does not agree with a change of 400 KiB."""
    assert not agrees(100 << 10, 400 << 10)
    assert agrees(390 << 10, 400 << 10)
    assert agrees(20 * MIB, 21 * MIB)
    assert not agrees(-20 * MIB, 20 * MIB)
    assert not agrees(None, MIB)


def test_phases_with_different_formulas_give_no_prediction():
    """Between phases nothing says which formula holds at the peak."""
    change = make_change(
        "k",
        1,
        2,
        make_effect("gradients", "up", GIB, "forward"),
        make_effect("gradients", "up", 2 * GIB, "backward"),
    )
    assert blame([change], "gradients", {"forward", "backward"}, GIB).predicted is None
    assert blame([change], "gradients", {"backward"}, 2 * GIB).level == 1
