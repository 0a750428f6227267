"""Check a config file, several joined by ``+``, a spec or a run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_doctor.config.load import load_config, load_native, split_paths
from fsdp_doctor.config.rules.engine import CheckResult, check_config
from fsdp_doctor.config.rules.view import Job
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import (
    ConfigValue,
    EffectiveConfig,
    NativeConfig,
    NativeField,
    Violation,
)
from fsdp_doctor.redact import redact, redact_text

INERT = "inert"
"""Rule of fields that the resolver knows to be without effect and no other rule speaks of."""
_WRITTEN = frozenset({"file", "cli", "env"})
_HOW = "how {} reads its config"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedConfig:
    """A config's rules, and what is known about the config."""

    format: str
    framework: str
    version: str | None
    assumed: str | None
    """Why this version was assumed; None: it is known."""
    unknown: tuple[str, ...]
    unresolved: tuple[str, ...]
    result: CheckResult


def check_path(
    path: Path, *, fmt: str | None = None, versions: Mapping[str, str] | None = None, job: Job
) -> CheckedConfig:
    """Read a config and check it by the rules of its framework and version.

    A spec that cannot be resolved is checked all the same, by what is written in it. Raises
    InputError when something cannot be read.
    """
    paths = split_paths(path)
    if len(paths) == 1 and paths[0].is_dir():
        native: NativeConfig = _recorded_native(paths[0])
    else:
        native = load_native(paths, fmt)
    job = replace(job, versions={**job.versions, **(versions or {})})
    try:
        config = load_config(path, (), fmt, versions).config
    except InputError:
        checked = _checked(native, None, job)
        if checked.result.violations and checked.result.violations[0].severity == "error":
            return checked
        raise
    return _with_megatron(_checked(native, config, job), native, path, job)


def _with_megatron(
    checked: CheckedConfig, native: NativeConfig, path: Path, job: Job
) -> CheckedConfig:
    """Add Megatron's rules where a spec, or a run's, is of a Megatron job."""
    if native.format not in ("spec", "run"):
        return checked
    from fsdp_doctor.config.megatron_check import CORE, STRATEGIES, check_megatron
    from fsdp_doctor.config.spec import load_spec, spec_from_mapping

    recorded = native.format == "run"
    spec = spec_from_mapping(native.nested, str(path)) if recorded else load_spec(path)
    if spec.config.strategy not in STRATEGIES:
        return checked
    found = check_megatron(native, spec, job)
    result = found.result
    others = (
        replace(v, source=_HOW.format(CORE)) if v.rule == INERT else v
        for v in checked.result.violations
    )
    return replace(
        checked,
        framework=CORE,
        version=found.version,
        assumed=found.assumed,
        result=replace(
            result,
            violations=(*result.violations, *others),
            undecided=(*result.undecided, *checked.result.undecided),
            checked=result.checked + checked.result.checked,
        ),
    )


def _checked(native: NativeConfig, config: EffectiveConfig | None, job: Job) -> CheckedConfig:
    known = config.version if config is not None else native.version
    native = replace(native, version=known)
    fields = config.fields if config is not None else {}
    result = check_config(native, fields, job)
    if config is not None:
        inert = tuple(_inert(config, native, result.violations))
        result = replace(result, violations=(*result.violations, *inert))
    return CheckedConfig(
        format=native.format,
        framework=native.framework,
        version=result.versions.get(native.framework, known),
        assumed=_assumed(native, config, result),
        unknown=native.unknown,
        unresolved=tuple(
            dict.fromkeys((*native.unresolved, *(config.unresolved if config else ())))
        ),
        result=result,
    )


def _inert(
    config: EffectiveConfig, native: NativeConfig, violations: tuple[Violation, ...]
) -> Iterator[Violation]:
    """Yield a note for every reason why written fields have no effect, with these fields.

    Fields that a violation speaks of already are left out, and those that ask for nothing (false,
    empty).
    """
    spoken = {key for violation in violations for key in violation.fields}
    groups: dict[str, dict[str, ConfigValue]] = {}
    for key, value in config.fields.items():
        name = value.native[0] if value.native else key
        asks = value.written if value.written is not None else value.value
        idle = not value.effective and value.source in _WRITTEN
        if idle and asks not in (None, False, "", [], {}) and not spoken & {key, name}:
            reason = value.reason or "the framework does not read it here"
            groups.setdefault(redact_text(reason), {})[name] = value
    for reason, values in groups.items():
        yield _inert_note(config, native, reason, values)


def _inert_note(
    config: EffectiveConfig, native: NativeConfig, reason: str, values: Mapping[str, ConfigValue]
) -> Violation:
    first, *others = values
    more = f" and {len(others)} more" if others else ""
    field = native.fields.get(first)
    written = {
        key: value.value if value.written is None else value.written
        for key, value in values.items()
    }
    return Violation(
        rule=INERT,
        severity="note",
        fields=tuple(values),
        values={key: redact(value, key) for key, value in written.items()},
        message=f"{first}{more}: without effect, because {reason}.",
        fix="Remove what has no effect, or change what keeps it from acting.",
        versions=config.version or "all",
        source=_HOW.format(config.framework),
        file=field.file if field else None,
        line=field.line if field else None,
    )


def _assumed(
    native: NativeConfig, config: EffectiveConfig | None, result: CheckResult
) -> str | None:
    if config is not None and config.assumed is not None:
        return config.assumed
    if native.framework in result.assumed:
        return f"version not known: the rules of {result.versions[native.framework]} hold"
    return None


def _recorded_native(path: Path) -> NativeConfig:
    """Return the spec that a run carries. Raises InputError where it carries none."""
    from fsdp_doctor.runs import load_launches

    manifest = load_launches(path)[0].manifest
    if manifest.spec is None:
        raise InputError(
            "the run carries no spec to check",
            where=str(path),
            hint="it was recorded from a training loop of its own; give a config file instead",
        )
    environment = manifest.environment
    torch_version, core = environment.get("torch"), environment.get("megatron_core")
    return NativeConfig(
        format="run",
        framework="torch",
        fields=_flat(manifest.spec, ""),
        version=torch_version if isinstance(torch_version, str) else None,
        packages={"megatron-core": core} if isinstance(core, str) else {},
        nested=dict(manifest.spec),
    )


def _flat(value: Mapping[str, Any], prefix: str) -> dict[str, NativeField]:
    fields: dict[str, NativeField] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            fields |= _flat(item, f"{prefix}{key}.")
        else:
            fields[f"{prefix}{key}"] = NativeField(value=item)
    return fields
