"""``check`` of a Megatron spec: the rules of Megatron-Core and of this tool's Megatron jobs.

Rules come from ``config/rules`` (those of Megatron-Core, and Megatron-Bridge's errors: a spec is
read as a Bridge config) and from ``config.megatron_support``; what they name is told by the spec's
own keys, with file and line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_doctor.config.megatron_native import ASSUMED_CORE, rule_names, rules_view
from fsdp_doctor.config.megatron_support import BY_FORMAT, installed_versions, own_rules
from fsdp_doctor.config.rules.engine import CheckResult, check_config
from fsdp_doctor.config.rules.schema import load_rules
from fsdp_doctor.config.rules.view import Job
from fsdp_doctor.model.config import NativeConfig, Violation
from fsdp_doctor.model.spec import ProfileSpec

CORE = "megatron-core"
STRATEGIES = ("megatron", "megatron_fsdp")
_FORMAT = "config.megatron.checkpoint.ckpt_format"
_SWITCH = ("config.megatron.dist.use_megatron_fsdp", "config.megatron.ddp.use_megatron_fsdp")
_ORDER = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronChecked:
    """What Megatron's rules say of a spec."""

    result: CheckResult
    version: str
    assumed: str | None
    """Why this version of megatron-core holds; None: it was given."""


def check_megatron(native: NativeConfig, spec: ProfileSpec, job: Job) -> MegatronChecked:
    """Return the rules that a Megatron spec breaks, errors first.

    ``native``: the spec as written. Versions: those of ``job``, else what the run recorded, else
    the installed ones, else the newest core that is known.
    """
    given = {**native.packages, **job.versions}
    versions = {CORE: ASSUMED_CORE, **installed_versions(), **given}
    spec = replace(spec, world_size=job.world_size or spec.world_size)
    job = replace(job, world_size=spec.world_size, versions=versions)
    result = _of_core(native, spec, job)
    told = {violation.rule for violation in result.violations}
    own = [v for v in own_rules(spec, versions) if v.rule != "MV003" or not told & BY_FORMAT]
    found = [_by_own_keys(v, spec, native) for v in (*result.violations, *own)]
    return MegatronChecked(
        result=replace(
            result,
            violations=tuple(sorted(found, key=lambda v: _ORDER.index(v.severity))),
            versions={CORE: versions[CORE]},
            assumed=() if CORE in given else (CORE,),
        ),
        version=versions[CORE],
        assumed=None if CORE in given else _assumed(versions[CORE]),
    )


def _of_core(native: NativeConfig, spec: ProfileSpec, job: Job) -> CheckResult:
    """Apply the rule files; Bridge's warnings and notes are about its own files."""
    if spec.config.strategy != "megatron":
        return CheckResult(violations=(), undecided=(), checked=0, versions={}, assumed=())
    view = rules_view(spec, versions=job.versions, places=native.fields)
    result = check_config(view, job=job)
    core = {rule.id for rule in load_rules().rules if rule.package == CORE}
    decided = spec.checkpoint is not None or _FORMAT in native.fields
    return replace(
        result,
        violations=tuple(
            violation if decided else _if_saved(violation)
            for violation in result.violations
            if violation.severity == "error" or violation.rule in core
        ),
        undecided=tuple(u for u in result.undecided if u.rule in core and u.needs == ("gpu",)),
    )


def _if_saved(violation: Violation) -> Violation:
    """An error of the default checkpoint format stops only a job that saves."""
    about = any(field.startswith("checkpoint.") for field in violation.fields)
    if not about or violation.severity != "error":
        return violation
    message = f"{violation.message} (This spec saves no checkpoint; a job that does stops.)"
    return replace(violation, severity="warning", message=message)


def _by_own_keys(violation: Violation, spec: ProfileSpec, native: NativeConfig) -> Violation:
    """Return a violation by the spec's own keys, at the first place that is known."""
    keys = tuple(dict.fromkeys(_own_key(name, spec) for name in violation.fields))
    if set(_SWITCH) <= set(keys):  # either turns it on: the written one is meant
        keys = tuple(key for key in keys if key not in _SWITCH or key in native.fields)
    named = {_own_key(name, spec): value for name, value in violation.values.items()}
    written = {key: native.fields[key] for key in keys if key in native.fields}
    values = {key: field.value for key, field in written.items()} | named
    place = next(iter(written.values()), None)
    file, line = violation.file, violation.line
    if file is None and place is not None:
        file, line = place.file, place.line
    return replace(violation, fields=keys, values=values, file=file, line=line)


def _own_key(name: str, spec: ProfileSpec) -> str:
    """Return the spec's key of a rule's name; the checkpoint that a spec asks for is one key."""
    if name == "checkpoint.save" or (name == "checkpoint.ckpt_format" and spec.checkpoint):
        return "checkpoint"
    return rule_names(spec).get(name, name)


def _assumed(version: str) -> str:
    why = "installed here" if installed_versions().get(CORE) == version else "the newest known"
    return f"version not known: the rules of megatron-core {version} hold ({why})"
