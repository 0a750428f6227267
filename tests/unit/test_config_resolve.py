"""What torch makes of a spec: canonical fields, defaults, inert fields."""

from typing import Any

import pytest

from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.spec import spec_from_mapping, written_spec_from_mapping
from fsdp_doctor.model.config import ConfigValue


def fields(strategy: str, world_size: int = 8, **config: Any) -> dict[str, ConfigValue]:
    """Return the effective fields of a config."""
    raw = {"name": "x", "world_size": world_size, "config": {"strategy": strategy, **config}}
    loaded = written_spec_from_mapping(raw, "s.yaml")
    return dict(resolve_spec(loaded.spec, loaded.written).fields)


def values(found: dict[str, ConfigValue], *keys: str) -> list[Any]:
    """Return some values."""
    return [found[key].value for key in keys]


GROUP = ("sharding.strategy", "sharding.shard_size", "sharding.replicate_size")
RESHARD = ("sharding.reshard_after_forward", "sharding.reshard_after_forward[root]")


def test_ddp_divides_nothing() -> None:
    """Every rank is a replica, and no field of FSDP exists."""
    found = fields("ddp")
    assert values(found, *GROUP) == ["none", 1, 8]
    assert RESHARD[0] not in found


def test_ddp_bucket_default_is_25_mib() -> None:
    """Null and 25 are both 26214400 bytes (DDP's bucket_bytes_cap, torch 2.13)."""
    assert fields("ddp", ddp={"bucket_cap_mb": None})["comm.bucket_bytes"].value == 26214400
    assert fields("ddp", ddp={"bucket_cap_mb": 25})["comm.bucket_bytes"].value == 26214400


@pytest.mark.parametrize(
    ("strategy", "mesh", "expected"),
    [
        ("FULL_SHARD", None, ["optim_grads_params", 8, 1, True]),
        ("SHARD_GRAD_OP", None, ["optim_grads_params", 8, 1, False]),
        ("HYBRID_SHARD", {"replicate": 2, "shard": 4}, ["optim_grads_params", 4, 2, True]),
        ("_HYBRID_SHARD_ZERO2", {"replicate": 2, "shard": 4}, ["optim_grads_params", 4, 2, False]),
    ],
)
def test_fsdp1_strategies(strategy: str, mesh: Any, expected: list[Any]) -> None:
    """A strategy's name becomes what is divided, over how many, and whether units are freed."""
    found = fields("fsdp1", fsdp1={"sharding_strategy": strategy, "mesh": mesh})
    assert values(found, *GROUP, RESHARD[0]) == expected
    assert found[RESHARD[1]].value is False


def test_fsdp1_no_shard_has_nothing_to_gather() -> None:
    """NO_SHARD is DDP in effect: no resharding, and prefetching is inert."""
    found = fields("fsdp1", fsdp1={"sharding_strategy": "NO_SHARD", "forward_prefetch": True})
    assert values(found, *GROUP) == ["none", 1, 8]
    assert RESHARD[0] not in found
    for key in ("comm.prefetch_bwd", "comm.prefetch_fwd", "comm.limit_all_gathers"):
        assert not found[key].effective
        assert "nothing is sharded" in (found[key].reason or "")


def test_fsdp1_on_one_rank_becomes_no_shard() -> None:
    """The written strategy is inert when one rank holds the whole shard."""
    strategy = fields("fsdp1", 1, fsdp1={"sharding_strategy": "FULL_SHARD"})["sharding.strategy"]
    assert (strategy.value, strategy.effective, strategy.written) == ("none", False, "FULL_SHARD")


def test_fsdp2_on_one_rank_still_gathers() -> None:
    """FSDP2 divides nothing on one rank but copies parameters for compute."""
    found = fields("fsdp2", 1)
    assert not found["sharding.strategy"].effective
    assert found[RESHARD[0]].effective


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, [True, False]),
        (True, [True, True]),
        (False, [False, False]),
        (4, [4, 4]),
        (8, [True, True]),
        (1, [False, False]),
    ],
)
def test_fsdp2_reshard_after_forward(written: Any, expected: list[Any]) -> None:
    """Unset means true except for the root; 1 and the shard size mean false and true."""
    found = fields("fsdp2", fsdp2={"reshard_after_forward": written})
    assert values(found, *RESHARD) == expected


@pytest.mark.parametrize(
    ("param", "reduce", "expected"),
    [
        (None, None, ["float32", "float32"]),
        ("bfloat16", None, ["bfloat16", "bfloat16"]),
        ("bfloat16", "float32", ["bfloat16", "float32"]),
        (None, "bfloat16", ["float32", "bfloat16"]),
    ],
)
def test_reduce_dtype_follows_the_gradients(param: Any, reduce: Any, expected: list[str]) -> None:
    """Without reduce_dtype gradients are reduced in the dtype they are computed in."""
    policy = {"param_dtype": param, "reduce_dtype": reduce}
    keys = ("precision.compute", "precision.reduce")
    assert values(fields("fsdp2", fsdp2={"mp_policy": policy}), *keys) == expected
    assert values(fields("fsdp1", fsdp1={"mixed_precision": policy}), *keys) == expected


def test_kept_low_precision_gradients() -> None:
    """FSDP1 can leave sharded gradients in the computed dtype; inert where that is the stored."""
    policy = {"param_dtype": "bfloat16", "keep_low_precision_grads": True}
    assert fields("fsdp1", fsdp1={"mixed_precision": policy})["precision.grad"].value == "bfloat16"
    alone = fields("fsdp1", fsdp1={"mixed_precision": {"keep_low_precision_grads": True}})
    assert alone["precision.grad"].value == "float32"
    assert not alone["fsdp1.keep_low_precision_grads"].effective


def test_offload_takes_gradients_and_state_along() -> None:
    """An empty offload policy is still a policy, written in the file."""
    found = fields("fsdp2", fsdp2={"offload_policy": {}})
    assert values(found, "offload.params", "offload.grads", "offload.optimizer") == ["cpu"] * 3
    assert found["offload.params"].source == "file"
    assert found["offload.pin_memory"].value is True
    assert "offload.pin_memory" not in fields("fsdp2")


@pytest.mark.parametrize(
    ("strategy", "config", "key", "reason"),
    [
        ("fsdp2", {"ddp": {"bucket_cap_mb": 50}}, "config.ddp.bucket_cap_mb", "strategy: ddp only"),
        ("ddp", {"fsdp1": {"wrap": "none"}}, "config.fsdp1.wrap", "strategy: fsdp1 only"),
        ("ddp", {"gradient_accumulation": {"sync": "last_microbatch"}}, "comm.grad_sync", "one mi"),
        ("ddp", {"activation_checkpointing": {"every_n": 3}}, "recompute.granularity", "every_n"),
        ("ddp", {"optimizer": {"momentum": 0.9}}, "optimizer.momentum", "AdamW has no momentum"),
        (
            "ddp",
            {"ddp": {"static_graph": True, "find_unused_parameters": True}},
            "ddp.find_unused_parameters",
            "static_graph finds",
        ),
        ("fsdp1", {"fsdp1": {"wrap": "none"}}, "comm.prefetch_bwd", "one unit only"),
        (
            "fsdp2",
            {"fsdp2": {"wrap": "none", "blocks_per_unit": 2}},
            "sharding.blocks_per_unit",
            "wrap: block only",
        ),
        (
            "fsdp2",
            {"fsdp2": {"mp_policy": {"cast_forward_inputs": False}}},
            "precision.cast_inputs",
            "param_dtype only",
        ),
    ],
)
def test_inert_fields_say_why(strategy: str, config: Any, key: str, reason: str) -> None:
    """A field torch never reads, or cannot act on, is inert with its reason."""
    field = fields(strategy, **config)[key]
    assert not field.effective
    assert reason in (field.reason or "")


def test_inert_sections_list_written_keys_only() -> None:
    """Defaults of another engine's section are no fields at all."""
    assert not [key for key in fields("fsdp2") if key.startswith("config.")]


def test_the_built_in_shape_is_inert_beside_a_factory() -> None:
    """A model of one's own has none of the built-in GPT's sizes."""
    raw = {
        "name": "x",
        "workload": {"model": {"factory": "a:b", "batch": "a:c"}},
        "config": {"strategy": "ddp"},
    }
    found = resolve_spec(spec_from_mapping(raw, "s.yaml")).fields
    assert not found["model.hidden"].effective
    assert found["model.factory"].effective


def test_derived_shapes_and_sizes() -> None:
    """Heads, feed-forward width and global batch follow from other keys."""
    found = fields("ddp", gradient_accumulation={"steps": 3})
    assert values(found, "model.kv_heads", "model.ffn", "batch.global") == [8, 1024, 24]
    assert {found[k].source for k in ("model.kv_heads", "model.ffn", "batch.global")} == {"derived"}


def test_every_block_recomputed_is_full() -> None:
    """``every_n`` with 1 is the same as ``full``."""
    checkpointing = {"mode": "every_n", "every_n": 1}
    found = fields("ddp", activation_checkpointing=checkpointing)
    assert found["recompute.mode"].value == "full"


def test_default_implementation_depends_on_the_device() -> None:
    """``default`` stays as it is, and the reason says what torch makes of it."""
    found = fields("ddp")["optimizer.implementation"]
    assert found.value == "default"
    assert "foreach when all parameters are on a GPU" in (found.reason or "")


def test_sources_without_a_file() -> None:
    """A spec built in code counts what differs from the defaults as written."""
    raw = {"name": "x", "config": {"strategy": "fsdp2", "fsdp2": {"reshard_after_forward": False}}}
    found = resolve_spec(spec_from_mapping(raw, "s.yaml")).fields
    assert found["sharding.reshard_after_forward"].source == "file"
    assert found["batch.micro"].source == "default"
