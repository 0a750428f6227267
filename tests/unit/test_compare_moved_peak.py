"""Comparisons in which the peak of the step moves to another phase."""

from builders import DEFAULT_PEAKS, GIB, make_change, make_diff, make_effect, make_run

from fsdp_doctor.attribution.compare import compare_with_diff

FOREACH = make_change(
    "optimizer.foreach", False, True, make_effect("temporaries", "up", None, "optimizer")
)
RECOMPUTE = make_change(
    "recompute.mode",
    "none",
    "full",
    make_effect("activations", "down"),
    make_effect("temporaries", "either", None, "backward"),
)
DECOY = make_change("wrap", "block", "none", make_effect("communication", "up"))
OPTIMIZER_FULL = {**DEFAULT_PEAKS, "optimizer": {"parameters": GIB, "temporaries": 6 * GIB}}
RECOMPUTED = {
    "forward": {"parameters": GIB},
    "backward": {"parameters": GIB, "gradients": GIB, "temporaries": GIB // 2},
    "optimizer": DEFAULT_PEAKS["optimizer"],
}


def whole_rows(result):
    """Return the division of rank 0's peak by category, which must sum to its difference."""
    rows = [r for r in result.attribution if (r.rank, r.phase) == (0, None)]
    (metric,) = [
        m for m in result.metrics if (m.name, m.rank, m.phase) == ("peak_allocated_bytes", 0, None)
    ]
    assert sum(r.value for r in rows) == metric.delta
    return {r.category: r for r in rows}


def test_a_risen_peak_is_explained_by_the_phase_in_which_b_peaks():
    """The optimizer's own growth is told, and that A's peak, in backward, did not change."""
    diff = make_diff(FOREACH, DECOY)
    result = compare_with_diff([make_run()], [make_run(peaks=OPTIMIZER_FULL)], diff)
    finding = result.findings[0]
    assert finding.flags == ("optimizer.foreach",)
    assert finding.claim.startswith(
        "peak allocated memory of rank 0 rose by 3.00 GiB; in optimizer, where B peaked, it rose "
        "by 4.00 GiB; optimizer.foreach false -> true may account for 6.00 GiB of it in temporaries"
    )
    assert finding.claim.endswith("the peak was backward's 4.00 GiB, which did not change")
    assert finding.advice[0].saves_bytes == 3 * GIB


def test_a_fallen_peak_is_explained_by_the_phase_in_which_a_peaked():
    """Backward lost its activations; the peak is now the optimizer's, which did not change."""
    diff = make_diff(RECOMPUTE, DECOY)
    result = compare_with_diff([make_run()], [make_run(peaks=RECOMPUTED)], diff)
    finding = result.findings[0]
    assert finding.flags == ("recompute.mode",)
    assert "in backward, where A peaked, it fell by 1.50 GiB" in finding.claim
    assert "-2.00 GiB in activations, +512.00 MiB in temporaries" in finding.claim
    assert finding.claim.endswith("the peak is now the optimizer's 3.00 GiB, which did not change")


def test_no_effect_matches_bytes_of_two_phases():
    """Between backward and optimizer nothing is named, and the reason is that the peak moved."""
    for change, peaks in ((FOREACH, OPTIMIZER_FULL), (RECOMPUTE, RECOMPUTED)):
        diff = make_diff(change, DECOY)
        rows = whole_rows(compare_with_diff([make_run()], [make_run(peaks=peaks)], diff))
        assert {r.keys for r in rows.values()} == {()}
        assert all(
            r.evidence.endswith("the peak moved from backward to optimizer") for r in rows.values()
        )


def test_a_moved_peak_of_a_lone_field_is_its_doing():
    """In a controlled pair all bytes follow from the only field, though the peak moved."""
    diff = make_diff(FOREACH)
    result = compare_with_diff([make_run()], [make_run(peaks=OPTIMIZER_FULL)], diff)
    rows = whole_rows(result)
    assert {(r.keys, r.level) for r in rows.values()} == {(("optimizer.foreach",), 2)}
    assert rows["temporaries"].evidence.endswith(
        "the peak moved from backward to optimizer, which follows from the only field that differs"
    )
