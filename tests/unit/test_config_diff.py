"""What changed, what only looks changed, what is inert."""

from typing import Any

import pytest

from fsdp_doctor.config.diff import diff_configs, same_value
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.spec import written_spec_from_mapping
from fsdp_doctor.model.config import ConfigDiff, ConfigValue, EffectiveConfig


def effective(world_size: int = 8, workload: Any = None, **config: Any) -> EffectiveConfig:
    """Return the effective config of a spec with these sections."""
    raw = {"name": "x", "world_size": world_size, "workload": workload or {}, "config": config}
    loaded = written_spec_from_mapping(raw, "s.yaml")
    return resolve_spec(loaded.spec, loaded.written)


def keys(diff: ConfigDiff) -> list[str]:
    """Return the changed keys."""
    return [change.key for change in diff.changed]


def cosmetic(diff: ConfigDiff) -> list[str]:
    """Return the keys that only look changed."""
    return [change.key for change in diff.cosmetic]


def fsdp1(strategy: str, **more: Any) -> dict[str, Any]:
    """Return an FSDP1 config."""
    return {"strategy": "fsdp1", "fsdp1": {"sharding_strategy": strategy, **more}}


def fsdp2(**more: Any) -> dict[str, Any]:
    """Return an FSDP2 config."""
    return {"strategy": "fsdp2", "fsdp2": more}


def test_hybrid_over_one_replica_is_full_shard() -> None:
    """P48: HYBRID_SHARD with one replica changes nothing, though it is spelt differently."""
    hybrid = fsdp1("HYBRID_SHARD", mesh={"replicate": 1, "shard": 8})
    diff = diff_configs(effective(**hybrid), effective(**fsdp1("FULL_SHARD")))
    assert keys(diff) == []
    assert "sharding.strategy" in cosmetic(diff)


def test_unset_reshard_differs_from_true_at_the_root() -> None:
    """P49: reshard_after_forward true also reshards the root, which unset does not."""
    diff = diff_configs(effective(**fsdp2()), effective(**fsdp2(reshard_after_forward=True)))
    assert keys(diff) == ["sharding.reshard_after_forward[root]"]
    assert (diff.changed[0].a.value, diff.changed[0].b.value) == (False, True)
    assert diff.changed[0].effects[0].direction == "down"


def test_a_null_bucket_size_is_25_mib() -> None:
    """P50: bucket_cap_mb null and 25 are the same."""
    a = effective(strategy="ddp", ddp={"bucket_cap_mb": 25})
    b = effective(strategy="ddp", ddp={"bucket_cap_mb": None})
    diff = diff_configs(a, b)
    assert keys(diff) == []
    assert cosmetic(diff) == ["comm.bucket_bytes"]


def test_one_flag_is_one_change() -> None:
    """A strategy, a stored dtype or a world size is one change, with what follows from it."""
    a = effective(**fsdp1("FULL_SHARD"))
    assert keys(diff_configs(a, effective(**fsdp1("SHARD_GRAD_OP")))) == [
        "sharding.reshard_after_forward"
    ]
    half = effective(precision={"parameters": "bfloat16"}, **fsdp1("FULL_SHARD"))
    assert keys(diff_configs(a, half)) == ["precision.param_storage"]
    assert keys(diff_configs(a, effective(16, **fsdp1("FULL_SHARD")))) == ["world.size"]
    offload = effective(**fsdp1("FULL_SHARD", cpu_offload={"offload_params": True}))
    assert keys(diff_configs(a, offload)) == ["offload.params"]
    wider = effective(workload={"model": {"hidden": 512}}, **fsdp1("FULL_SHARD"))
    assert keys(diff_configs(a, wider)) == ["model.hidden"]


@pytest.mark.parametrize("b", [fsdp2(), fsdp1("FULL_SHARD"), fsdp2(reshard_after_forward=True)])
def test_another_engine_brings_its_defaults(b: dict[str, Any]) -> None:
    """From DDP to FSDP only engine and strategy change; fields that come with it do not count."""
    assert keys(diff_configs(effective(strategy="ddp"), effective(**b))) == [
        "sharding.impl",
        "sharding.strategy",
    ]


def test_a_choice_made_with_another_engine_counts() -> None:
    """What is written in the new engine's section and is not its default is a change."""
    b = effective(**fsdp2(reshard_after_forward=False))
    changed = keys(diff_configs(effective(strategy="ddp"), b))
    assert changed == ["sharding.impl", "sharding.strategy", "sharding.reshard_after_forward"]
    assert keys(diff_configs(b, effective(strategy="ddp"))) == [
        "sharding.impl",
        "sharding.strategy",
        "sharding.reshard_after_forward",
    ]


def test_fsdp1_and_fsdp2_with_the_same_strategy_differ_in_the_engine_only() -> None:
    """FULL_SHARD is reshard_after_forward unset."""
    diff = diff_configs(effective(**fsdp1("FULL_SHARD")), effective(**fsdp2()))
    assert keys(diff) == ["sharding.impl"]


def test_hybrid_sharding_changes_both_sizes() -> None:
    """A mesh replaces one group of all ranks by groups of some."""
    b = effective(**fsdp2(mesh={"replicate": 2, "shard": 4}))
    diff = diff_configs(effective(**fsdp2()), b)
    assert keys(diff) == ["sharding.shard_size", "sharding.replicate_size"]


def test_fields_without_effect_are_cosmetic() -> None:
    """Learning rate and seed move neither memory nor step time."""
    a = effective(strategy="ddp")
    b = effective(
        workload={"seed": 3},
        strategy="ddp",
        optimizer={"learning_rate": 1, "weight_decay": 0.2},
    )
    diff = diff_configs(a, b)
    assert keys(diff) == []
    assert set(cosmetic(diff)) == {"seed", "optimizer.learning_rate", "optimizer.weight_decay"}


def test_weight_decay_counts_under_sgd() -> None:
    """SGD adds the decay to a copy of the gradients; AdamW does not."""
    a = effective(strategy="ddp", optimizer={"name": "sgd", "weight_decay": 0.1})
    b = effective(strategy="ddp", optimizer={"name": "sgd", "weight_decay": 0})
    assert keys(diff_configs(a, b)) == ["optimizer.weight_decay"]


def test_a_default_written_out_is_cosmetic() -> None:
    """Writing the default is no change."""
    diff = diff_configs(
        effective(strategy="ddp"), effective(strategy="ddp", ddp={"static_graph": False})
    )
    assert (keys(diff), cosmetic(diff)) == ([], ["ddp.static_graph"])


def test_inert_fields_are_listed_with_their_side() -> None:
    """A key that does nothing is named, per side or for both, and is no change."""
    a = effective(strategy="ddp", fsdp2={"reshard_after_forward": False})
    b = effective(strategy="ddp", optimizer={"momentum": 0.9})
    diff = diff_configs(a, b)
    assert keys(diff) == []
    assert {(field.key, field.side) for field in diff.inert} == {
        ("config.fsdp2.reshard_after_forward", "a"),
        ("optimizer.momentum", "b"),
    }
    assert [field.side for field in diff_configs(b, b).inert] == ["both"]


def test_equal_configs_have_no_difference() -> None:
    """Nothing changed, nothing cosmetic."""
    a = effective(**fsdp2(mp_policy={"param_dtype": "bfloat16"}))
    diff = diff_configs(a, a)
    assert (diff.changed, diff.cosmetic, diff.inert, diff.unknown) == ((), (), (), ())


def test_fields_that_are_not_known_are_told_apart() -> None:
    """A differing field without knowledge of its effect is unknown, not without effect."""
    a, b = (
        EffectiveConfig(
            format="x",
            framework="y",
            version=None,
            fields={"other.knob": ConfigValue(set=True, value=v, source="file", written=v)},
        )
        for v in (1, 2)
    )
    diff = diff_configs(a, b)
    assert keys(diff) == []
    assert [change.key for change in diff.unknown] == ["other.knob"]


def test_a_default_that_moved_between_versions_is_a_change() -> None:
    """Unwritten on both sides and different: the framework's default changed."""
    a, b = (
        EffectiveConfig(
            format="x",
            framework="y",
            version=None,
            fields={"batch.micro": ConfigValue(set=True, value=v, native=("m",))},
        )
        for v in (1, 2)
    )
    assert keys(diff_configs(a, b)) == ["batch.micro"]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, True, False),
        (1, 1.0, True),
        (None, False, False),
        (["A"], ["A"], True),
        (["A"], ["B"], False),
        ({"a": [1]}, {"a": [1.0]}, True),
    ],
)
def test_equality_of_values(a: object, b: object, same: bool) -> None:
    """Switches differ from numbers; containers are compared by content."""
    assert same_value(a, b) is same
