"""Pairs of configs with known differences: what changed, what only looks so, what is inert."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.cli import main

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"
REAL = Path(__file__).parents[2].parent / "shared" / "configs"
ALIASES = {
    "prefetch.backward": "comm.prefetch_bwd",
    "prefetch.forward": "comm.prefetch_fwd",
    "comm.bucket_elems": "comm.bucket_bytes",
    "prefetch.elems": "comm.prefetch_bucket_bytes",
    "sharding.persist_threshold_elems": "sharding.persist_threshold",
}
"""Expected key -> the canonical one."""
REASONS = {
    ("P22", "comm.prefetch_bwd"): "FSDP2 gathers ahead as BACKWARD_PRE does: listed as cosmetic",
}
"""Misses that are right, and why."""


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Return what ``diff --json`` prints."""
    assert main(["diff", *map(str, arguments), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def changed(result: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the changed keys with their values."""
    return {c["key"]: (c["a"]["value"], c["b"]["value"]) for c in result["changed"]}


def inert(result: dict[str, Any]) -> set[str]:
    """Return the keys without effect."""
    return {field["key"] for field in result["inert"]}


def real_pairs() -> list[dict[str, Any]]:
    """Return the pairs of two real files."""
    listed = REAL / "pairs.json"
    if not listed.is_file():
        return []
    pairs = json.loads(listed.read_text())
    return [p for p in pairs if all((REAL / p[side]).is_file() for side in ("a", "b"))]


@pytest.mark.skipif(not real_pairs(), reason="the real configs are not on this machine")
def test_real_pairs_change_what_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    """Every expected key changes, but for those that are argued above; the table is printed."""
    rows, unexplained = [], []
    for pair in real_pairs():
        found = set(changed(diff(capsys, REAL / pair["a"], REAL / pair["b"])))
        expected = {ALIASES.get(key, key) for key, _, _ in pair["expect"]["changed"]}
        missed = {k for k in expected if k not in found and not (k == "model" and _model(found))}
        for key in sorted(missed):
            reason = REASONS.get((pair["id"], key))
            rows.append(f"{pair['id']} {key}: {reason or 'UNEXPLAINED'}")
            if reason is None:
                unexplained.append((pair["id"], key))
        assert bool(found) == bool(expected), pair["id"]
    sys.stdout.write("\n".join(["misses:", *rows, ""]))
    assert unexplained == []


def _model(found: set[str]) -> bool:
    return any(key.startswith("model.") for key in found)


def test_a_reshard_key_under_fsdp1_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """P21: accelerate's FSDP1 runs FULL_SHARD whatever ``fsdp_reshard_after_forward`` says."""
    a = FIXTURES / "accelerate_fsdp1.yaml"
    option = "fsdp_config.fsdp_reshard_after_forward=SHARD_GRAD_OP"
    result = diff(capsys, a, a, "--set-b", option)
    assert (changed(result), result["unknown"]) == ({}, [])
    assert "fsdp_config.fsdp_reshard_after_forward" in inert(result)


def test_fsdp1_to_fsdp2(capsys: pytest.CaptureFixture[str]) -> None:
    """P22: the engine, its parameter layout and some defaults change, the strategy not."""
    a, b = FIXTURES / "accelerate_fsdp1.yaml", FIXTURES / "accelerate_fsdp2.yaml"
    assert changed(diff(capsys, a, b)) == {
        "sharding.impl": ("fsdp1", "fsdp2"),
        "comm.prefetch_fwd": (True, None),
        "sharding.flat_params": ("flat_with_views", "per_parameter"),
        "ckpt.state_dict": ("full", "sharded"),
    }


def test_unknown_keys_can_be_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """P25: keys that the launcher drops change nothing when they go."""
    a = FIXTURES / "accelerate_unknown_keys.json"
    raw = json.loads(a.read_text())
    del raw["fsdp_config"]["fsdp_transformer_cls_names_to_wrap"]
    del raw["fsdp_config"]["fsdp_limit_all_gathers"]
    b = tmp_path / "b.json"
    b.write_text(json.dumps(raw))
    result = diff(capsys, a, b)
    assert (changed(result), result["unknown"]) == ({}, [])
    assert inert(result) == {
        "fsdp_config.fsdp_transformer_cls_names_to_wrap",
        "fsdp_config.fsdp_limit_all_gathers",
    }


def test_a_transformers_upgrade_changes_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """P26: from 5.9 to 5.10 the same arguments run FSDP2, which ignores what FSDP1 reads."""
    a = FIXTURES / "hf_trainer.json"
    versions = ("--framework-version", "transformers=5.9", "--to", "transformers=5.10.1")
    result = diff(capsys, a, a, *versions)
    found = changed(result)
    assert found["sharding.impl"] == ("fsdp1", "fsdp2")
    assert (result["a"]["version"], result["b"]["version"]) == ("5.9", "5.10.1")
    assert {"fsdp_config.backward_prefetch", "fsdp_config.use_orig_params"} <= inert(result)


@pytest.mark.parametrize(
    "option", ["fsdp_config.offload_params=true", "fsdp_config.sharding_strategy=SHARD_GRAD_OP"]
)
def test_keys_that_the_trainer_never_reads(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """P28: ``offload_params`` and ``sharding_strategy`` are not the Trainer's keys."""
    a = FIXTURES / "hf_trainer.json"
    result = diff(capsys, a, a, "--set-b", option)
    assert (changed(result), result["unknown"]) == ({}, [])
    assert option.partition("=")[0] in inert(result)


def test_accumulation_hides_a_change_of_synchronisation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """P29: with several microbatches the Trainer leaves whole gradients on each rank."""
    a = FIXTURES / "hf_trainer.json"
    result = diff(capsys, a, a, "--set-a", "gradient_accumulation_steps=1", "--params", "1B")
    assert changed(result) == {
        "batch.accumulation": (1, 8),
        "comm.grad_sync": ("every_microbatch", "last_microbatch"),
    }
    effects = [e for c in result["changed"] for e in c["effects"]]
    kept = [e for e in effects if e["category"] == "unsharded_gradients"]
    assert 2_000_000_000 in {e["bytes"] for e in kept}


def test_only_true_values_are_exported(capsys: pytest.CaptureFixture[str]) -> None:
    """P32: on transformers 4 ``reshard_after_forward: false`` never leaves axolotl."""
    a = FIXTURES / "axolotl.yaml"
    edit = ("--set-a", "fsdp_config.reshard_after_forward=true")
    old = diff(capsys, a, a, *edit, "--framework-version", "axolotl=0.13")
    assert changed(old) == {}
    assert "fsdp_config.reshard_after_forward" in inert(old)
    new = diff(capsys, a, a, *edit, "--framework-version", "axolotl=0.17")
    assert changed(new) == {"sharding.reshard_after_forward": (True, False)}
    by_transformers = ("--framework-version", "transformers=4.57.1")
    assert changed(diff(capsys, a, a, *edit, *by_transformers)) == {}


def test_secondary_partition_is_for_stage_three(capsys: pytest.CaptureFixture[str]) -> None:
    """P35: ``zero_hpz_partition_size`` acts at stage 3 and nowhere else."""
    option = "zero_optimization.zero_hpz_partition_size=8"
    template, two = FIXTURES / "deepspeed_template.json", FIXTURES / "deepspeed_z2.json"
    result = diff(capsys, template, template, "--set-b", option)
    assert changed(result) == {"sharding.secondary_partition": (1, 8)}
    result = diff(capsys, two, two, "--set-b", option)
    assert changed(result) == {}
    assert "sharding.secondary_partition" in inert(result)


def test_a_deepspeed_upgrade_changes_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """P36: clipping, overflow check and pinned memory changed between 0.19.2 and 0.19.5."""
    a = FIXTURES / "deepspeed_z2.json"
    edit = [f"--set-{s}=zero_optimization.offload_optimizer.device=cpu" for s in "ab"]
    versions = ("--framework-version", "deepspeed=0.19.2", "--to", "deepspeed=0.19.5")
    assert changed(diff(capsys, a, a, *edit, *versions)) == {
        "optimizer.grad_clip": (0.0, 1.0),
        "offload.pin_memory": (False, True),
        "precision.bf16_check_overflow": (False, True),
    }


def test_offload_policy_is_for_fsdp2(capsys: pytest.CaptureFixture[str]) -> None:
    """P39: verl reads ``offload_policy`` with ``strategy: fsdp2`` only."""
    a = FIXTURES / "verl.yaml"
    key = "actor_rollout_ref.actor.fsdp_config.offload_policy"
    result = diff(capsys, a, a, "--set-b", f"{key}=true")
    assert changed(result) == {}
    assert key in inert(result)
    two = "actor_rollout_ref.actor.strategy=fsdp2"
    result = diff(capsys, a, a, "--set-a", two, "--set-b", two, "--set-b", f"{key}=true")
    assert changed(result)["offload.params"] == ("none", "cpu")
    assert "offload.idle_optimizer" in inert(result)


def test_offload_of_all_is_three_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """P41: prime-rl's switch moves all three; without it the optimizer stays offloaded."""
    a = FIXTURES / "prime_rl.toml"
    found = changed(diff(capsys, a, a, "--set-b", "model.fsdp_cpu_offload=false"))
    assert found["offload.params"] == ("cpu", "none")
    assert found["offload.grads"] == ("cpu", "none")
    assert found["offload.optimizer_mode"] == ("none", "state")


def test_hybrid_on_one_node_is_full_shard(capsys: pytest.CaptureFixture[str]) -> None:
    """P48: with one machine the shard group of HYBRID_SHARD is all ranks."""
    a = FIXTURES / "accelerate_fsdp1.yaml"
    option = "fsdp_config.fsdp_sharding_strategy=HYBRID_SHARD"
    assert changed(diff(capsys, a, a, "--set-b", option)) == {}
    nodes = [f"--set-{side}=num_machines=2" for side in "ab"]
    found = changed(diff(capsys, a, a, *nodes, "--set-b", option))
    assert found == {"sharding.replicate_size": (1, 2)}


def test_generations_of_torchtitan_come_to_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """P16: two years of renamed keys, no change."""
    a, b = FIXTURES / "torchtitan_2024.toml", FIXTURES / "torchtitan_022.toml"
    assert changed(diff(capsys, a, b)) == {}


def test_no_recompute_table_is_not_off(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """P18: without ``[activation_checkpoint]`` torchtitan recomputes every second layer."""
    a = FIXTURES / "torchtitan_022.toml"
    b = tmp_path / "b.toml"
    b.write_text(a.read_text().split("[activation_checkpoint]")[0])
    assert changed(diff(capsys, a, b)) == {"recompute.granularity": ("op", 2)}


def test_stage_two_to_three(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """P33: parameters are sharded, buckets follow the hidden size where it is known."""
    b = tmp_path / "b.json"
    raw = json.loads((FIXTURES / "deepspeed_z2.json").read_text())
    raw["zero_optimization"] = {"stage": 3, "reduce_bucket_size": "auto"}
    b.write_text(json.dumps(raw))
    sizes = ("--hidden", 1024, "--params", "1B", "--world-size", 8)
    result = diff(capsys, FIXTURES / "deepspeed_z2.json", b, *sizes)
    found = changed(result)
    assert found["sharding.strategy"] == ("optim_grads", "optim_grads_params")
    assert found["comm.bucket_bytes"] == (200_000_000, 1024 * 1024 * 2)
    effects = next(c for c in result["changed"] if c["key"] == "sharding.strategy")["effects"]
    parameters = next(e for e in effects if e["category"] == "parameters")
    assert parameters["bytes"] == -(2_000_000_000 - 250_000_000)
    assert "zero_optimization.round_robin_gradients" in inert(result)


def test_environments_are_compared_when_both_sides_have_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A variable that differs is a change; an environment on one side only is none."""
    config = FIXTURES / "hf_trainer.json"
    other = tmp_path / "other.env"
    other.write_text("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64\ntorch==2.10.0\n")
    result = diff(capsys, f"{config}+{FIXTURES / 'job.env'}", f"{config}+{other}")
    assert changed(result)["env.alloc_conf"] == (
        "expandable_segments:True",
        "max_split_size_mb:64",
    )
    assert changed(result)["env.cuda_device_max_connections"] == (1, None)
    assert "packages.torch" in {c["key"] for c in result["unknown"]}
    alone = diff(capsys, f"{config}+{FIXTURES / 'job.env'}", config)
    assert (changed(alone), alone["unknown"]) == ({}, [])


def test_frameworks_are_compared_by_what_they_share(capsys: pytest.CaptureFixture[str]) -> None:
    """Across frameworks only shared fields compare; it is said that this is so."""
    result = diff(capsys, FIXTURES / "accelerate_fsdp2.yaml", FIXTURES / "torchtitan_022.toml")
    assert "sharding.impl" not in changed(result)
    assert changed(result)["recompute.mode"] == ("none", "selective")
    assert any("only shared fields compare" in text for text in result["warnings"])


def test_a_key_that_starts_to_act_is_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    """The same ``offload_param`` acts at stage 3 and not at stage 2."""
    a = FIXTURES / "deepspeed_z2.json"
    edit = [f"--set-{s}=zero_optimization.offload_param.device=cpu" for s in "ab"]
    result = diff(capsys, a, a, *edit, "--set-b", "zero_optimization.stage=3")
    moved = next(c for c in result["changed"] if c["key"] == "offload.params")
    assert (moved["a"]["effective"], moved["b"]["effective"]) == (False, True)
    assert moved["effects"][0]["direction"] == "down"


def test_what_a_framework_does_not_tell_is_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    """A spec's model and batch are not unset by an accelerate config that never names them."""
    spec = Path(__file__).parents[1] / "golden" / "diff_a.yaml"
    found = changed(diff(capsys, spec, FIXTURES / "accelerate_fsdp2.yaml"))
    assert not {key for key in found if key.startswith(("model.", "batch.", "optimizer."))}
    assert found["world.size"] == (8, 4)


def test_renamed_flags_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """P45: all flags have dotted names; only the micro batch, now by tokens, is another."""
    result = diff(capsys, FIXTURES / "openrlhf_flat.sh", FIXTURES / "openrlhf_dotted.sh")
    assert changed(result) == {
        "batch.micro": (4, "dynamic"),
        "batch.micro_tokens": (None, 16384),
    }
    assert result["unknown"] == []
    assert inert(result) == {"sharding.secondary_partition"}
