"""Check a config against the rules of its framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.config.rules.evaluate import Unknown, evaluate, truth
from fsdp_doctor.config.rules.schema import (
    EMPTY,
    Rule,
    RuleBook,
    fill,
    load_rules,
    placeholders,
)
from fsdp_doctor.config.rules.view import Job, View, scopes_of
from fsdp_doctor.config.versions import package_of
from fsdp_doctor.model.config import ConfigValue, NativeConfig, NativeField, Violation
from fsdp_doctor.redact import redact

_SEVERITIES = ("error", "warning", "note")
_LONGEST = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """A rule whose condition hangs on something that was not given."""

    rule: str
    severity: str
    needs: tuple[str, ...]
    """``gpu``, ``world_size``, or a package whose version is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a config breaks, and what could not be decided."""

    violations: tuple[Violation, ...]
    undecided: tuple[Undecided, ...]
    checked: int
    """How many rules hold for these frameworks and versions."""
    versions: Mapping[str, str]
    """Framework -> version whose rules were used."""
    assumed: tuple[str, ...]
    """Frameworks whose version is only assumed."""


def check_config(
    native: NativeConfig,
    effective: Mapping[str, ConfigValue] | None = None,
    job: Job | None = None,
    book: RuleBook | None = None,
) -> CheckResult:
    """Return every rule that a config, or a part of it, breaks; errors first.

    ``effective``: its canonical fields, for rules that speak of ``effective.X``. A part (a
    DeepSpeed file given beside a trainer's) is checked by its own framework's rules.
    """
    rules = book or load_rules()
    found: dict[tuple[Any, ...], Violation] = {}
    undecided: dict[str, Undecided] = {}
    checked: set[str] = set()
    versions: dict[str, str] = {}
    assumed: list[str] = []
    for part in (native, *native.parts):
        vocabulary = rules.vocabularies.get(part.framework, EMPTY)
        for scope in scopes_of(part, vocabulary.scopes):
            view = View(part, effective or {}, job or Job(), vocabulary, scope)
            for rule in rules.for_framework(part.framework):
                gate = vocabulary.gates.get(rule.package or "")
                if gate is not None and truth(evaluate(gate, view)) is not True:
                    continue
                if _in_force(rule, part.framework, view):
                    checked.add(rule.id)
                    _decide(rule, view, found, undecided)
        view = View(part, {}, job or Job(), vocabulary)
        version = view.version()
        if version is not None:
            versions[part.framework] = version
            if view.is_assumed():
                assumed.append(part.framework)
    broken = {violation.rule for violation in found.values()}
    return CheckResult(
        violations=tuple(sorted(found.values(), key=_order)),
        undecided=tuple(entry for rule, entry in undecided.items() if rule not in broken),
        checked=len(checked),
        versions=versions,
        assumed=tuple(assumed),
    )


def _in_force(rule: Rule, framework: str, view: View) -> bool:
    """Return whether a rule holds in this version; in an unknown one every rule does."""
    if framework in rule.by_framework:
        version = view.version()
        return version is None or version in rule.by_framework[framework]
    version = view.version(rule.package)
    return version is None or version in rule.versions


def _decide(
    rule: Rule,
    view: View,
    found: dict[tuple[Any, ...], Violation],
    undecided: dict[str, Undecided],
) -> None:
    held = truth(evaluate(rule.when, view))
    if isinstance(held, Unknown):
        needs = tuple(sorted(_asked_for(need) for need in held.needs))
        if needs:
            undecided[rule.id] = Undecided(rule=rule.id, severity=rule.severity, needs=needs)
    elif held:
        violation = _violation(rule, view)
        found.setdefault((rule.id, violation.fields), violation)


def _asked_for(need: str) -> str:
    kind, _, name = need.partition(".")
    return {"gpu_arch": "gpu"}.get(name, name) if kind in ("job", "version") else need


def _violation(rule: Rule, view: View) -> Violation:
    names = _spoken_of(rule, view)
    keys = {name: _key(name, view) for name in names}
    values = {keys[name]: redact(_plain(view.value(name)), keys[name]) for name in names}
    shown = {
        name: _shown(redact(_plain(view.value(name)), name))
        for name in (*placeholders(rule.message), *placeholders(rule.fix))
    }
    place = _place(names, view)
    return Violation(
        rule=rule.id,
        severity=rule.severity,
        fields=tuple(dict.fromkeys(keys.values())),
        values=values,
        message=fill(rule.message, shown),
        fix=fill(rule.fix, shown),
        versions=_versions(rule, view.framework),
        source=rule.source,
        file=place.file if place else None,
        line=place.line if place else None,
    )


def _spoken_of(rule: Rule, view: View) -> list[str]:
    """Return the names that a violation is about: written, with a default, or wrongly absent."""
    spoken = [
        name
        for name in rule.fields
        if name in rule.needed or view.is_written(name) or view.value(name) is not None
    ]
    found = spoken or list(rule.fields)
    return [*found, *(name for name in rule.indirect if view.is_written(name))]


def _versions(rule: Rule, framework: str) -> str:
    """Return for which versions a rule holds, with the package's name if it is not the own one."""
    if rule.by_framework:
        return str(rule.by_framework[framework])
    if rule.package in (None, framework, package_of(framework)) or not rule.versions.text:
        return str(rule.versions)
    return f"{rule.package} {rule.versions}"


def _key(name: str, view: View) -> str:
    if name.startswith(("env.", "effective.")):
        return name
    return view.key(name)


def _place(names: Sequence[str], view: View) -> NativeField | None:
    """Return the first field that is written, one with a line before one without."""
    written = [field for field in _fields(names, view) if field.file is not None]
    return next((field for field in written if field.line is not None), next(iter(written), None))


def _fields(names: Sequence[str], view: View) -> Iterator[NativeField]:
    for name in names:
        field = view.field(name)
        if field is not None:
            yield field


def _plain(value: Any) -> Any:
    return None if isinstance(value, Unknown) else value


def _shown(value: Any) -> str:
    """Return a value as it would stand in YAML, shortened."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _order(violation: Violation) -> tuple[int, str, int, str]:
    return (
        _SEVERITIES.index(violation.severity),
        violation.file or "",
        violation.line or 0,
        violation.rule,
    )
