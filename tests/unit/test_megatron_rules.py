"""What Megatron-LM forces, ignores and derives, by version."""

from __future__ import annotations

import pytest
from megatron_cases import changed, compare, effective, fixture, inert

from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.loaders import megatron_args, megatron_shell
from fsdp_doctor.config.loaders.megatron_flags import flag_table, parse_version
from fsdp_doctor.config.megatron_sizes import model_sizes_from_megatron
from fsdp_doctor.model.config import EffectiveConfig

BASE = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --bf16"


def resolved(flags: str, version: str = "0.19.0") -> EffectiveConfig:
    """Return the effective config of the base command with more flags."""
    return effective(megatron_shell, f"{BASE} {flags}", version)


def values(config: EffectiveConfig, *keys: str) -> tuple[object, ...]:
    """Return the values of some fields."""
    return tuple(config.fields[key].value for key in keys)


def dump(**arguments: object) -> str:
    """Return an argument dump."""
    lines = [
        f"  {name} {'.' * max(1, 48 - len(name))} {value}" for name, value in arguments.items()
    ]
    return "\n".join(["---- arguments ----", *lines, "---- end of arguments ----", ""])


def test_distributed_optimizer_to_megatron_fsdp() -> None:
    """P01: engine, strategy, buffers, checkpoint format, set-up and environment change."""
    diff = compare(megatron_shell, fixture("distopt.sh"), fixture("mfsdp.sh"), "0.19.0")
    found = changed(diff)
    assert found["sharding.impl"] == ("megatron_distopt", "megatron_fsdp")
    assert found["sharding.strategy"] == ("optim", "optim_grads_params")
    assert found["comm.user_buffers"] == (False, True)
    assert found["comm.double_buffer"] == (False, True)
    assert found["megatron.gradient_accumulation_fusion"] == (True, False)
    assert found["env.cuda_device_max_connections"] == (1, None)
    assert found["ckpt.format"] == ("torch_dist", "fsdp_dtensor")
    assert found["init.meta_device"] == (False, True)
    assert "precision.grad" not in found  # bf16 on both sides, by other keys
    assert "sequence_parallel" in inert(diff, "both")
    redundant = {"use_distributed_optimizer", "fsdp_double_buffer", "fsdp_manual_registration"}
    assert redundant <= inert(diff, "b")
    assert not diff.unknown


def test_sequence_parallel_without_tensor_parallel_is_inert() -> None:
    """P04: with one tensor-parallel rank the flag changes nothing."""
    diff = compare(megatron_shell, BASE, f"{BASE} --sequence-parallel")
    assert changed(diff) == {}
    assert inert(diff, "b") == {"sequence_parallel"}


def test_strategy_is_inert_without_megatron_fsdp() -> None:
    """P06: two dumps whose only difference is the strategy's default differ in nothing."""
    arguments = {"bf16": True, "num_layers": 4, "use_megatron_fsdp": False}
    diff = compare(
        megatron_args,
        dump(**arguments, data_parallel_sharding_strategy="no_shard"),
        dump(**arguments, data_parallel_sharding_strategy="optim_grads_params"),
        "0.18.0",
    )
    assert changed(diff) == {}
    assert not diff.unknown
    field = diff.b.fields["data_parallel_sharding_strategy"]
    assert not field.effective
    assert "use_megatron_fsdp" in (field.reason or "")


@pytest.mark.parametrize(
    ("version", "strategy"), [("0.17.0", "none"), ("0.18.0", "optim_grads_params")]
)
def test_default_strategy_by_version(version: str, strategy: str) -> None:
    """The command line's default became optim_grads_params in 0.18."""
    config = resolved("--use-megatron-fsdp", version)
    assert values(config, "sharding.impl", "sharding.strategy") == ("megatron_fsdp", strategy)


@pytest.mark.parametrize(
    ("version", "dtype"), [("0.16.0", "float32"), ("0.18.0", "float32"), ("0.19.0", "bfloat16")]
)
def test_gradient_dtype_of_megatron_fsdp_by_version(version: str, dtype: str) -> None:
    """From 0.19 on the float32 accumulation flag is not read by Megatron-FSDP."""
    flags = "--use-megatron-fsdp --accumulate-allreduce-grads-in-fp32"
    config = resolved(flags, version)
    assert values(config, "precision.grad") == (dtype,)
    ignored = config.fields.get("accumulate_allreduce_grads_in_fp32")
    assert (ignored is not None and not ignored.effective) == (version == "0.19.0")


def test_bf16_sums_gradients_in_float32() -> None:
    """bf16 alone turns float32 accumulation on; --grad-reduce-in-bf16 leaves it off."""
    assert values(resolved(""), "precision.grad", "precision.reduce") == ("float32", "float32")
    assert values(resolved("--grad-reduce-in-bf16"), "precision.grad") == ("bfloat16",)
    diff = compare(megatron_shell, BASE, f"{BASE} --accumulate-allreduce-grads-in-fp32")
    assert changed(diff) == {}


def test_megatron_fsdp_forces_overlap_and_its_optimizer() -> None:
    """optim_grads_params turns both overlaps on; the distributed optimizer is set since 0.18."""
    config = resolved("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params")
    assert values(config, "comm.overlap_grad_reduce", "comm.overlap_param_gather") == (True, True)
    assert config.fields["comm.overlap_param_gather"].source == "derived"
    assert values(config, "comm.grad_sync") == ("every_microbatch",)


def test_nccl_user_buffers_force_double_buffers() -> None:
    """--use-nccl-ub brings double buffers, and manual registration since 0.18."""
    flags = "--use-megatron-fsdp --use-nccl-ub"
    assert values(resolved(flags), "comm.double_buffer", "comm.manual_registration") == (True, True)
    older = resolved(flags, "0.18.0")
    assert values(older, "comm.double_buffer", "comm.manual_registration") == (True, True)


def test_moment_dtypes_need_the_precision_aware_optimizer() -> None:
    """Dtypes of moments do nothing unless the optimizer is precision-aware."""
    diff = compare(megatron_shell, BASE, f"{BASE} --exp-avg-dtype bf16")
    assert changed(diff) == {}
    assert inert(diff, "b") == {"exp_avg_dtype"}
    aware = resolved("--use-precision-aware-optimizer --exp-avg-dtype bf16")
    assert values(aware, "precision.optim_states") == ("bfloat16",)


def test_offload_fraction_needs_offload() -> None:
    """The fraction is inert while optimizer offload is off."""
    diff = compare(megatron_shell, BASE, f"{BASE} --optimizer-offload-fraction 0.5")
    assert changed(diff) == {}
    assert "offload.optimizer_fraction" in inert(diff, "b")


def test_recompute_alias_and_its_companions() -> None:
    """--recompute-activations is granularity selective; method and layers are for full only."""
    diff = compare(
        megatron_shell,
        f"{BASE} --recompute-activations",
        f"{BASE} --recompute-granularity selective --recompute-method uniform",
    )
    assert changed(diff) == {}
    assert inert(diff, "b") == {"recompute.method"}


def test_buckets_are_bytes_and_need_overlap() -> None:
    """--ddp-bucket-size counts elements; without overlap there is one bucket."""
    flags = "--ddp-bucket-size 1000000 --overlap-grad-reduce"
    assert values(resolved(flags), "comm.bucket_bytes") == (4_000_000,)
    assert values(resolved("--overlap-grad-reduce"), "comm.bucket_bytes") == (160_000_000,)
    off = resolved("--ddp-bucket-size 1000000")
    assert values(off, "comm.bucket_bytes") == (None,)
    assert not off.fields["ddp_bucket_size"].effective


def test_derived_sizes() -> None:
    """Data-parallel size, accumulation and shard group follow from the sizes given."""
    config = resolved(
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 2"
        " --global-batch-size 16 --use-distributed-optimizer"
    )
    keys = ("world.size", "parallel.dp", "batch.accumulation", "sharding.shard_size")
    assert values(config, *keys) == (8, 2, 4, 4)


def test_torch_fsdp2() -> None:
    """Torch FSDP2 divides all three, keeps gradients in the computed dtype, and can keep units."""
    config = resolved("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward")
    keys = ("sharding.impl", "sharding.strategy", "sharding.reshard_after_forward")
    assert values(config, *keys) == ("mcore_torch_fsdp2", "optim_grads_params", False)
    assert values(config, "precision.grad") == ("bfloat16",)


def test_deepspeed_fork_in_a_dump() -> None:
    """P07: in a Megatron-DeepSpeed dump the engine and the recomputation follow their switches."""
    common = {"fp16": True, "world_size": 64, "zero_stage": 1}
    diff = compare(
        megatron_args,
        dump(**common, deepspeed=False, deepspeed_activation_checkpointing=False),
        dump(**common, deepspeed=True, deepspeed_activation_checkpointing=True),
    )
    found = changed(diff)
    assert found["sharding.impl"] == ("megatron_ddp", "deepspeed")
    assert found["recompute.impl"] == ("megatron", "deepspeed")
    assert not diff.a.fields["zero_stage"].effective


def test_assumed_version_says_what_others_would_change() -> None:
    """Without a version the newest rules hold, and the field that others change is named."""
    config = effective(megatron_shell, f"{BASE} --use-megatron-fsdp")
    assert config.assumed is not None
    assert "0.19.0" in config.assumed
    assert "sharding.strategy" in config.assumed or "differ" in config.assumed


def test_paths_and_logging_only_look_changed() -> None:
    """Output paths, logging and schedules are cosmetic."""
    diff = compare(
        megatron_shell,
        f"{BASE} --save /a --log-interval 1 --lr 1e-4",
        f"{BASE} --save /b --log-interval 10 --lr 2e-4 --wandb-project x",
    )
    assert changed(diff) == {}
    assert not diff.unknown
    assert {"save", "log_interval"} <= {change.key for change in diff.cosmetic}


def test_model_sizes_of_a_known_shape() -> None:
    """Parameters are counted from the arguments: embedding, head, attention, gated MLP, norms."""
    config = effective(megatron_shell, fixture("distopt.sh"))
    sizes = model_sizes_from_megatron(config.fields)
    assert sizes is not None
    attention = 2 * 2048 * (2048 + 8 * 64)
    layer = attention + 3 * 2048 * 8192 + 2 * 2048
    assert sizes.parameters == 2 * 32000 * 2048 + 16 * layer
    assert sizes.parameter_bytes == 2 * sizes.parameters
    assert len(sizes.unit_parameters) == 17
    assert sum(sizes.unit_parameters) == sizes.parameters


def test_sizes_need_a_vocabulary() -> None:
    """Without a vocabulary nothing is guessed."""
    assert model_sizes_from_megatron(resolved("").fields) is None


def whole_dump(version: str) -> str:
    """Return the dump of a job that leaves every argument of a version at its default."""
    numbers = parse_version(version)
    known = {name: flag for name, flag in flag_table().items() if flag.known(numbers)}
    return dump(**{name: flag.default(numbers) for name, flag in known.items()})


def test_two_versions_of_one_job() -> None:
    """Whole dumps of two versions tell both, and what is new there only looks changed."""
    diff = compare(megatron_args, whole_dump("0.17.0"), whole_dump("0.18.0"))
    assert (diff.a.version, diff.b.version) == ("0.17.0", "0.18.0")
    assert changed(diff) == {}
    cosmetic = {change.key for change in diff.cosmetic}
    assert "moe_paged_stash_page_size" in cosmetic
    unknown = {change.key for change in diff.unknown}
    assert unknown == {"enable_msc", "inference_grouped_gemm_backend", "moe_hybridep_num_sms"}


def test_a_script_against_its_dump() -> None:
    """A command line and the dump of the job that it starts differ in nothing."""
    flags = "--micro-batch-size 2 --global-batch-size 16 --num-attention-heads 4 --vocab-size 32000"
    numbers = parse_version("0.18.0")
    known = {name: flag for name, flag in flag_table().items() if flag.known(numbers)}
    arguments = {name: flag.default(numbers) for name, flag in known.items()}
    arguments |= {"num_layers": 4, "hidden_size": 256, "bf16": True, "num_attention_heads": 4}
    arguments |= {"micro_batch_size": 2, "global_batch_size": 16, "vocab_size": 32000}
    arguments |= {"accumulate_allreduce_grads_in_fp32": True, "ffn_hidden_size": 1024}
    arguments |= {"kv_channels": 64, "world_size": 8, "align_param_gather": False}
    arguments |= {"overlap_p2p_comm": False, "padded_vocab_size": 32000, "rank": 0}
    a = effective(megatron_shell, f"{BASE} {flags}", "0.18.0")
    b = effective(megatron_args, dump(**arguments))
    diff = diff_configs(a, b)
    assert changed(diff) == {}
    assert not diff.unknown
