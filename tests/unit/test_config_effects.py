"""Effects against numbers computed by hand, and the categories each field touches."""

from typing import Any

import pytest

from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.effects import NO_EFFECT, is_known
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.sizes import model_sizes_from_shape
from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.model.config import ConfigChange, EffectiveConfig
from fsdp_doctor.model.memory import Category
from fsdp_doctor.model.run import ModelSizes

BLOCK = 51384320
"""4 x 2048^2 + 3 x 2048 x 5632 + 2 x 2048."""
ROOT = 131074048
"""2 x 32000 x 2048 + 2048."""
P = 16 * BLOCK + ROOT
MODEL = {"layers": 16, "hidden": 2048, "heads": 16, "ffn": 5632, "vocab": 32000}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def effective(world_size: int = 2, model: Any = None, **config: Any) -> EffectiveConfig:
    """Return the effective config of the 0.95 B GPT."""
    workload = {"model": {**MODEL, **(model or {})}, "micro_batch": 2, "sequence_length": 2048}
    raw = {"name": "x", "world_size": world_size, "workload": workload, "config": config}
    return resolve_spec(spec_from_mapping(raw, "s.yaml"))


def changes(a: EffectiveConfig, b: EffectiveConfig) -> dict[str, ConfigChange]:
    """Return the changes by key."""
    return {change.key: change for change in diff_configs(a, b).changed}


def amounts(change: ConfigChange) -> dict[str, int | None]:
    """Return category -> bytes; of effects by phase, the last."""
    return {effect.category: effect.bytes for effect in change.effects}


def fsdp1(strategy: str = "FULL_SHARD", **more: Any) -> dict[str, Any]:
    """Return a bf16 FSDP1 config."""
    section = {"sharding_strategy": strategy, "mixed_precision": BF16, **more}
    return {"strategy": "fsdp1", "fsdp1": section}


def fsdp2(**more: Any) -> dict[str, Any]:
    """Return a bf16 FSDP2 config."""
    return {"strategy": "fsdp2", "fsdp2": {"mp_policy": BF16, **more}}


def test_full_shard_to_shard_grad_op_as_on_the_gpu() -> None:
    """Measured on an H200: peak of backward 13022217216 -> 14666515456 bytes."""
    change = changes(effective(**fsdp1()), effective(**fsdp1("SHARD_GRAD_OP")))[
        "sharding.reshard_after_forward"
    ]
    assert amounts(change)["unsharded_parameters"] == 14666515456 - 13022217216 == 16 * BLOCK * 2
    assert {effect.category for effect in change.effects} == {
        "unsharded_parameters",
        "communication",
    }


def test_fsdp2_true_to_false_counts_the_root_too() -> None:
    """With true the root is resharded as well; measured 1907494912, 1 MiB of it elsewhere."""
    a, b = (effective(**fsdp2(reshard_after_forward=value)) for value in (True, False))
    change = changes(a, b)["sharding.reshard_after_forward"]
    assert amounts(change)["unsharded_parameters"] == P * 2 == 1907494912 - (1 << 20)


def test_reshard_to_some_ranks_keeps_a_share() -> None:
    """With n, each rank keeps 1/n of every unit between forward and backward."""
    a, b = (effective(8, **fsdp2(reshard_after_forward=value)) for value in (True, 4))
    change = changes(a, b)["sharding.reshard_after_forward"]
    shard = (16 * BLOCK // 4 + ROOT // 4) * 2
    found = [(e.phase, e.bytes) for e in change.effects if e.category == "parameters"]
    assert found == [("forward", shard), ("backward", shard)]


def test_ddp_to_fsdp_divides_the_states() -> None:
    """Parameters and gradients 4 bytes, AdamW 8 bytes an element, each over 2 ranks."""
    change = changes(effective(strategy="ddp"), effective(strategy="fsdp2"))["sharding.strategy"]
    found = amounts(change)
    assert found["parameters"] == found["gradients"] == -P * 2
    assert found["optimizer_state"] == -P * 4
    assert found["unsharded_parameters"] == ROOT * 4


def test_bytes_of_all_changes_add_up() -> None:
    """From DDP fp32 to FSDP2 bf16 without resharding the unsharded parameters are all in bf16."""
    found = changes(effective(strategy="ddp"), effective(**fsdp2(reshard_after_forward=False)))
    total = sum(amounts(c).get("unsharded_parameters") or 0 for c in found.values())
    assert total == P * 2


def test_the_foreach_square_root_is_one_shard() -> None:
    """Measured on an H200: the optimizer's peak is one fp32 shard above the states."""
    a, b = (
        effective(**fsdp1(), optimizer={"implementation": name}) for name in ("foreach", "fused")
    )
    change = changes(a, b)["optimizer.implementation"]
    assert amounts(change) == {"temporaries": -P * 2}
    assert change.effects[0].phase == "optimizer"


def test_accumulating_without_synchronisation_keeps_whole_gradients() -> None:
    """FSDP2 accumulates in reduce_dtype fp32: 4 bytes an element on every rank; FSDP1 in bf16."""
    for engine, width in ((fsdp2(), 4), (fsdp1(), 2)):
        a, b = (
            effective(gradient_accumulation={"steps": 4, "sync": sync}, **engine)
            for sync in ("every_microbatch", "last_microbatch")
        )
        change = changes(a, b)["comm.grad_sync"]
        assert amounts(change)["unsharded_gradients"] == P * width


def test_accumulation_alone_keeps_reduced_gradients() -> None:
    """With a reduction each micro step, what stays is the sharded gradient."""
    a, b = (effective(gradient_accumulation={"steps": n}, **fsdp2()) for n in (1, 4))
    found = [e for e in changes(a, b)["batch.accumulation"].effects if e.category == "gradients"]
    assert [(e.phase, e.bytes) for e in found] == [("forward", P * 2), ("backward", P * 2)]


def test_accumulation_where_synchronisation_already_waits() -> None:
    """``last_microbatch`` on both sides begins to act with the second micro step."""
    a, b = (
        effective(gradient_accumulation={"steps": n, "sync": "last_microbatch"}, **fsdp2())
        for n in (1, 4)
    )
    assert amounts(changes(a, b)["batch.accumulation"])["unsharded_gradients"] == P * 4
    assert amounts(changes(b, a)["batch.accumulation"])["unsharded_gradients"] == -P * 4


def test_accumulation_and_synchronisation_together_add_up() -> None:
    """One micro step to four without synchronisation: whole gradients, and no reduced ones."""
    for a, b, sign in ((1, 4, 1), (4, 1, -1)):
        sides = [
            effective(
                gradient_accumulation={
                    "steps": n,
                    "sync": "every_microbatch" if n == 1 else "last_microbatch",
                },
                **fsdp2(),
            )
            for n in (a, b)
        ]
        effects = [e for change in changes(*sides).values() for e in change.effects]
        totals = {
            category: sum(e.bytes or 0 for e in effects if e.category == category)
            for category in ("unsharded_gradients", "gradients")
        }
        assert totals == {"unsharded_gradients": sign * P * 4, "gradients": 0}


def test_momentum_written_on_both_sides_comes_with_sgd() -> None:
    """Momentum is inert under AdamW and takes a buffer once the optimizer is SGD."""
    a, b = (
        effective(strategy="ddp", optimizer={"name": name, "momentum": 0.9})
        for name in ("adamw", "sgd")
    )
    found = changes(a, b)
    assert list(found) == ["optimizer.kind"]
    assert amounts(found["optimizer.kind"])["optimizer_state"] == -P * 4


def test_bucket_views_save_one_copy_of_the_gradients() -> None:
    """The buckets' own copy of P elements goes away."""
    a, b = (
        effective(strategy="ddp", ddp={"gradient_as_bucket_view": view}) for view in (False, True)
    )
    assert amounts(changes(a, b)["comm.bucket_view"]) == {"communication": -P * 4}


def test_offload_empties_the_device() -> None:
    """Shards, gradients and optimizer state leave the device, and so does the optimizer."""
    found = amounts(
        changes(effective(**fsdp2()), effective(**fsdp2(offload_policy={})))["offload.params"]
    )
    assert found["parameters"] == found["gradients"] == found["temporaries"] == -P * 2
    assert found["optimizer_state"] == -P * 4


def test_autocast_copies_the_matrices() -> None:
    """Under DDP each matrix of a linear layer, the head's too, has a bf16 copy."""
    a, b = (
        effective(strategy="ddp", precision={"autocast": autocast})
        for autocast in (None, "bfloat16")
    )
    found = amounts(changes(a, b)["precision.autocast"])
    assert found["unsharded_parameters"] == (16 * (BLOCK - 4096) + 32000 * 2048) * 2


def test_sgd_has_less_state() -> None:
    """SGD without momentum has none, with momentum one buffer."""
    adamw = effective(strategy="ddp")
    sgd, momentum = (
        effective(strategy="ddp", optimizer={"name": "sgd", "momentum": m}) for m in (0, 0.9)
    )
    assert amounts(changes(adamw, sgd)["optimizer.kind"])["optimizer_state"] == -P * 8
    assert amounts(changes(sgd, momentum)["optimizer.momentum"])["optimizer_state"] == P * 4


def test_a_larger_shard_group_divides_more() -> None:
    """From 2 to 64 ranks the states fall to 1/32."""
    found = amounts(changes(effective(2, **fsdp2()), effective(64, **fsdp2()))["world.size"])
    assert found["parameters"] == (P // 64 - P // 2) * 4


def test_tied_embeddings_save_one_matrix() -> None:
    """The head shares the embedding's weight."""
    a, b = (effective(strategy="ddp", model={"tied_embeddings": tied}) for tied in (False, True))
    found = amounts(changes(a, b)["model.tied_embeddings"])
    assert found["parameters"] == -32000 * 2048 * 4
    assert found["optimizer_state"] == -32000 * 2048 * 8


def test_a_model_of_ones_own_takes_the_sizes_given() -> None:
    """Without a shape, bytes come from the counted parameters, or are not known."""

    def own(strategy: str) -> EffectiveConfig:
        raw = {
            "name": "x",
            "workload": {"model": {"factory": "a:b", "batch": "a:c"}},
            "config": {"strategy": strategy},
        }
        return resolve_spec(spec_from_mapping(raw, "s.yaml"))

    sizes = ModelSizes(parameters=1000, parameter_bytes=4000, unit_parameters=(100, 900))
    known = diff_configs(own("ddp"), own("fsdp2"), sizes, sizes).changed[1]
    assert amounts(known)["parameters"] == -2000
    unknown = diff_configs(own("ddp"), own("fsdp2")).changed[1]
    assert [(e.bytes, e.direction) for e in unknown.effects if e.category == "parameters"] == [
        (None, "down")
    ]


TOUCHES: list[tuple[dict[str, Any], dict[str, Any], str, set[str]]] = [
    (
        {},
        {"activation_checkpointing": {"mode": "full"}},
        "recompute.mode",
        {"activations", "temporaries"},
    ),
    ({}, {"compile": True}, "compile.enabled", {"activations", "temporaries", "logits"}),
    ({}, {"optimizer": {"max_grad_norm": 1}}, "optimizer.grad_clip", {"temporaries"}),
    (
        fsdp2(),
        {"strategy": "fsdp2"},
        "precision.compute",
        {
            "unsharded_parameters",
            "unsharded_gradients",
            "activations",
            "logits",
            "communication",
            "temporaries",
        },
    ),
    (
        fsdp2(),
        fsdp2(blocks_per_unit=2),
        "sharding.blocks_per_unit",
        {
            "unsharded_parameters",
            "unsharded_gradients",
            "communication",
            "temporaries",
            "parameters",
        },
    ),
    (
        {},
        {"ddp": {"bucket_cap_mb": 100}},
        "comm.bucket_bytes",
        {"communication"},
    ),
    ({}, {"ddp": {"comm_hook": "bf16_compress"}}, "comm.hook", {"communication"}),
    ({}, {"ddp": {"static_graph": True}}, "ddp.static_graph", set()),
]


@pytest.mark.parametrize(("a", "b", "key", "categories"), TOUCHES)
def test_fields_touch_these_categories(
    a: dict[str, Any], b: dict[str, Any], key: str, categories: set[str]
) -> None:
    """A field lists every category it has a mechanism for, and no other."""
    sides = [effective(**{"strategy": "ddp", **side}) for side in (a, b)]
    change = changes(*sides)[key]
    assert {effect.category for effect in change.effects} == categories
    assert change.step_time is not None


@pytest.mark.parametrize(("key", "name"), [("batch.micro", "micro_batch"), ("batch.seq_len", "s")])
def test_tokens_scale_what_forward_holds(key: str, name: str) -> None:
    """More tokens mean more activations, logits, scratch and inputs; tables with the sequence."""
    sides = []
    for n in (2, 4):
        workload = {"micro_batch": n} if name == "micro_batch" else {"sequence_length": n}
        raw = {"name": "x", "workload": workload, "config": {"strategy": "ddp"}}
        sides.append(resolve_spec(spec_from_mapping(raw, "s.yaml")))
    change = changes(*sides)[key]
    expected = {"activations", "logits", "temporaries", "inputs"}
    assert {e.category for e in change.effects} - {"buffers"} == expected
    assert {e.direction for e in change.effects} == {"up"}


def test_every_effect_is_well_formed() -> None:
    """Categories are known words, directions agree with bytes, and reason and source are given."""
    for a, b, key, _ in TOUCHES:
        sides = [effective(**{"strategy": "ddp", **side}) for side in (a, b)]
        for effect in changes(*sides)[key].effects:
            assert effect.category in set(Category)
            assert effect.reason
            assert effect.source
            if effect.bytes:
                assert effect.direction == ("up" if effect.bytes > 0 else "down")


def test_every_field_of_every_engine_is_known() -> None:
    """No field that a spec can change is left without knowledge, unless it follows from others."""
    derived = {
        "offload.grads",
        "offload.optimizer",
        "precision.grad",
        "precision.optim_states",
        "batch.global",
    }
    for engine in ({"strategy": "ddp"}, fsdp1(), fsdp2(offload_policy={})):
        assert {key for key in effective(**engine).fields if not is_known(key)} <= derived
    assert "optimizer.learning_rate" in NO_EFFECT


def test_sizes_of_the_built_in_model() -> None:
    """Parameters, bytes and units follow from the shape; the root comes first."""
    raw = {
        "name": "x",
        "workload": {"model": MODEL},
        "config": {
            "strategy": "fsdp2",
            "precision": {"parameters": "bfloat16"},
            "fsdp2": {"blocks_per_unit": 3},
        },
    }
    sizes = model_sizes_from_shape(spec_from_mapping(raw, "s.yaml"))
    assert sizes is not None
    assert (sizes.parameters, sizes.parameter_bytes) == (P, 2 * P)
    assert sizes.unit_parameters == (ROOT, *[3 * BLOCK] * 5, BLOCK)


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_agree_with_the_real_model(tied: bool) -> None:
    """The shape's count is the count of the model that is trained."""
    torch = pytest.importorskip("torch")
    gpt = pytest.importorskip("fsdp_doctor.training.gpt")
    shape = {"layers": 3, "hidden": 48, "heads": 6, "kv_heads": 2, "vocab": 77}
    raw = {
        "name": "x",
        "workload": {"model": {**shape, "tied_embeddings": tied}, "sequence_length": 16},
        "config": {"strategy": "fsdp2"},
    }
    spec = spec_from_mapping(raw, "s.yaml")
    sizes = model_sizes_from_shape(spec)
    with torch.device("meta"):
        model = gpt.GPT(spec.workload.model, 16)
    assert sizes is not None
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.buffers_bytes == sum(b.nbytes for b in model.buffers())
    blocks = tuple(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    assert sizes.unit_parameters[1:] == blocks
