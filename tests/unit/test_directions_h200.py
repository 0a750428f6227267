"""What sharding and offload flags are said to do, judged on every recorded H200 pair.

A pair is two runs of one world size that differ in sharding and offload fields only. For each
memory category that all effects of the change move one way in a phase, the bytes at that phase's
peak must not have moved the other way; a category counts as shown when they moved in some phase
(a buffer need not be alive at a peak).
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

from fsdp_doctor.attribution.compare import effective_config
from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.model.config import ConfigDiff
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs import load_run

RECORDED = Path(__file__).parent.parent.parent / "profiles" / "h200"
PHASES = ("forward", "backward", "optimizer")
JUDGED = ("sharding.", "offload.")


def category_bytes(run: Run, category: str, phase: str) -> int:
    """Return the bytes of a category at the peak of a phase."""
    anatomy = run.ranks[0].anatomy
    assert anatomy is not None
    return anatomy.phases[phase].categories.get(category, 0)


def said(diff: ConfigDiff, category: str, phase: str) -> set[str]:
    """Return the directions that the changed fields give a category in a phase."""
    return {
        effect.direction
        for change in diff.changed
        for effect in change.effects
        if effect.category == category
        and effect.phase in (None, phase)
        and effect.direction != "none"
        and effect.bytes != 0
    }


def verdict(a: Run, b: Run, category: str, phase: str, directions: set[str]) -> str | None:
    """Return ``agrees``, ``unmoved`` or ``contradicts``; None where nothing definite is said."""
    if directions not in ({"up"}, {"down"}):
        return None
    before, after = (category_bytes(run, category, phase) for run in (a, b))
    if abs(after - before) < max(1 << 20, before // 1000):
        return "unmoved"
    return "agrees" if (after > before) == (directions == {"up"}) else "contradicts"


def test_directions_of_sharding_and_offload_flags() -> None:
    """No recorded pair contradicts a direction, and at least four of five show it."""
    runs = {p.parent: load_run(p.parent) for p in sorted(RECORDED.glob("world-*/*/run.json"))}
    counts: Counter[str] = Counter()
    contradictions = []
    for (path_a, a), (path_b, b) in itertools.permutations(runs.items(), 2):
        if path_a.parent != path_b.parent:
            continue
        diff = diff_configs(
            effective_config(a), effective_config(b), a.manifest.sizes, b.manifest.sizes
        )
        if not diff.changed or not all(c.key.startswith(JUDGED) for c in diff.changed):
            continue
        categories = {e.category for change in diff.changed for e in change.effects}
        for category in sorted(categories):
            found = {verdict(a, b, category, p, said(diff, category, p)) for p in PHASES}
            if "contradicts" in found:
                contradictions.append((path_a.name, path_b.name, category))
            counts.update(["agrees" if "agrees" in found else "unmoved"] if found != {None} else [])
    print(dict(counts))
    assert not contradictions
    assert counts["agrees"] >= 4 * counts["unmoved"]
    assert counts["agrees"] > 300
