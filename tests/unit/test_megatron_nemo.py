"""NeMo 1, NeMo-RL and NeMo Automodel: what acts, what is inert, what a version changes."""

from __future__ import annotations

import pytest
from megatron_cases import changed, compare, effective, fixture, inert, source

from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.loaders import nemo, nemo_automodel, nemo_rl


def text_of(name: str) -> str:
    """Return the text of a fixture."""
    return fixture(name).text


def test_references_of_nemo1_are_filled_in() -> None:
    """``${a.b}`` is filled in, another interpolation is told."""
    native = nemo.load(fixture("nemo1.yaml"))
    assert native.fields["model.global_batch_size"].value == 256
    assert any("multiply" in note for note in native.unresolved)


def test_nemo1_resolves_to_the_distributed_optimizer() -> None:
    """The optimizer's name says ZeRO-1; sizes, gradients and buckets follow."""
    fields = effective(nemo, fixture("nemo1.yaml")).fields
    assert fields["sharding.impl"].value == "megatron_distopt"
    assert fields["world.size"].value == 16
    assert fields["parallel.dp"].value == 8
    assert fields["batch.accumulation"].value == 32
    assert fields["precision.grad"].value == "float32"
    assert fields["comm.bucket_bytes"].value == 400 << 20
    assert fields["model.gated"].value is True
    assert not fields["model.fsdp_sharding_strategy"].effective
    assert not fields["model.grad_allreduce_chunk_size_mb"].effective


def test_nemo1_with_fsdp() -> None:
    """``fsdp: true`` wraps in FSDP1, whose strategy names are NeMo's own."""
    text = text_of("nemo1.yaml").replace("fsdp: false", "fsdp: true")
    diff = compare(nemo, fixture("nemo1.yaml"), text)
    found = changed(diff)
    assert found["sharding.impl"] == ("megatron_distopt", "fsdp1")
    assert found["sharding.strategy"] == ("optim", "optim_grads_params")
    assert diff.b.fields["sharding.reshard_after_forward"].value is False


def test_nemo2_recipe_overrides() -> None:
    """Dotted overrides of a NeMo 2 recipe are read by the ends of their keys."""
    text = (
        "MODEL_ARGS:\n  trainer.devices: 8\n  trainer.num_nodes: 1\n"
        "  trainer.strategy.tensor_model_parallel_size: 2\n  model.config.num_layers: 12\n"
        "  data.micro_batch_size: 4\n  data.global_batch_size: 64\n"
    )
    given = source(text, "recipe.yaml")
    assert nemo.detect(given) > 90
    fields = effective(nemo, given).fields
    assert fields["parallel.tp"].value == 2
    assert fields["batch.accumulation"].value == 4


def test_the_disabled_block_of_nemo_rl_is_inert() -> None:
    """P11: an edit in the Megatron block does nothing while DTensor trains."""
    edited = text_of("nemo_rl.yaml").replace("granularity: full", "granularity: selective")
    diff = compare(nemo_rl, fixture("nemo_rl.yaml"), edited)
    assert changed(diff) == {}
    assert not diff.unknown
    assert "policy.megatron_cfg.recompute_granularity" in inert(diff)


def test_recompute_of_nemo_rl_needs_its_switch() -> None:
    """With Megatron enabled, granularity is read only when activation checkpointing is on."""
    megatron = text_of("nemo_rl.yaml").replace(
        "megatron_cfg:\n    enabled: false", "megatron_cfg:\n    enabled: true"
    )
    config = effective(nemo_rl, megatron)
    assert config.fields["sharding.impl"].value == "megatron_distopt"
    assert config.fields["recompute.mode"].value == "none"
    assert not config.fields["policy.megatron_cfg.recompute_granularity"].effective
    assert not config.fields["policy.dtensor_cfg.tensor_parallel_size"].effective
    on = megatron.replace("false\n    recompute_granularity", "true\n    recompute_granularity")
    assert effective(nemo_rl, on).fields["recompute.mode"].value == "full"


def test_automodel_checkpoint_format() -> None:
    """P12: the format of checkpoints is the only change; a file's name changes nothing."""
    edited = text_of("automodel.yaml").replace("safetensors", "torch_save")
    found = changed(compare(nemo_automodel, fixture("automodel.yaml"), edited))
    assert found == {"ckpt.format": ("safetensors", "torch_save")}


def test_automodel_reduction_by_version() -> None:
    """P14: without a policy gradients are reduced in float32 since 0.5, in bf16 before."""
    a = effective(nemo_automodel, fixture("automodel.yaml"), "0.4.0")
    b = effective(nemo_automodel, fixture("automodel.yaml"), "0.5.0")
    assert changed(diff_configs(a, b)) == {"precision.reduce": ("bfloat16", "float32")}


@pytest.mark.parametrize(
    ("written", "impl"),
    [
        ("strategy: megatron_fsdp", "megatron_fsdp"),
        ("strategy: mfsdp", "megatron_fsdp"),
        ("strategy: ddp", "ddp"),
        ("_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager", "fsdp2"),
        ("_target_: nemo_automodel.components.distributed.ddp.DDPManager", "ddp"),
    ],
)
def test_both_generations_of_automodel(written: str, impl: str) -> None:
    """The engine is a strategy's name, or the class of the older generation."""
    text = text_of("automodel.yaml").replace("strategy: fsdp2", written)
    assert effective(nemo_automodel, text).fields["sharding.impl"].value == impl


def test_replicas_of_automodel() -> None:
    """dp_replicate_size is what makes a hybrid sharding, not the file's name."""
    text = text_of("automodel.yaml").replace("tp_size: 1", "tp_size: 1\n  dp_replicate_size: 2")
    found = changed(compare(nemo_automodel, fixture("automodel.yaml"), text))
    assert found["sharding.replicate_size"] == (1, 2)


@pytest.mark.parametrize(
    ("kind", "impl"), [("megatron", "megatron_fsdp"), ("pytorch", "mcore_torch_fsdp2")]
)
def test_fsdp_of_nemo2(kind: str, impl: str) -> None:
    """NeMo 2's strategy names which FSDP wraps the model."""
    text = (
        "trainer:\n  strategy:\n    _target_: nemo.lightning.MegatronStrategy\n"
        f"    fsdp: {kind}\n    tensor_model_parallel_size: 1\n"
        "    ddp:\n      data_parallel_sharding_strategy: optim_grads_params\n"
    )
    given = source(text, "task.yaml")
    assert nemo.detect(given) > 90
    fields = effective(nemo, given).fields
    assert fields["sharding.impl"].value == impl
    assert fields["sharding.strategy"].value == "optim_grads_params"


def test_weights_of_nemo_rl_are_float32() -> None:
    """NeMo-RL's DTensor policy loads weights in float32 and computes in the precision given."""
    fields = effective(nemo_rl, fixture("nemo_rl.yaml")).fields
    assert fields["precision.param_storage"].value == "float32"
    assert fields["precision.compute"].value == "bfloat16"
