"""Evidence in, ranked findings out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from string import Formatter
from typing import Any, Literal

from fsdp_doctor.config.rules.evaluate import evaluate, truth
from fsdp_doctor.config.rules.expression import Node, parse
from fsdp_doctor.logs.scan import ScannedLogs
from fsdp_doctor.model.finding import Advice, Evidence, Finding
from fsdp_doctor.model.snapshot import SnapshotAnalysis
from fsdp_doctor.postmortem.causes import CAUSES, Cause, Change
from fsdp_doctor.postmortem.facts import Facts, collect
from fsdp_doctor.postmortem.rule import Rule
from fsdp_doctor.postmortem.rules import DEFINITIONS, RULES
from fsdp_doctor.postmortem.snapshot_facts import SIZES
from fsdp_doctor.postmortem.snapshots import failure_of
from fsdp_doctor.postmortem.triage import Triage, moment_of
from fsdp_doctor.units import format_bytes

MAX_FINDINGS = 5
ENOUGH = 0.4
"""A first cause below this confidence is no answer."""
_LEAST = 0.08
_MOST = 0.97
_SIZES = (
    frozenset(
        {
            "requested",
            "total",
            "free",
            "allocated",
            "reserved",
            "idle",
            "others",
            "outside",
            "unseen",
            "private",
            "limit",
            "first_bytes",
            "last_bytes",
            "grown",
        }
    )
    | SIZES
)
GUESS = 0.3
"""What is left of a guess's weight where a snapshot of the failure shows what it guesses."""


@cache
def compiled() -> tuple[tuple[Rule, Node], ...]:
    """Return the rules with their conditions parsed."""
    definitions: dict[str, Node] = {}
    for name, text in DEFINITIONS.items():
        definitions[name] = parse(text, definitions)
    return tuple((rule, parse(rule.when, definitions)) for rule in RULES)


def diagnose(facts: Facts, found: Triage) -> list[Finding]:
    """Return the causes the evidence speaks for, most likely first."""
    if found.primary is None and facts.value("kind") is None and not _has_signs(facts):
        return []
    _add_growth(facts)
    held: dict[str, list[Rule]] = {}
    for rule, node in compiled():
        if truth(evaluate(node, facts)) is True:
            held.setdefault(rule.cause, []).append(rule)
    ranked = sorted(
        ((_confidence(rules, facts), cause, rules) for cause, rules in held.items()),
        key=lambda item: (CAUSES[item[1]].remark, -item[0]),
    )
    return [
        _finding(cause, confidence, rules, facts, found)
        for confidence, cause, rules in ranked[:MAX_FINDINGS]
        if confidence >= _LEAST
    ]


def diagnose_snapshot(found: SnapshotAnalysis) -> SnapshotAnalysis:
    """Return a snapshot with the causes that it speaks for by itself."""
    failure = failure_of(found)
    alone = Triage(failures=[failure], first=0) if failure is not None else Triage()
    if failure is not None:
        failure.moment = moment_of(failure)
    facts = collect(ScannedLogs(), alone, {}, found)
    return replace(found, findings=tuple(diagnose(facts, alone)))


def _has_signs(facts: Facts) -> bool:
    names = ("growth", "flushes", "mixed_grad", "unused_flag", "snapshot")
    return any(facts.value(name) for name in names)


def _add_growth(facts: Facts) -> None:
    growth = facts.growth
    if growth is not None:
        facts.values |= {
            "first_bytes": growth.first_bytes,
            "last_bytes": growth.last_bytes,
            "first_step": growth.first_step,
            "last_step": growth.last_step,
            "grown": growth.last_bytes - growth.first_bytes,
        }


def _confidence(rules: list[Rule], facts: Facts) -> float:
    """Add up independent evidence; what speaks against takes a part away."""
    weights = [_weight(rule, facts) for rule in rules]
    doubt = 1.0
    for weight in weights:
        if weight > 0:
            doubt *= 1 - weight
    confidence = 1 - doubt
    for weight in weights:
        if weight < 0:
            confidence *= 1 + weight
    return round(min(confidence, _MOST), 3)


def _weight(rule: Rule, facts: Facts) -> float:
    weight = rule.weight
    if rule.times is not None:
        weight *= min(max(float(facts.value(rule.times) or 0.0), 0.0), 1.0)
    return weight * GUESS if rule.guess and facts.value("refused") else weight


def _finding(
    name: str, confidence: float, rules: list[Rule], facts: Facts, found: Triage
) -> Finding:
    cause = CAUSES[name]
    evidence = [_evidence(rule, facts, found) for rule in rules]
    if any(rule.source == "snapshot" and rule.weight > 0 for rule in rules):
        evidence += facts.details.get(name, ())
    return Finding(
        cause=name,
        claim=_claim(cause, rules, facts),
        confidence=confidence,
        severity=_severity(cause, confidence, facts),
        evidence=tuple(evidence),
        flags=_flags(cause, facts),
        advice=tuple(_advice(change, facts) for change in cause.changes),
    )


def _severity(cause: Cause, confidence: float, facts: Facts) -> Literal["error", "warning", "note"]:
    """Return how grave it is; what merely fills the memory of a job that runs is a note."""
    if cause.remark or confidence < ENOUGH:
        return "note"
    if facts.value("kind") is None and facts.value("snapshot"):
        return "note" if cause.seen else "warning"
    return "error"


def _claim(cause: Cause, rules: list[Rule], facts: Facts) -> str:
    if cause.seen and any(rule.weight > 0 and rule.source == "snapshot" for rule in rules):
        return _filled(cause.seen, facts)
    names = [name for _, name, _, _ in Formatter().parse(cause.claim) if name]
    if any(facts.value(_alias(name)) is None for name in names):
        # a claim without its numbers: cut the part that has them
        short = cause.claim.split(":")[0] if ":" in cause.claim else cause.claim
        return _filled(short.replace(" ({request})", "").replace(" {others} of", ""), facts)
    return _filled(cause.claim, facts)


def _alias(name: str) -> str:
    return "requested" if name == "request" else name


def _filled(text: str, facts: Facts) -> str:
    return text.format_map(_Words(facts))


class _Words(dict[str, Any]):
    """Facts as words: sizes with units, the rest as it is."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts

    def __missing__(self, name: str) -> Any:
        value = self._facts.value(_alias(name))
        if _alias(name) in _SIZES:
            return format_bytes(value) if value is not None else "an unknown amount"
        return str(value).replace("_", " ") if isinstance(value, str) else value


def _evidence(rule: Rule, facts: Facts, found: Triage) -> Evidence:
    failure = found.primary
    note = facts.note_for(rule.when)
    if note is not None:
        return Evidence(
            text=_filled(rule.because, facts), file=note.file, line=note.line, rank=note.rank
        )
    value = facts.value(rule.bytes) if rule.bytes else None
    if rule.source == "snapshot" and facts.snapshot is not None:
        shown = facts.snapshot
        return Evidence(
            text=_filled(rule.because, facts),
            file=shown.path,
            rank=shown.rank,
            step=shown.focus.step,
            bytes=int(value) if value is not None else None,
        )
    growth = facts.growth if rule.cause == "leak" and rule.when == "growth" else None
    return Evidence(
        text=_filled(rule.because, facts),
        file=failure.file if failure and growth is None else None,
        line=failure.line if failure and failure.line and growth is None else None,
        rank=growth.rank if growth else failure.rank if failure else None,
        step=failure.iteration if failure else None,
        bytes=int(value) if value is not None else None,
    )


def _flags(cause: Cause, facts: Facts) -> tuple[str, ...]:
    """Return the flags concerned, first those that the config sets."""
    written = {
        key: value
        for key, value in facts.config_keys.items()
        if any(_same_key(flag, key) for flag in cause.flags)
    }
    mine = tuple(f"{key}={value}" for key, value in list(written.items())[:6])
    rest = tuple(flag for flag in cause.flags if not any(_same_key(flag, k) for k in written))
    return mine + rest


def _same_key(flag: str, key: str) -> bool:
    tail = flag.rpartition(".")[2].lower()
    return len(tail) > 2 and (key.lower() == flag.lower() or key.lower().rpartition(".")[2] == tail)


def _advice(change: Change, facts: Facts) -> Advice:
    value = facts.value(change.saves) if change.saves else None
    replayed = _replayed(change, facts)
    return Advice(
        change=change.change,
        saves_bytes=int(value) if value is not None and replayed is None else None,
        saves_text=replayed or change.saves_text,
        cost=change.cost,
    )


def _replayed(change: Change, facts: Facts) -> str | None:
    """Return what a replay of the snapshot says of a change."""
    replay = facts.snapshot.replay if facts.snapshot is not None else None
    answer = replay.of(change.replay) if replay is not None and change.replay else None
    if answer is None:
        return None
    if answer.margin_bytes is None:
        return f"not known from this snapshot: {answer.reason}"
    size = format_bytes(abs(answer.margin_bytes))
    if answer.outcome == "fits":
        return f"replayed on the snapshot the request is served, with {size} to spare"
    return f"nothing here: replayed on the snapshot {size} are missing still"


def verdict(findings: list[Finding], facts: Mapping[str, Any], *, failed: bool) -> dict[str, Any]:
    """Say whether the evidence is enough, and what would decide between the first two."""
    if not findings:
        text = "nothing in the logs tells a cause" if failed else "no failure in the logs"
        missing = "the end of the failing rank's log with its traceback" if failed else None
        return {"enough": False, "text": text, "decide": missing}
    first = findings[0]
    enough = first.confidence >= ENOUGH
    text = first.claim if enough else f"not enough evidence; best guess: {first.claim}"
    decide: str | None = None
    near = 0.25 if facts.get("refused") else 0.5
    if len(findings) > 1 and findings[1].confidence > first.confidence - near:
        second = findings[1].cause
        means = [known for c in (first.cause, second) if (known := _means(c, facts))]
        decide = f"{first.cause} or {second}: {'; '.join(means)}" if means else None
    elif not enough:
        decide = _means(first.cause, facts)
    if not enough and not facts.get("has_frames"):
        decide = "; ".join(filter(None, ("the traceback above the message", decide)))
    return {"enough": enough, "text": text, "decide": decide}


def _means(cause: str, facts: Mapping[str, Any]) -> str | None:
    """Return what would decide for a cause, unless it is a snapshot, which is there."""
    text = CAUSES[cause].decide
    return None if facts.get("refused") and text.startswith("a memory snapshot") else text
