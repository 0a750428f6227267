"""Read the rule files beside this module and check their form.

``docs/adding-a-framework.md`` shows a file from the ground up. A file with ``framework`` belongs to
one framework, a file with ``frameworks`` shares its rules; either may say how keys are looked up,
once for each framework.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from fsdp_doctor.config.rules.absence import absent_names
from fsdp_doctor.config.rules.expression import ExpressionError, Node, names_of, parse
from fsdp_doctor.config.version_range import VersionRange, parse_range

FOLDER = Path(__file__).parent
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")
_ID = re.compile(r"[A-Z]{2}\d{3}[a-z]?")


class RuleFileError(ValueError):
    """A rule file that is not of the required form; names file and rule."""


class _RuleText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    severity: Literal["error", "warning", "note"]
    when: str
    message: str
    fix: str
    source: str
    versions: str | dict[str, str] = ""
    fields: list[str] | None = None


class _FileText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    framework: str | None = None
    frameworks: list[str] = []
    package: str | None = None
    newest: str | None = None
    lookup: tuple[str, ...] = ("{}",)
    scopes: tuple[str, ...] = ("",)
    names: dict[str, list[str]] = {}
    defaults: dict[str, Any] = {}
    implies: dict[str, dict[str, str]] = {}
    gates: dict[str, str] = {}
    define: dict[str, str] = {}
    rules: list[dict[str, Any]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a framework or of several."""

    id: str
    frameworks: tuple[str, ...]
    severity: Literal["error", "warning", "note"]
    when: Node
    condition: str
    """``when`` as written."""
    message: str
    fix: str
    source: str
    fields: tuple[str, ...]
    """The keys it speaks of; those that only its definitions name follow when they are written."""
    indirect: tuple[str, ...]
    """Keys that only a definition names."""
    needed: frozenset[str]
    """Keys whose absence can be what is wrong; others are not reported when they are absent."""
    package: str | None
    """Whose version ``versions`` means; None: the framework's own."""
    versions: VersionRange
    by_framework: Mapping[str, VersionRange]
    """Ranges of each framework's own versions; where given, other frameworks are exempt."""
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """What a key comes to where it is not written."""

    versions: VersionRange
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """How a framework's keys are looked up."""

    package: str | None = None
    newest: str | None = None
    """Version that is assumed where none is known."""
    lookup: tuple[str, ...] = ("{}",)
    """Places where a bare name may stand, e.g. ``fsdp_config.{}``."""
    scopes: tuple[str, ...] = ("",)
    """Patterns of prefixes; every one that is found is checked on its own."""
    names: Mapping[str, tuple[str, ...]]
    """Name in rules -> native keys, the first written one counts."""
    defaults: Mapping[str, tuple[Default, ...]]
    implies: Mapping[str, tuple[Default, ...]]
    """Package -> its version, by the framework's version."""
    gates: Mapping[str, Node]
    """Package -> what must hold for its shared rules to be asked at all."""


EMPTY = Vocabulary(names={}, defaults={}, implies={}, gates={})
_VOCABULARY = ("newest", "lookup", "scopes", "names", "defaults", "implies", "gates")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleBook:
    """All rules, and the vocabulary of every framework that has one."""

    rules: tuple[Rule, ...]
    vocabularies: Mapping[str, Vocabulary]

    def for_framework(self, framework: str) -> Iterator[Rule]:
        """Yield the rules of a framework in the order of the files."""
        return (rule for rule in self.rules if framework in rule.frameworks)


@cache
def load_rules(folder: Path = FOLDER) -> RuleBook:
    """Return the rules of all files of a folder.

    Raises RuleFileError, naming file and rule, for anything that is not of the required form.
    """
    rules: list[Rule] = []
    vocabularies: dict[str, Vocabulary] = {}
    for path in sorted(folder.glob("*.yaml")):
        text = _read(path)
        for name in _described(text):
            if name in vocabularies:
                raise RuleFileError(f"{path.name}: {name} has another file already")
            vocabularies[name] = _vocabulary(text, path.name)
        rules += _rules(text, path.name)
    seen: dict[str, Rule] = {}
    for rule in rules:
        if rule.id in seen:
            raise RuleFileError(f"{rule.file}: {rule.id}: also in {seen[rule.id].file}")
        seen[rule.id] = rule
    return RuleBook(rules=tuple(rules), vocabularies=vocabularies)


def placeholders(template: str) -> list[str]:
    """Return the names that ``{name}`` stands for in a message or fix."""
    return _PLACEHOLDER.findall(template)


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return a message with its ``{name}`` replaced; the values are not read as templates."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def _read(path: Path) -> _FileText:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        text = msgspec.convert(data, _FileText)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise RuleFileError(f"{path.name}: {error}") from None
    if (text.framework is None) == (not text.frameworks):
        raise RuleFileError(f"{path.name}: give either framework or frameworks")
    return text


def _described(text: _FileText) -> list[str]:
    """Return the frameworks whose keys a file says how to look up."""
    if text.framework is not None:
        return [text.framework]
    plain = _FileText()
    speaks = any(getattr(text, name) != getattr(plain, name) for name in _VOCABULARY)
    return text.frameworks if speaks else []


def _vocabulary(text: _FileText, file: str) -> Vocabulary:
    for pattern in text.lookup:
        if pattern.count("{}") != 1:
            raise RuleFileError(f"{file}: lookup {pattern!r} must hold one {{}}")
    return Vocabulary(
        package=text.package,
        newest=text.newest,
        lookup=text.lookup,
        scopes=text.scopes,
        names={name: tuple(keys) for name, keys in text.names.items()},
        defaults={name: _defaults(value, file, name) for name, value in text.defaults.items()},
        implies={name: _by_version(table, file, name) for name, table in text.implies.items()},
        gates={name: _parse(gate, {}, f"{file}: {name}") for name, gate in text.gates.items()},
    )


def _defaults(value: Any, file: str, name: str) -> tuple[Default, ...]:
    """Return a default; a mapping of version ranges gives one by version."""
    if isinstance(value, dict):
        return _by_version(value, file, name)
    return (Default(versions=parse_range(""), value=value),)


def _by_version(table: Mapping[str, Any], file: str, name: str) -> tuple[Default, ...]:
    return tuple(
        Default(versions=_range(versions, f"{file}: {name}"), value=value)
        for versions, value in table.items()
    )


def _range(text: str, where: str) -> VersionRange:
    try:
        return parse_range(text)
    except ValueError as error:
        raise RuleFileError(f"{where}: {error}") from None


def _rules(text: _FileText, file: str) -> Iterator[Rule]:
    frameworks = (text.framework,) if text.framework else tuple(text.frameworks)
    definitions: dict[str, Node] = {}
    for name, condition in text.define.items():
        definitions[name] = _parse(condition, definitions, f"{file}: define {name}")
    for position, raw in enumerate(text.rules, 1):
        where = f"{file}: {raw.get('id', f'rule {position}')}"
        try:
            rule = msgspec.convert(raw, _RuleText)
        except msgspec.ValidationError as error:
            raise RuleFileError(f"{where}: {error}") from None
        if not _ID.fullmatch(rule.id):
            raise RuleFileError(f"{where}: an id is two letters and three digits")
        yield _rule(rule, text, frameworks, definitions, where)


def _parse(condition: str, definitions: Mapping[str, Node], where: str) -> Node:
    try:
        return parse(condition, definitions)
    except ExpressionError as error:
        raise RuleFileError(f"{where}: {error}") from None


def _rule(
    rule: _RuleText,
    text: _FileText,
    frameworks: tuple[str, ...],
    definitions: Mapping[str, Node],
    where: str,
) -> Rule:
    when = _parse(rule.when, definitions, where)
    direct = [n for n in names_of(_parse(rule.when, {}, where)) if n not in definitions]
    everything = [name for name in names_of(when) if not name.startswith("job.")]
    fields = [name for name in rule.fields or direct if not name.startswith("job.")] or everything
    ranges = rule.versions if isinstance(rule.versions, dict) else {}
    strange = set(ranges) - set(frameworks)
    if strange:
        raise RuleFileError(f"{where}: versions of {sorted(strange)}, which the file is not about")
    return Rule(
        id=rule.id,
        frameworks=tuple(ranges) if ranges else frameworks,
        severity=rule.severity,
        when=when,
        condition=" ".join(rule.when.split()),
        message=" ".join(rule.message.split()),
        fix=" ".join(rule.fix.split()),
        source=rule.source,
        fields=tuple(dict.fromkeys(fields)),
        indirect=tuple(dict.fromkeys(name for name in everything if name not in fields)),
        needed=frozenset(absent_names(when)),
        package=text.package,
        versions=_range("" if isinstance(rule.versions, dict) else rule.versions, where),
        by_framework={name: _range(versions, where) for name, versions in ranges.items()},
        file=file_name(where),
    )


def file_name(where: str) -> str:
    """Return the file of ``file: rule``."""
    return where.partition(":")[0]
