"""A spec with moves applied, if the rules allow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.megatron_check import STRATEGIES as MEGATRON
from fsdp_doctor.config.megatron_check import check_megatron
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.rules import Job, check_config
from fsdp_doctor.config.schema import leaf_values, spec_keys
from fsdp_doctor.config.spec import apply_overrides, spec_to_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.fit.move import Move
from fsdp_doctor.model.config import (
    ConfigChange,
    EffectiveConfig,
    NativeConfig,
    NativeField,
    Violation,
)
from fsdp_doctor.model.spec import ProfileSpec

_GLOBAL_BATCH = "batch.global"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A legal spec and what was changed to get there."""

    spec: ProfileSpec
    moves: tuple[Move, ...] = ()
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Names of the moves."""
        return frozenset(move.name for move in self.moves)


class Rulebook:
    """Applies moves to one spec.

    ``keep``: dotted keys or sections that stay as they are; an environment variable's name keeps
    it unset. Raises InputError for a key that does not exist.
    """

    def __init__(self, spec: ProfileSpec, job: Job, keep: Sequence[str] = ()) -> None:
        self._spec, self._job = spec, job
        self._keep = tuple(keep)
        for key in self._keep:
            if key not in spec_keys() and not key.isupper():
                raise InputError(
                    f"no field {key!r}", where="--keep", hint="e.g. config.activation_checkpointing"
                )
        self._effective = resolve_spec(spec)
        self._broken = {violation.rule for violation in self._violations(spec, self._effective)}

    @property
    def base(self) -> Draft:
        """The spec as written."""
        return Draft(spec=self._spec)

    def apply(self, moves: Sequence[Move]) -> Draft | str:
        """Return the spec with ``moves``, applied in their order, or why it cannot be had."""
        spec, values, environment = self._spec, dict[str, Any](), dict[str, str]()
        for move in moves:
            fields = dict(leaf_values(spec))
            if not move.applies(fields):
                return "does not apply here"
            wanted = move.values(fields)
            new = {k: v for k, v in wanted.items() if k not in fields or fields[k] != v}
            kept = [key for key in (*new, *move.environment) if self._is_kept(key)]
            if kept:
                return f"--keep {kept[0]}"
            if set(new) & set(values) or set(move.environment) & set(environment):
                return "changes what another change sets"
            values |= new
            environment |= move.environment
            try:
                spec = apply_overrides(self._spec, _texts(values))
            except InputError as error:
                return str(error)
        effective = resolve_spec(spec)
        refusal = self._refusal(effective, environment)
        if refusal:
            return refusal
        broken = [v for v in self._violations(spec, effective) if v.rule not in self._broken]
        errors = [v for v in broken if v.severity == "error"]
        if errors:
            return f"{errors[0].rule}: {errors[0].message}"
        return Draft(
            spec=spec,
            moves=tuple(moves),
            overrides=tuple(_texts(values)),
            environment=environment,
            warnings=tuple(f"{v.rule}: {v.message}" for v in broken if v.severity == "warning"),
        )

    def saves_nothing(self, draft: Draft) -> bool:
        """Whether, by the effects of what it changes, no category of memory can shrink."""
        if draft.environment:
            return False
        effects = [e for change in self._changes(resolve_spec(draft.spec)) for e in change.effects]
        return not any(e.direction in ("down", "either") for e in effects)

    def _is_kept(self, key: str) -> bool:
        return any(key == kept or key.startswith(f"{kept}.") for kept in self._keep)

    def _refusal(self, effective: EffectiveConfig, environment: Mapping[str, str]) -> str | None:
        before, after = (
            config.fields[_GLOBAL_BATCH].value for config in (self._effective, effective)
        )
        if before != after:
            return f"would change the global batch from {before} to {after}"
        if not environment and not self._changes(effective):
            return "has no effect here"
        return None

    def _changes(self, effective: EffectiveConfig) -> Sequence[ConfigChange]:
        diff = diff_configs(self._effective, effective)
        return (*diff.changed, *diff.unknown)

    def _violations(self, spec: ProfileSpec, effective: EffectiveConfig) -> tuple[Violation, ...]:
        native = NativeConfig(
            format="spec",
            framework="torch",
            fields=dict(_written(spec_to_mapping(spec), "")),
            version=self._job.versions.get("torch"),
        )
        found = check_config(native, effective.fields, self._job).violations
        if spec.config.strategy in MEGATRON:
            found = (*found, *check_megatron(native, spec, self._job).result.violations)
        return found


def _written(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, NativeField]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _written(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", NativeField(value=value)


def _texts(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={yaml_text(value)}" for key, value in values.items()]


def yaml_text(value: Any) -> str:
    """Return a value as YAML reads it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
