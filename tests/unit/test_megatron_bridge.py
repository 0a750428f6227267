"""Megatron-Bridge: dumps, overrides, the launcher, and the layers that overwrite."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_cases import changed, compare, effective, fixture, inert, source

from fsdp_doctor.config.load import load_config
from fsdp_doctor.config.loaders import megatron_bridge
from fsdp_doctor.config.loaders.base import Source

RECIPE = "model.tensor_model_parallel_size=1\n"


def test_the_dump_is_read_without_calling_anything() -> None:
    """``_target_`` mappings that name a dtype, function or enum member are one text each."""
    native = megatron_bridge.load(fixture("bridge_run_config.yaml"))
    values = {name: field.value for name, field in native.fields.items()}
    assert values["mixed_precision.params_dtype"] == "bfloat16"
    assert values["model.activation_func"] == "nn.functional.silu"
    assert values["model.attention_backend"] == "auto"
    assert values["model._target_"].endswith("Llama3ModelProvider")
    assert native.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def test_the_dump_resolves_to_the_distributed_optimizer() -> None:
    """The plain recipe is a distributed optimizer over float32 gradients."""
    fields = effective(megatron_bridge, fixture("bridge_run_config.yaml"), "0.6.0").fields
    assert fields["sharding.impl"].value == "megatron_distopt"
    assert fields["precision.grad"].value == "float32"
    assert fields["model.tied_embeddings"].value is True
    assert fields["batch.seq_len"].value == 4096
    assert not fields["ddp.data_parallel_sharding_strategy"].effective


@pytest.mark.parametrize("switch", ["dist.use_megatron_fsdp=true", "ddp.use_megatron_fsdp=true"])
def test_either_switch_turns_megatron_fsdp_on(switch: str) -> None:
    """Dist and ddp have the same switch; the base recipe's strategy then acts."""
    diff = compare(megatron_bridge, RECIPE, RECIPE + switch + "\n")
    found = changed(diff)
    assert found["sharding.impl"] == ("megatron_distopt", "megatron_fsdp")
    assert found["sharding.strategy"] == ("optim", "optim_grads_params")
    reason = diff.b.fields["comm.average_in_collective"]
    assert (reason.value, reason.source) == (False, "derived")


def test_both_switches_are_one_setting() -> None:
    """Turning the switch on in the other section as well changes nothing more."""
    one = RECIPE + "dist.use_megatron_fsdp=true\n"
    assert changed(compare(megatron_bridge, one, one + "ddp.use_megatron_fsdp=true\n")) == {}


def test_the_strategy_acts_with_megatron_fsdp_only() -> None:
    """ddp.data_parallel_sharding_strategy is inert on a plain recipe and acts on an FSDP one."""
    override = "ddp.data_parallel_sharding_strategy=optim\n"
    diff = compare(megatron_bridge, RECIPE, RECIPE + override)
    assert changed(diff) == {}
    assert inert(diff, "b") == {"ddp.data_parallel_sharding_strategy"}
    fsdp = RECIPE + "dist.use_megatron_fsdp=true\n"
    found = changed(compare(megatron_bridge, fsdp, fsdp + override))
    assert found["sharding.strategy"] == ("optim_grads_params", "optim")


def test_average_in_collective_is_switched_off_by_megatron_fsdp() -> None:
    """The override acts on a plain recipe and is overwritten under Megatron-FSDP."""
    override = "ddp.average_in_collective=false\n"
    found = changed(compare(megatron_bridge, RECIPE, RECIPE + override))
    assert found["comm.average_in_collective"] == (True, False)
    fsdp = RECIPE + "ddp.use_megatron_fsdp=true\n"
    diff = compare(megatron_bridge, fsdp, fsdp + "ddp.average_in_collective=true\n")
    assert changed(diff) == {}
    assert "ddp.average_in_collective" in inert(diff, "b")


def test_checkpoint_format_override() -> None:
    """checkpoint.ckpt_format comes out as the format of checkpoints."""
    found = changed(
        compare(megatron_bridge, RECIPE, RECIPE + "checkpoint.ckpt_format=fsdp_dtensor\n")
    )
    assert found == {"ckpt.format": ("torch_dist", "fsdp_dtensor")}


def test_the_performance_launcher() -> None:
    """``--use_megatron_fsdp true`` sets engine, strategy, meta device; others come with it."""
    base = "python scripts/performance/run_script.py -m llama -mr llama3_8b -ng 8 -c bf16 -mb 1"
    diff = compare(megatron_bridge, base, f"{base} --use_megatron_fsdp true\n")
    found = changed(diff)
    assert found["sharding.impl"] == ("megatron_distopt", "megatron_fsdp")
    assert found["sharding.strategy"] == ("optim", "optim_grads_params")
    assert found["init.meta_device"] == (False, True)
    assert found["comm.average_in_collective"] == (True, False)
    assert diff.b.fields["world.size"].value == 8
    assert diff.b.fields["batch.micro"].value == 1


def test_launcher_flags_in_all_spellings() -> None:
    """Short flags, ``=`` and Hydra overrides behind them are read from one command."""
    text = (
        "torchrun --nproc_per_node=8 scripts/performance/run_script.py -mr llama3_8b "
        "--compute_dtype=fp8_mx -tp 2 --recompute_modules core_attn,mlp ddp.nccl_ub=true\n"
    )
    fields = effective(megatron_bridge, text).fields
    assert fields["precision.fp8_recipe"].value == "mxfp8"
    assert fields["parallel.tp"].value == 2
    assert fields["parallel.sp"].value is True
    assert fields["recompute.modules"].value == ["core_attn", "mlp"]
    assert fields["comm.user_buffers"].value is True


def test_comm_overlap_overwrites_ddp() -> None:
    """P09: with comm_overlap set, bucket size and overlap of ddp are overwritten."""
    base = RECIPE + "comm_overlap.tp_comm_overlap=true\n"
    edits = "ddp.bucket_size=1000\nddp.overlap_grad_reduce=false\nddp.align_param_gather=true\n"
    diff = compare(megatron_bridge, base, base + edits)
    assert changed(diff) == {}
    expected = {"ddp.bucket_size", "ddp.overlap_grad_reduce", "ddp.align_param_gather"}
    assert inert(diff, "b") == expected
    assert diff.b.fields["comm.bucket_bytes"].value == 128 * 1024 * 1024 * 4


def test_mixed_precision_overwrites_ddp() -> None:
    """ddp.grad_reduce_in_fp32 is overwritten by mixed_precision, given as name or as object."""
    named = RECIPE + "mixed_precision=bf16_mixed\n"
    diff = compare(megatron_bridge, named, named + "ddp.grad_reduce_in_fp32=false\n")
    assert changed(diff) == {}
    assert inert(diff, "b") == {"ddp.grad_reduce_in_fp32"}
    low = RECIPE + "mixed_precision.grad_reduce_in_fp32=false\n"
    assert changed(compare(megatron_bridge, RECIPE, low))["precision.grad"] == (
        "float32",
        "bfloat16",
    )


@pytest.mark.parametrize("version", ["0.2.0", "0.3.1", "0.6.0"])
def test_gradient_accumulation_fusion_by_version(version: str) -> None:
    """Bridge 0.2 and 0.3 switch the fusion off under Megatron-FSDP, later ones do not."""
    text = "ddp.use_megatron_fsdp=true\nmodel.gradient_accumulation_fusion=true\n"
    config = effective(megatron_bridge, text, version)
    field = config.fields["megatron.gradient_accumulation_fusion"]
    assert field.value is (version == "0.6.0")


def test_unknown_fields_are_named() -> None:
    """A field that a section does not have, and a section that there is not, are unknown."""
    text = "ddp.no_such_field=1\ndist.use_megatron_fsdp=true\nmodel.own_field=2\n"
    native = megatron_bridge.load(source(text))
    assert native.unknown == ("ddp.no_such_field",)


def test_yaml_overrides_and_their_lines() -> None:
    """YAML overrides on a recipe are the same keys, with the line of each."""
    text = "train:\n  micro_batch_size: 2\nddp:\n  use_megatron_fsdp: true\n"
    given = Source(path=fixture("dump.log").path.with_name("o.yaml"), text=text)
    assert megatron_bridge.detect(given) >= 60
    native = megatron_bridge.load(given)
    assert native.fields["ddp.use_megatron_fsdp"].line == 4
    assert effective(megatron_bridge, given).fields["batch.micro"].value == 2


def test_the_summary_in_a_log() -> None:
    """The start-up summary names what differs from Megatron-Core; the rest is its default."""
    text = (
        "0: ======\n0: Configuration Summary (Non-Default Values vs Megatron Core)\n0: ======\n"
        "0: [ddp] Non-default values (vs Mcore DistributedDataParallelConfig):\n"
        "0:   overlap_grad_reduce: True  (Mcore default: False)\n"
        "0:   use_distributed_optimizer: True  (Mcore default: False)\n"
        "0: [model] Non-default values (vs Mcore TransformerConfig):\n"
        "0:   num_layers: 32  (Mcore default: 0)\n"
        "0:   params_dtype: torch.bfloat16  (Mcore default: torch.float32)\n"
        "0: Other Configuration Values:\n0: [train]:\n0:   global_batch_size: 128\n"
        "0: [checkpoint]:\n0:   ckpt_format: 'torch_dist'\n"
    )
    given = source(text, "log.txt")
    assert megatron_bridge.detect(given) == 95
    native = megatron_bridge.load(given)
    assert native.fields["ddp.overlap_grad_reduce"].value is True
    assert native.fields["model.params_dtype"].value == "bfloat16"
    fields = effective(megatron_bridge, given).fields
    assert fields["batch.global"].value == 128
    assert fields["ckpt.format"].value == "torch_dist"
    assert fields["comm.average_in_collective"].value is False
    assert fields["comm.overlap_param_gather"].value is False


def test_the_configuration_block_in_a_log() -> None:
    """The whole configuration, printed between rules in a log, is read as the file is."""
    yaml_text = fixture("bridge_run_config.yaml").text
    log = f"starting\n------- Task Configuration -------\n{yaml_text}-----------------\nmore: [\n"
    native = megatron_bridge.load(source(log, "log.txt"))
    assert native.fields["train.global_batch_size"].value == 64


def test_overrides_on_a_dump(tmp_path: Path) -> None:
    """Overrides given on this tool's command line act on a dump as Bridge's own would."""
    path = tmp_path / "run_config.yaml"
    path.write_text(fixture("bridge_run_config.yaml").text)
    overrides = ("dist.use_megatron_fsdp=true", "checkpoint.ckpt_format=fsdp_dtensor")
    fields = load_config(path, overrides).config.fields
    assert fields["sharding.impl"].value == "megatron_fsdp"
    assert fields["sharding.strategy"].value == "none"
    assert fields["ckpt.format"].value == "fsdp_dtensor"
    assert fields["comm.average_in_collective"].value is False
