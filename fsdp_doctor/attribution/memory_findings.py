"""Say which field moved memory, by how many bytes, and what is left unexplained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_doctor.attribution.moved_peak import MovedPeak
from fsdp_doctor.model.comparison import Attribution, Metric
from fsdp_doctor.model.config import ConfigChange, ConfigDiff, ConfigValue
from fsdp_doctor.model.finding import Advice, Evidence, Finding
from fsdp_doctor.units import format_bytes, format_relative

CONFIDENCE = {2: 0.95, 1: 0.9, 0: 0.6}
JOINT_CONFIDENCE = 0.4
NOTABLE_SHARE = 0.1
"""Share of a difference from which its unexplained part gets a finding of its own."""
TRIFLE_SHARE = 0.01
"""Share of a difference below which a field gets a row but no finding."""
_TOLD_CATEGORIES = 3
CAUSES = {
    "parameters": "state-does-not-fit",
    "gradients": "state-does-not-fit",
    "optimizer_state": "state-does-not-fit",
    "buffers": "state-does-not-fit",
    "unsharded_parameters": "communication-buffers",
    "communication": "communication-buffers",
    "unsharded_gradients": "gradient-sync",
    "activations": "activations",
    "inputs": "activations",
    "logits": "logits",
    "temporaries": "optimizer-temporaries",
    "rounding": "fragmentation",
    "reserved_unallocated": "fragmentation",
    "outside_pytorch": "library-allocation",
}
_NAMES = {
    "peak_allocated_bytes": "peak allocated memory",
    "peak_reserved_bytes": "peak reserved memory",
    "resident_bytes": "memory resident between steps",
    "outside_pytorch_bytes": "device memory outside PyTorch",
}


_ASIDE = frozenset({"outside_pytorch_bytes"})
"""Metrics that no config field is known to move: worth a note when nothing explains them."""
_FOLLOWS_PEAK = frozenset({"peak_reserved_bytes", "resident_bytes"})
"""Metrics that repeat what a changed allocated peak has told; the tables still show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of one metric that name the same fields."""

    keys: tuple[str, ...]
    rows: tuple[Attribution, ...]
    """Largest first."""

    @property
    def value(self) -> int:
        """Signed bytes of all rows."""
        return sum(row.value for row in self.rows)

    @property
    def undone(self) -> int:
        """Signed bytes that go when these fields alone are set back."""
        known = [row.last_out for row in self.rows if row.last_out is not None]
        return sum(known) if self.is_simulated and known else self.value

    @property
    def is_simulated(self) -> bool:
        """Return whether these are the shares of simulated points."""
        return bool(self.keys) and any(row.first_in is not None for row in self.rows)

    @property
    def level(self) -> int | None:
        """The weakest level among the rows that make up the bulk of the bytes."""
        bulk = [row for row in self.rows if 10 * abs(row.value) >= abs(self.rows[0].value)]
        return min((row.level for row in bulk if row.level is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a finding is about: a metric that changed, and the metric whose rows explain it."""

    whole: Metric
    metric: Metric
    """``whole`` itself, or, when the peak moved, the peak of the phase that tells why."""
    text: str
    """How the claim begins."""
    end: str = ""
    """How the claim ends."""

    @property
    def delta(self) -> int:
        """Signed bytes to be explained."""
        return int(self.metric.delta or 0)

    @property
    def measured(self) -> tuple[Evidence, ...]:
        """Return the numbers behind the claim."""
        if self.metric is self.whole:
            return (_measured(self.whole),)
        return _measured(self.whole), _measured(self.metric)


def memory_findings(
    metrics: Sequence[Metric],
    attribution: Sequence[Attribution],
    diff: ConfigDiff,
    moved: MovedPeak | None,
) -> Iterator[Finding]:
    """Yield findings on memory: the peak (or, when it is the same, the phase that changed most),
    then reserved, resident and outside memory. When the peak ``moved``, its change is explained by
    that of one phase.
    """
    for metric in _told(metrics):
        subject = _subject_of(metric, metrics, moved)
        rows = [row for row in attribution if _belongs(row, subject.metric)]
        changes = {change.key: change for change in diff.changed}
        for group in _groups(rows):
            if group.keys and _matters(group, subject.metric):
                yield _named(subject, group, changes)
            elif not group.keys and abs(group.value) >= NOTABLE_SHARE * abs(subject.delta):
                yield _unexplained(subject, group, diff)


def _matters(group: Group, metric: Metric) -> bool:
    largest = max(abs(row.value) for row in group.rows)
    return largest >= TRIFLE_SHARE * abs(metric.delta or 0)


def _told(metrics: Sequence[Metric]) -> list[Metric]:
    """Return the metrics worth a finding, one row each: the rank that changed most."""
    told: list[Metric] = []
    for name in _NAMES:
        firm = [m for m in metrics if m.name == name and m.verdict in ("worse", "better")]
        whole = [m for m in firm if m.phase is None]
        chosen = whole or (firm if name == "peak_allocated_bytes" else [])
        if chosen and not (told and name in _FOLLOWS_PEAK):
            told.append(max(chosen, key=_size))
    return told


def _size(metric: Metric) -> tuple[float, bool, int]:
    """Order by bytes; among equal ones a rank is more telling than all, the first most."""
    rank = metric.rank
    return abs(metric.delta or 0), rank is not None, -(rank or 0)


def _belongs(row: Attribution, metric: Metric) -> bool:
    place = (row.metric, row.rank, row.phase)
    return place == (metric.name, metric.rank, metric.phase)


def _groups(rows: Sequence[Attribution]) -> list[Group]:
    by_keys: dict[tuple[str, ...], list[Attribution]] = {}
    for row in sorted(rows, key=lambda row: -abs(row.value)):
        by_keys.setdefault(row.keys, []).append(row)
    groups = [Group(keys=keys, rows=tuple(found)) for keys, found in by_keys.items()]
    return sorted(groups, key=lambda group: (not group.keys, -abs(group.value)))


def _subject(metric: Metric) -> str:
    """Return e.g. ``peak allocated memory of rank 0 in forward rose by 1.23 GiB``."""
    where = "" if metric.rank is None else f" of rank {metric.rank}"
    when = "" if metric.phase is None else f" in {metric.phase}"
    verb = "rose" if (metric.delta or 0) > 0 else "fell"
    amount = format_bytes(abs(metric.delta or 0))
    return f"{_NAMES[metric.name]}{where}{when} {verb} by {amount}"


def _subject_of(metric: Metric, metrics: Sequence[Metric], moved: MovedPeak | None) -> Subject:
    text = _subject(metric)
    if moved is None or metric.phase is not None or not metric.name.startswith("peak"):
        return Subject(whole=metric, metric=metric, text=text)
    telling = moved.telling(metric, metrics)
    if telling is None:
        return Subject(whole=metric, metric=metric, text=text, end=f"; {moved.text}")
    verb = "rose" if (telling.delta or 0) > 0 else "fell"
    amount = format_bytes(abs(telling.delta or 0))
    return Subject(
        whole=metric,
        metric=telling,
        text=f"{text}; {moved.where(metric)}, it {verb} by {amount}",
        end=f"; {moved.other(metric, metrics)}",
    )


def _named(subject: Subject, group: Group, changes: dict[str, ConfigChange]) -> Finding:
    rise = subject.metric.verdict == "worse"
    with_it = (group.value > 0) == (subject.delta > 0)
    joint = len(group.keys) > 1
    confidence = JOINT_CONFIDENCE if joint else CONFIDENCE.get(group.level or 0, 0.5)
    flags = " and ".join(change_text(changes[key]) for key in group.keys if key in changes)
    effect = _effect_text(group, with_it=with_it, joint=joint)
    if group.is_simulated:
        effect = _simulated_text(group, subject.delta)
    claim = f"{subject.text}; {flags} {effect}"
    undo = rise and with_it and not joint and group.undone > 0
    saves = min(group.undone, int(subject.whole.delta or 0))
    return Finding(
        cause=_cause(group),
        claim=claim + subject.end,
        confidence=confidence,
        severity="warning" if rise and with_it else "note",
        level=group.level,
        evidence=(*subject.measured, *(_evidence(row) for row in group.rows)),
        rests_on=rests_on(group.rows),
        flags=group.keys,
        advice=undo_advice(changes.get(group.keys[0]), saves) if undo else (),
    )


def _effect_text(group: Group, *, with_it: bool, joint: bool) -> str:
    if not with_it:
        verb = "changes" if group.level else "may have changed"
        return f"{verb} that by {_amounts(group, signed=True)}"
    amounts = _amounts(group, signed=len(group.rows) > 1)
    if joint:
        return f"may together account for {amounts}, not divided"
    return f"{'accounts for' if group.level else 'may account for'} {amounts}"


def _simulated_text(group: Group, delta: int) -> str:
    """Return e.g. ``accounts for 2.81 GiB of it (48 %): +3.55 GiB in activations, ...``."""
    verb = "accounts for" if group.level else "may account for"
    share = f"{100 * group.value / delta:.0f} %" if delta else ""
    amount = format_bytes(group.value, signed=True)
    least = TRIFLE_SHARE * max(abs(row.value) for row in group.rows)
    rows = tuple(row for row in group.rows if abs(row.value) >= least)
    told = replace(group, rows=rows)
    where = _amounts(told, signed=True) if len(rows) > 1 else _place(rows[0])
    text = f"{verb} {amount} of it ({share}), simulated: {where}"
    partners = list(dict.fromkeys(key for row in group.rows for key in row.interacts_with))
    return f"{text}; how much depends on {' and '.join(partners)}" if partners else text


def _place(row: Attribution) -> str:
    return f"all in {row.category or 'allocated memory'}"


def _amounts(group: Group, *, signed: bool) -> str:
    """Return e.g. ``1.20 GiB of it in unsharded_parameters (predicted 1.20 GiB)``."""

    def text(value: int) -> str:
        return format_bytes(value, signed=True) if signed else format_bytes(abs(value))

    parts = []
    for row in group.rows[:_TOLD_CATEGORIES]:
        hidden = row.predicted is None or group.is_simulated
        formula = "" if hidden else f" (predicted {text(row.predicted or 0)})"
        of_it = "" if signed else " of it"
        parts.append(f"{text(row.value)}{of_it} in {row.category or 'allocated memory'}{formula}")
    rest = sum(row.value for row in group.rows[_TOLD_CATEGORIES:])
    if len(group.rows) > _TOLD_CATEGORIES:
        parts.append(f"{text(rest)} in other categories")
    return ", ".join(parts)


def _unexplained(subject: Subject, group: Group, diff: ConfigDiff) -> Finding:
    metric = subject.metric
    categories = ", ".join(dict.fromkeys(row.category or "no category" for row in group.rows))
    share = format_relative(group.value / metric.delta if metric.delta else None)
    claim = (
        f"{subject.text}; {format_bytes(group.value, signed=True)} of it ({share} of the "
        f"difference) in {categories} is not explained by any changed field"
    )
    evidence = [*subject.measured, *(_evidence(row) for row in group.rows)]
    if diff.unknown:
        keys = ", ".join(change.key for change in diff.unknown)
        evidence.append(Evidence(text=f"changed fields whose effect is not known: {keys}"))
    elif len(diff.changed) == 1:
        only = diff.changed[0].key
        evidence.append(
            Evidence(
                text=f"{only} is the only field that changed: the two peaks may lie at different "
                "moments of a phase, which hold other blocks"
            )
        )
    return Finding(
        cause="unexplained",
        claim=claim + subject.end,
        confidence=0.9,
        severity="warning" if metric.verdict == "worse" and metric.name not in _ASIDE else "note",
        evidence=tuple(evidence),
        rests_on=rests_on(group.rows),
    )


def rests_on(rows: Sequence[Attribution]) -> tuple[str, ...]:
    """Return what some rows rest on, each once."""
    return tuple(dict.fromkeys(name for row in rows for name in row.rests_on))


def _measured(metric: Metric) -> Evidence:
    a, b = format_bytes(metric.a), format_bytes(metric.b)
    delta = None if metric.delta is None else int(metric.delta)
    phase = "" if metric.phase is None else f" in {metric.phase}"
    return Evidence(text=f"{metric.name}{phase}: {a} -> {b}", rank=metric.rank, bytes=delta)


def _evidence(row: Attribution) -> Evidence:
    return Evidence(text=row.evidence, rank=row.rank, bytes=row.value)


def _cause(group: Group) -> str:
    return CAUSES.get(group.rows[0].category or "", "configuration")


def value_text(value: ConfigValue) -> str:
    """Return a config value as users write it; ``(unset)`` where it is not set."""
    if not value.set and value.value is None:
        return "(unset)"
    if isinstance(value.value, bool):
        return "true" if value.value else "false"
    return str(value.value)


def change_text(change: ConfigChange) -> str:
    """Return e.g. ``sharding.reshard_after_forward true -> false``."""
    return f"{change.key} {value_text(change.a)} -> {value_text(change.b)}"


def _undo_text(change: ConfigChange) -> str:
    """Return how to undo a change, in the user's own key and spelling where they are known."""
    value = value_text(change.a)
    native = next(iter(change.a.native), None)
    if native is None or native == change.key or change.a.written is None:
        return f"set {change.key} back to {value}"
    written = value_text(replace(change.a, value=change.a.written))
    return f"set {native} back to {written} ({change.key} {value})"


def undo_advice(change: ConfigChange | None, saves: int | None) -> tuple[Advice, ...]:
    """Return the advice to undo a change, with the bytes that saves where they are known."""
    if change is None:
        return ()
    cost = None
    if change.step_time is not None and change.step_time.direction == "down":
        cost = f"undoes a gain in step time: {change.step_time.reason}"
    return (
        Advice(
            change=_undo_text(change),
            saves_bytes=saves,
            saves_text=None if saves is None else f"{format_bytes(saves)} per rank",
            cost=cost,
        ),
    )
