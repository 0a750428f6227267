"""The rule engine on configs: lookup, versions, parts, order, what is not known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_doctor.config.rules import Job, check_config, load_rules
from fsdp_doctor.config.rules.view import View
from fsdp_doctor.config.schema import UNSET, spec_keys
from fsdp_doctor.model.config import ConfigValue, NativeConfig, NativeField

ROOT = Path(__file__).parent.parent.parent
FRAMEWORKS = sorted({name for rule in load_rules().rules for name in rule.frameworks})


def native(framework: str, values: dict[str, Any], **more: Any) -> NativeConfig:
    """Return a config of ``config.yaml``, one key a line."""
    fields = {
        key: NativeField(value=value, file="config.yaml", line=line)
        for line, (key, value) in enumerate(values.items(), 1)
    }
    return NativeConfig(format="test", framework=framework, fields=fields, **more)


def found(config: NativeConfig, job: Job | None = None) -> list[str]:
    """Return the rules a config breaks."""
    return [violation.rule for violation in check_config(config, {}, job).violations]


def test_errors_come_first_then_by_place() -> None:
    """Violations are sorted by severity, then file and line."""
    config = native("megatron-lm", {"sequence_parallel": True, "use_megatron_fsdp": True})
    severities = [v.severity for v in check_config(config).violations]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert severities[0] == "error"


def test_a_violation_says_where() -> None:
    """File and line are those of the rule's first key that is written."""
    config = native(
        "accelerate",
        {
            "distributed_type": "FSDP",
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_reshard_after_forward": "FULL_SHARD",
            "fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        },
    )
    (violation,) = check_config(config).violations
    assert (violation.rule, violation.file, violation.line) == ("AC005", "config.yaml", 3)
    assert violation.values == {
        "fsdp_config.fsdp_reshard_after_forward": "FULL_SHARD",
        "fsdp_config.fsdp_version": 2,
        "distributed_type": "FSDP",
    }


def test_the_ignored_strategy_of_accelerate() -> None:
    """FSDP1's strategy under the other key is ignored, and the message says what runs instead."""
    config = native(
        "accelerate",
        {
            "distributed_type": "FSDP",
            "fsdp_config.fsdp_version": 1,
            "fsdp_config.fsdp_reshard_after_forward": "SHARD_GRAD_OP",
        },
    )
    violation = next(v for v in check_config(config).violations if v.rule == "AC001")
    assert violation.severity == "warning"
    assert "SHARD_GRAD_OP is ignored under FSDP1" in violation.message
    assert "runs as FULL_SHARD" in violation.message
    assert "fsdp_sharding_strategy: SHARD_GRAD_OP" in violation.fix


def test_each_missing_piece_of_bridge_enablement_is_reported() -> None:
    """Of the five keys that switch Megatron-FSDP on in Bridge, each one left out is named."""
    whole = {
        "dist.use_megatron_fsdp": True,
        "ddp.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": "optim_grads_params",
        "ddp.average_in_collective": False,
        "checkpoint.ckpt_format": "fsdp_dtensor",
    }
    enablement = {"MB001", "MB002", "MB004", "MB005", "MB006"}
    assert not enablement & set(found(native("megatron-bridge", whole)))
    for key in whole:
        rest = {name: value for name, value in whole.items() if name != key}
        violations = check_config(native("megatron-bridge", rest)).violations
        naming = [v for v in violations if v.rule in enablement and key in v.fields]
        assert len(naming) == 1, key


def test_the_core_version_follows_from_bridge() -> None:
    """Rules of core hold by the core that a Bridge version needs, unless it is said."""
    config = native("megatron-bridge", {"dist.use_torch_fsdp2": True}, version="0.5.0")
    assert "MG017" in found(config)
    assert "MG017" not in found(replace(config, version="0.6.0"))
    assert "MG017" not in found(config, Job(versions={"megatron-core": "0.19.2"}))


def test_an_unknown_version_is_assumed_and_said() -> None:
    """Without a version the newest known rules hold."""
    result = check_config(native("accelerate", {"distributed_type": "NO"}))
    assert result.versions == {"accelerate": "1.15.0"}
    assert result.assumed == ("accelerate",)


def test_what_is_not_given_leaves_rules_undecided() -> None:
    """A rule that asks for the GPU says so, and is decided when it is known."""
    config = native("megatron-lm", {"tensor_model_parallel_size": 2})
    entry = next(u for u in check_config(config).undecided if u.rule == "MG028a")
    assert entry.needs == ("gpu",)
    assert "MG028a" in found(config, Job(gpu_arch=9.0))
    decided = check_config(config, {}, Job(gpu_arch=10.0))
    assert "MG028a" not in {u.rule for u in decided.undecided}


def test_a_shell_variable_decides_nothing() -> None:
    """A value that only the shell knows breaks no rule."""
    config = native(
        "megatron-lm",
        {
            "use_torch_fsdp2": True,
            "ckpt_format": "${FORMAT}",
            "pipeline_model_parallel_size": "$PP",
        },
    )
    assert not {"MG007", "MG011"} & set(found(config))


def test_parts_are_checked_by_their_own_rules() -> None:
    """A DeepSpeed file beside a trainer's config keeps DeepSpeed's rules."""
    part = native(
        "deepspeed", {"zero_optimization.stage": 2, "zero_optimization.offload_param.device": "cpu"}
    )
    config = native("hf-trainer", {"bf16": True, "fp16": True}, parts=(part,))
    assert {"HF016", "DS001"} <= set(found(config))


def test_every_role_is_checked() -> None:
    """The engine settings of each role count on their own."""
    config = native(
        "verl",
        {
            "actor_rollout_ref.actor.strategy": "fsdp2",
            "actor_rollout_ref.actor.fsdp_config.offload_policy": True,
            "critic.strategy": "fsdp",
            "critic.fsdp_config.offload_policy": True,
        },
    )
    broken = [v for v in check_config(config).violations if v.rule == "VE001"]
    assert [v.fields[0] for v in broken] == ["critic.fsdp_config.offload_policy"]


def test_a_disabled_backend_keeps_core_rules_quiet() -> None:
    """Core's rules are asked of NeMo-RL only when its Megatron backend is enabled."""
    values = {"policy.megatron_cfg.enabled": True, "policy.megatron_cfg.sequence_parallel": True}
    assert "MG101a" in found(native("nemo-rl", values))
    values["policy.megatron_cfg.enabled"] = False
    assert "MG101a" not in found(native("nemo-rl", values))


def test_secrets_are_not_repeated() -> None:
    """Values that look like secrets do not reach messages or values."""
    token = "hf_" + "a" * 30
    config = native("megatron-lm", {"data_parallel_sharding_strategy": token})
    violation = next(v for v in check_config(config).violations if v.rule == "MG055")
    assert token not in violation.message
    assert token not in str(violation.values)


def test_canonical_fields_can_be_asked() -> None:
    """``effective.X`` is a resolved field, unset where the resolver has none."""
    fields = {"sharding.impl": ConfigValue(set=True, value="fsdp1")}
    view = View(native("torch", {}), fields, Job(), load_rules().vocabularies["torch"])
    assert view.value("effective.sharding.impl") == "fsdp1"
    assert view.value("effective.sharding.unit") is None
    assert view.is_written("effective.sharding.impl")


def test_versions_are_of_the_framework_or_name_their_package() -> None:
    """A range speaks of the framework's own versions unless it says otherwise."""
    own = native("megatron-lm", {"ddp_num_buckets": 0})
    other = native("megatron-bridge", {"ddp.num_buckets": 0})
    assert [v.versions for v in check_config(own).violations] == [">=0.12"]
    assert [v.versions for v in check_config(other).violations] == ["megatron-core >=0.12"]


def test_the_config_may_tell_its_ranks() -> None:
    """A world size that was resolved from the config need not be given."""
    config = native("megatron-lm", {"tensor_model_parallel_size": 8})
    fields = {"world.size": ConfigValue(set=True, value=12)}
    assert "MC001" in {v.rule for v in check_config(config, fields).violations}
    job = Job(world_size=16)
    assert "MC001" not in {v.rule for v in check_config(config, fields, job).violations}


def test_a_framework_without_rules() -> None:
    """Nothing is checked, nothing fails."""
    result = check_config(native("something", {"a": 1}))
    assert (result.checked, result.violations) == (0, ())


def test_defaults_of_specs_are_those_of_the_schema() -> None:
    """What a rule takes for an absent key of a spec is what the spec takes."""
    vocabulary = load_rules().vocabularies["torch"]
    keys = spec_keys()
    for name, (default,) in vocabulary.defaults.items():
        native_key = vocabulary.names.get(name, (name,))[0]
        if native_key in keys and keys[native_key].default is not UNSET:
            assert default.value == keys[native_key].default, name


def test_defaults_of_megatron_are_those_of_its_parser() -> None:
    """What a rule takes for an absent flag is what the parser takes, in every version."""
    flags = json.loads((ROOT / "fsdp_doctor/config/data/megatron_flags.json").read_text())
    vocabulary = load_rules().vocabularies["megatron-lm"]
    compared = 0
    for name, defaults in vocabulary.defaults.items():
        for key in vocabulary.names.get(name, (name,)):
            if key not in flags:
                continue
            since, _, known, _ = flags[key]
            by_version = known if isinstance(known, dict) else {since: known}
            for version, value in by_version.items():
                mine = next(d.value for d in defaults if version in d.versions)
                assert mine == value, (name, version)
                compared += 1
    assert compared > 20


def test_many_roles_take_no_time() -> None:
    """A config with thousands of look-alike roles is cut short."""
    values = {f"r{i}actor.fsdp_config.offload_policy": True for i in range(5000)}
    assert len(check_config(native("verl", values)).violations) < 100


_KEYS = sorted({name for rule in load_rules().rules for name in rule.fields})
_ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(),
    st.text(max_size=12),
    st.lists(st.text(max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers()),
    st.sampled_from(["{a}", "[red]x", "\x1b[2J", "${X}", "optim", "1" * 5000, "fsdp2"]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FRAMEWORKS),
    st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=10), _ANY, max_size=12),
)
def test_no_config_breaks_the_engine(framework: str, values: dict[str, Any]) -> None:
    """Whatever stands in a config, every rule is decided, broken or left undecided."""
    fields = {key: NativeField(value=value) for key, value in values.items()}
    config = NativeConfig(format="test", framework=framework, fields=fields)
    for violation in check_config(config, {}, Job(gpu_arch=9.0, world_size=8)).violations:
        assert len(violation.message) < 2000
