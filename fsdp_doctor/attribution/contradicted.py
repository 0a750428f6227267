"""Known effects of a lone changed field, set right where the two runs contradict their sign.

An effect says what a field does at any one moment. When the peaks of A and B lie at different
moments, of one phase or of two, the bytes of a category at one less those at the other may have the
other sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.config import ConfigDiff, Effect
from fsdp_doctor.units import format_bytes


def as_measured(diff: ConfigDiff, metrics: Sequence[Metric]) -> ConfigDiff:
    """Return the diff of a controlled pair with one changed field; where a category changed firmly
    against the sign of an effect, at the peak of its phase, its direction is open (``either``).
    """
    (change,) = diff.changed
    peaks = {
        (m.phase, m.category): m
        for m in metrics
        if m.name == "category_bytes" and m.rank is None and m.verdict in ("worse", "better")
    }
    effects = tuple(
        _as_measured(effect, peaks.get((effect.phase, effect.category)))
        for effect in change.effects
    )
    return replace(diff, changed=(replace(change, effects=effects),))


def _as_measured(effect: Effect, peak: Metric | None) -> Effect:
    rises = {"up": True, "down": False}.get(effect.direction)
    if effect.direction == "either" and effect.bytes:
        rises = effect.bytes > 0
    if peak is None or peak.delta is None or rises is None or rises == (peak.delta > 0):
        return effect
    told = "" if effect.bytes is None else f" (formula {format_bytes(effect.bytes, signed=True)})"
    change = format_bytes(peak.delta, signed=True)
    reason = f"{effect.reason}{told}; yet {change} between the two peaks"
    return replace(effect, direction="either", bytes=None, reason=reason)
