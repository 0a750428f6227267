"""Effective configs: each framework's own rules, of its version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_doctor.config.load import Known, load_config
from fsdp_doctor.model.config import EffectiveConfig

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"


def effective(tmp_path: Path, fmt: str, raw: dict[str, Any], **versions: str) -> EffectiveConfig:
    """Return the effective config of a mapping."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load_config(path, (), fmt, versions).config


def values(config: EffectiveConfig, *keys: str) -> list[Any]:
    """Return the values of fields; None for one that is absent or inert."""
    found = [config.fields.get(key) for key in keys]
    return [f.value if f is not None and f.effective else None for f in found]


def fsdp_case(tmp_path: Path, version: str, **arguments: Any) -> EffectiveConfig:
    """Return the Trainer's effective config under a version of transformers."""
    raw = {"per_device_train_batch_size": 1, "bf16": True, **arguments}
    return effective(tmp_path, "hf_trainer", raw, transformers=version)


@pytest.mark.parametrize(
    ("version", "impl", "reshard"),
    [
        ("4.57.1", "fsdp1", False),
        ("5.0.0", "fsdp1", False),
        ("5.4.0", "fsdp1", True),
        ("5.9.0", "fsdp1", True),
        ("5.10.1", "fsdp2", False),
        ("5.24.0", "fsdp2", False),
    ],
)
def test_trainer_strategy_word_by_version(
    version: str, impl: str, reshard: bool, tmp_path: Path
) -> None:
    """``shard_grad_op`` works, is ignored, or means FSDP2's reshard, by version."""
    config = fsdp_case(tmp_path, version, fsdp="shard_grad_op auto_wrap")
    keys = ("sharding.impl", "sharding.reshard_after_forward")
    assert values(config, *keys) == [impl, reshard]


def test_trainer_version_two_default_of_reshard(tmp_path: Path) -> None:
    """FSDP2's default was false in 5.0 and is true since 5.4."""
    arguments = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
    key = "sharding.reshard_after_forward"
    assert values(fsdp_case(tmp_path, "5.0.0", **arguments), key) == [False]
    assert values(fsdp_case(tmp_path, "5.4.0", **arguments), key) == [True]
    old = fsdp_case(tmp_path, "4.57.1", **arguments)
    assert values(old, "sharding.impl") == ["fsdp1"]
    assert not old.fields["fsdp_config.version"].effective


def test_an_unknown_version_is_assumed_and_said(tmp_path: Path) -> None:
    """The assumption names the version, and the fields that another one would change."""
    config = effective(
        tmp_path, "hf_trainer", {"per_device_train_batch_size": 1, "fsdp": "full_shard"}
    )
    assert config.assumed is not None
    assert "transformers 5.24.0" in config.assumed
    assert "5.9.0 would differ in sharding.impl" in config.assumed


def test_mixed_precision_under_fsdp_stores_float32(tmp_path: Path) -> None:
    """bf16 with FSDP upcasts the stored parameters and reduces in bf16."""
    config = fsdp_case(tmp_path, "5.24.0", fsdp=True)
    keys = ("precision.param_storage", "precision.compute", "precision.reduce")
    assert values(config, *keys) == ["float32", "bfloat16", "bfloat16"]


def test_gradients_can_be_synchronised_each_time(tmp_path: Path) -> None:
    """``sync_each_batch`` turns no_sync off."""
    more = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    config = fsdp_case(
        tmp_path, "5.24.0", fsdp=True, gradient_accumulation_steps=4, accelerator_config=more
    )
    assert values(config, "comm.grad_sync") == ["every_microbatch"]


def test_trainer_checkpoints_every_second_layer(tmp_path: Path) -> None:
    """The Trainer's own keys in activation_checkpointing_kwargs are not torch's."""
    kwargs = {"every_n_layers": 2, "offload": True}
    config = fsdp_case(
        tmp_path,
        "5.24.0",
        activation_checkpointing=True,
        activation_checkpointing_kwargs=kwargs,
    )
    keys = ("recompute.mode", "recompute.granularity", "offload.activations")
    assert values(config, *keys) == ["every_n", 2, True]
    off = fsdp_case(tmp_path, "5.24.0", activation_checkpointing_kwargs=kwargs)
    assert values(off, "recompute.mode") == ["none"]
    assert values(off, "offload.activations") == [None]


def test_trainer_without_sharding_is_ddp(tmp_path: Path) -> None:
    """Bucket sizes are bytes; the fsdp block is inert."""
    config = fsdp_case(tmp_path, "5.24.0", ddp_bucket_cap_mb=50, fsdp_config={"cpu_offload": True})
    assert values(config, "sharding.impl", "comm.bucket_bytes") == ["ddp", 50 << 20]
    assert not config.fields["fsdp_config.cpu_offload"].effective


def test_accelerate_deepspeed_block() -> None:
    """Inline keys are DeepSpeed's; what is not written is the launcher's default."""
    config = load_config(FIXTURES / "accelerate_deepspeed.yaml").config
    keys = (
        "sharding.impl", "sharding.strategy", "offload.optimizer", "offload.params",
        "batch.accumulation", "precision.compute", "ckpt.gather_16bit",
    )  # fmt: skip
    assert values(config, *keys) == [
        "deepspeed", "optim_grads_params", "cpu", "none", 4, "bfloat16", True,
    ]  # fmt: skip


def test_accelerate_stage_default(tmp_path: Path) -> None:
    """Without ``zero_stage`` accelerate runs stage 2."""
    raw = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_clipping": 1.0}}
    assert values(effective(tmp_path, "accelerate", raw), "sharding.strategy") == ["optim_grads"]


def test_an_fsdp_block_without_fsdp_is_inert(tmp_path: Path) -> None:
    """The block of another distributed type is not read."""
    raw = {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_offload_params": True}}
    config = effective(tmp_path, "accelerate", raw)
    assert values(config, "sharding.impl", "offload.params") == ["ddp", None]
    assert not config.fields["fsdp_config.fsdp_offload_params"].effective


def test_accelerate_before_fsdp2(tmp_path: Path) -> None:
    """Before 1.6 there is no FSDP2: the key does nothing."""
    raw = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    config = effective(tmp_path, "accelerate", raw, accelerate="1.5.2")
    assert values(config, "sharding.impl") == ["fsdp1"]
    assert not config.fields["fsdp_config.fsdp_version"].effective


def test_accelerate_context_parallel(tmp_path: Path) -> None:
    """FSDP shards over dp_shard x cp ranks."""
    raw = {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {
            "parallelism_config_cp_size": 4,
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": 1,
        },
    }
    keys = ("sharding.shard_size", "sharding.replicate_size", "parallel.cp")
    assert values(effective(tmp_path, "accelerate", raw), *keys) == [4, 2, 4]


@pytest.mark.parametrize(("version", "clip"), [("0.19.2", 0.0), ("0.19.3", 1.0)])
def test_deepspeed_clipping_default(version: str, clip: float, tmp_path: Path) -> None:
    """Clipping became a default in 0.19.3."""
    config = effective(tmp_path, "deepspeed", {"zero_optimization": {}}, deepspeed=version)
    assert values(config, "optimizer.grad_clip") == [clip]


def test_deepspeed_units_and_auto() -> None:
    """Elements become bytes; ``auto`` follows the hidden size by the Trainer's rules."""
    path = FIXTURES / "deepspeed_template.json"
    open_ended = load_config(path).config
    assert values(open_ended, "comm.bucket_bytes", "sharding.persist_threshold") == ["auto"] * 2
    config = load_config(path, (), None, {}, Known(hidden=1000)).config
    keys = ("comm.bucket_bytes", "comm.prefetch_bucket_bytes", "sharding.persist_threshold")
    assert values(config, *keys) == [2_000_000, 1_800_000, 10_000]


def test_deepspeed_text_numbers_and_old_names(tmp_path: Path) -> None:
    """``"5e8"`` is a number, ``cpu_offload`` still offloads, stage-3 keys are inert below it."""
    zero = {
        "stage": 2,
        "reduce_bucket_size": "5e8",
        "cpu_offload": True,
        "stage3_max_live_parameters": 1,
        "offload_param": {"device": "cpu"},
    }
    raw = {"zero_optimization": zero, "fp16": {"enabled": True}}
    config = effective(tmp_path, "deepspeed", raw)
    assert values(config, "comm.bucket_bytes", "offload.optimizer") == [10**9, "cpu"]
    assert not config.fields["offload.params"].effective
    assert not config.fields["zero_optimization.stage3_max_live_parameters"].effective


def test_axolotl_drops_what_its_schema_lacks() -> None:
    """``sharding_strategy`` reaches nobody; bf16 is mixed precision over float32."""
    config = load_config(FIXTURES / "axolotl.yaml").config
    keys = ("sharding.impl", "sharding.reshard_after_forward", "precision.param_storage")
    assert values(config, *keys) == ["fsdp2", False, "float32"]
    dropped = config.fields["fsdp_config.sharding_strategy"]
    assert (dropped.effective, config.unknown) == (False, ("fsdp_config.sharding_strategy",))


def test_llama_factory_generations() -> None:
    """v0 is the Trainer's, v1 shards by itself."""
    old = load_config(FIXTURES / "llama_factory_v0.yaml").config
    assert values(old, "sharding.impl", "batch.seq_len") == ["fsdp2", 1024]
    new = load_config(FIXTURES / "llama_factory_v1.yaml").config
    keys = ("sharding.impl", "sharding.reshard_after_forward", "offload.params")
    assert values(new, *keys) == ["fsdp2", True, "cpu"]


def test_torchtitan_defaults(tmp_path: Path) -> None:
    """An empty table still shards, recomputes and computes in bf16 over float32."""
    config = effective(tmp_path, "torchtitan", {"training": {"seq_len": 512}})
    keys = (
        "sharding.impl", "recompute.mode", "recompute.granularity", "precision.compute",
        "precision.reduce", "comm.grad_sync", "batch.micro",
    )  # fmt: skip
    assert values(config, *keys) == [
        "fsdp2", "selective", 2, "bfloat16", "float32", "every_microbatch", 8,
    ]  # fmt: skip


def test_torchtitan_pipeline_and_replication(tmp_path: Path) -> None:
    """With a pipeline units stay gathered; shard degree 1 with replicas is DDP."""
    raw = {"training": {}, "parallelism": {"pipeline_parallel_degree": 2}}
    config = effective(tmp_path, "torchtitan", raw)
    assert values(config, "sharding.reshard_after_forward") == [False]
    raw["parallelism"] = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 4}
    config = effective(tmp_path, "torchtitan", raw)
    assert values(config, "sharding.impl", "precision.compute") == ["ddp", None]


def test_torchtune_is_pure_bf16() -> None:
    """``dtype: bf16`` has no float32 copy; the root is never resharded."""
    config = load_config(FIXTURES / "torchtune.yaml").config
    keys = (
        "precision.param_storage", "precision.optim_states",
        "sharding.reshard_after_forward[root]", "recompute.mode", "optimizer.fused",
    )  # fmt: skip
    assert values(config, *keys) == ["bfloat16", "bfloat16", False, "full", True]


def test_composer_defaults_and_pure() -> None:
    """PURE reduces as it computes; backward prefetch is POST unless written."""
    config = load_config(FIXTURES / "composer.yaml").config
    keys = (
        "sharding.reshard_after_forward", "precision.reduce", "comm.prefetch_bwd", "batch.micro",
    )  # fmt: skip
    assert values(config, *keys) == [False, "bfloat16", "post", "auto"]


def test_verl_fsdp_size_makes_a_hybrid(tmp_path: Path) -> None:
    """``fsdp_size`` shards within that many ranks; FSDP1 false is SHARD_GRAD_OP."""
    raw = {"fsdp_size": 8, "param_offload": False, "reshard_after_forward": False}
    config = effective(tmp_path, "verl", raw)
    keys = ("sharding.impl", "sharding.shard_size", "sharding.reshard_after_forward")
    assert values(config, *keys) == ["fsdp1", 8, False]


def test_prime_rl_offloads_and_recomputes_unless_told_otherwise(tmp_path: Path) -> None:
    """An empty model table offloads the optimizer and activations, recomputes and compiles."""
    config = effective(tmp_path, "prime_rl", {"model": {"name": "x"}, "max_steps": 1})
    keys = (
        "offload.optimizer", "offload.params", "offload.activations", "recompute.mode",
        "compile.enabled",
    )  # fmt: skip
    assert values(config, *keys) == ["cpu", "none", "cpu", "full", True]


def test_lightning_strategy_and_precision() -> None:
    """HYBRID over two nodes of four; mixed precision keeps float32 storage."""
    config = load_config(FIXTURES / "lightning.yaml").config
    keys = (
        "sharding.impl", "sharding.replicate_size", "sharding.shard_size", "precision.compute",
        "precision.param_storage", "recompute.mode", "recompute.granularity",
    )  # fmt: skip
    assert values(config, *keys) == [
        "fsdp1", 2, 4, "bfloat16", "float32", "full", ["TinyLayer"],
    ]  # fmt: skip
    assert config.version == "2.6.6"


def test_lightning_mixed_precision_before_2_6(tmp_path: Path) -> None:
    """Until 2.6 FSDP gathered in float32 under mixed precision, with autocast around."""
    raw = {"trainer": {"strategy": "fsdp", "precision": "bf16-mixed", "devices": 2}}
    config = effective(tmp_path, "lightning", raw, lightning="2.5.6")
    keys = ("precision.compute", "precision.autocast", "precision.reduce")
    assert values(config, *keys) == ["float32", "bfloat16", "bfloat16"]


@pytest.mark.parametrize(
    ("word", "strategy", "optimizer", "params"),
    [
        ("deepspeed_stage_1", "optim", "none", None),
        ("deepspeed_stage_2_offload", "optim_grads", "cpu", None),
        ("deepspeed_stage_3_offload", "optim_grads_params", "cpu", "cpu"),
        ("deepspeed_stage_3_offload_nvme", "optim_grads_params", "nvme", "nvme"),
    ],
)
def test_lightning_deepspeed_words(
    word: str, strategy: str, optimizer: str, params: str | None, tmp_path: Path
) -> None:
    """A strategy string is a stage and where its states are."""
    raw = {"trainer": {"strategy": word, "devices": 2, "max_steps": 1}}
    keys = ("sharding.strategy", "offload.optimizer", "offload.params")
    assert values(effective(tmp_path, "lightning", raw), *keys) == [strategy, optimizer, params]


def test_olmo_and_gpt_neox() -> None:
    """No wrapping strategy is one unit; gpt-neox reads hyphens, and reduces in float32 if told."""
    config = load_config(FIXTURES / "olmo.yaml").config
    assert values(config, "sharding.unit", "precision.reduce") == ["whole", "float32"]
    config = load_config(FIXTURES / "gpt_neox.yml").config
    keys = ("parallel.tp", "sharding.strategy", "precision.compute", "precision.reduce")
    assert values(config, *keys) == [2, "optim", "bfloat16", "float32"]
    assert config.fields["comm.bucket_bytes"].value == 2_000_000
