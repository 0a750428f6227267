"""Megatron specs without torch: fields, rules of versions, effective config, Bridge configs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.config.megatron_native import with_live
from fsdp_doctor.config.megatron_profile import Scale, load_profiled
from fsdp_doctor.config.megatron_support import FORMATS, broken_rules, engine_of
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.sizes import model_sizes_from_shape
from fsdp_doctor.config.spec import load_written_spec, spec_from_mapping, spec_to_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.spec import ProfileSpec

ROOT = Path(__file__).parent.parent.parent
SPECS = sorted((ROOT / "profiles" / "h200-megatron" / "specs").glob("*.yaml"))
BRIDGE = ROOT / "tests" / "fixtures" / "megatron" / "bridge_run_config.yaml"
FSDP = {"use_megatron_fsdp": True}
OLD = {"megatron-core": "0.16.1", "torch": "2.13.0"}
NEW = {"megatron-core": "0.19.2", "torch": "2.13.0"}


def spec(checkpoint: str | None = None, **sections: dict[str, Any]) -> ProfileSpec:
    """Return a Megatron spec with these sections."""
    raw: dict[str, Any] = {"name": "x", "config": {"strategy": "megatron", "megatron": sections}}
    return spec_from_mapping({**raw, "checkpoint": checkpoint}, "x.yaml")


def rules(built: ProfileSpec, versions: dict[str, str], *, fake: bool = False) -> list[str]:
    """Return the ids of the rules that a spec breaks."""
    return [v.rule for v in broken_rules(built, versions=versions, fake=fake)]


@pytest.mark.parametrize(
    ("sections", "engine"),
    [
        ({}, "megatron_ddp"),
        ({"ddp": {"use_distributed_optimizer": True}}, "megatron_distopt"),
        ({"ddp": {"use_megatron_fsdp": True}}, "megatron_fsdp"),
        ({"dist": FSDP}, "megatron_fsdp"),
        ({"dist": {"use_torch_fsdp2": True}}, "mcore_torch_fsdp2"),
    ],
)
def test_engine_follows_megatrons_switches(sections: dict[str, Any], engine: str) -> None:
    """The engine is the one that Megatron's own switches choose, and so is ``sharding.impl``."""
    built = spec(**sections)
    assert engine_of(built) == engine
    assert resolve_spec(built).fields["sharding.impl"].value == engine


@pytest.mark.parametrize(
    ("sections", "checkpoint", "versions", "rule"),
    [
        ({"dist": {"use_torch_fsdp2": True}}, None, OLD, "MG017"),
        (
            {
                "dist": {"use_torch_fsdp2": True},
                "ddp": {"use_distributed_optimizer": True},
            },
            None,
            NEW,
            "MG009a",
        ),
        ({"dist": {**FSDP, "use_torch_fsdp2": True}}, None, NEW, "MG020b"),
        ({"dist": FSDP}, None, {**OLD, "megatron-core": "0.15.0"}, "MT011"),
        (
            {"dist": FSDP, "ddp": {"data_parallel_sharding_strategy": "optim"}},
            "torch_dist",
            NEW,
            "MG024",
        ),
        ({}, "fsdp_dtensor", NEW, "MG025a"),
        ({"ddp": {"use_distributed_optimizer": True}}, "full", NEW, "MV003"),
        ({"model": {"recompute_granularity": "full"}}, None, NEW, "MG093"),
        ({"dist": FSDP, "ddp": {"outer_dp_sharding_strategy": "optim"}}, None, NEW, "MG046"),
        ({"dist": FSDP}, None, OLD, "MV001"),
    ],
)
def test_broken_combinations(
    sections: dict[str, Any], checkpoint: str | None, versions: dict[str, str], rule: str
) -> None:
    """Combinations that a version cannot run are found before training, by their rule."""
    assert rule in rules(spec(checkpoint, **sections), versions)


def test_wrong_gradients_by_version() -> None:
    """Overlap under ``optim`` is wrong in 0.16 only."""
    ddp = {"data_parallel_sharding_strategy": "optim", "overlap_grad_reduce": True}
    built = spec(dist=FSDP, ddp=ddp)
    assert "MG058" in rules(built, OLD)
    assert rules(built, NEW) == []


def test_outer_shards_have_a_norm_of_their_own() -> None:
    """With the optimizer sharded over the outer dimension too, 0.16 takes the norm of a part."""
    ddp = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "outer_dp_sharding_strategy": "optim",
    }
    plain = spec(dist=FSDP, ddp=ddp)
    config = plain.config.megatron
    wide = replace(config, ddp=replace(config.ddp, num_distributed_optimizer_instances=2))
    built = replace(plain, config=replace(plain.config, megatron=wide))
    assert rules(built, OLD) == ["MV007"]
    assert rules(built, NEW) == []
    assert rules(plain, OLD) == []


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_single_rank_is_wrong_under_sharded_fsdp(strategy: str) -> None:
    """With one data-parallel rank gradients are added to themselves: told, not refused.

    By 0.16 always, later only where they are reduced in another dtype than they are kept in.
    """
    ddp = {"data_parallel_sharding_strategy": strategy, "megatron_fsdp_main_grads_dtype": "float32"}
    built = spec(dist=FSDP, ddp=ddp)
    alone = replace(built, world_size=1)
    assert rules(alone, OLD) == ["MV005"]
    for core in ("0.17.1", "0.18.2"):
        assert "MV005" not in rules(alone, {**NEW, "megatron-core": core})
    assert rules(alone, NEW) == []
    assert rules(built, OLD) == []
    for reduced, broken in (("bfloat16", ["MV005"]), ("float32", []), ("auto", [])):
        cast = spec(dist=FSDP, ddp={**ddp, "megatron_fsdp_grad_comm_dtype": reduced})
        assert rules(replace(cast, world_size=1), NEW) == broken
        assert rules(cast, NEW) == []


def test_an_optimizer_cannot_be_offloaded_from_a_cpu() -> None:
    """On CPU processes there is no GPU to offload from; on a GPU there is."""
    built = spec(optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0})
    assert [v.rule for v in broken_rules(built, versions=NEW, on_cpu=True)] == ["MV006"]
    assert rules(built, NEW) == []


def test_one_rank_of_many_needs_a_new_core() -> None:
    """Sharded Megatron-FSDP cannot be wrapped on a fake process group before 0.17."""
    built = spec(dist=FSDP, ddp={"data_parallel_sharding_strategy": "optim_grads_params"})
    assert "MV002" in rules(built, OLD, fake=True)
    for core in ("0.17.1", "0.19.2"):
        assert "MV002" not in rules(built, {**NEW, "megatron-core": core}, fake=True)


def test_no_shard_needs_overlapped_gathers_before_0_18() -> None:
    """Without a weight buffer the optimizer step of 0.16 and 0.17 breaks; from 0.18 on it runs."""
    for core, broken in (("0.16.1", True), ("0.17.1", True), ("0.18.2", False), ("0.19.2", False)):
        found = rules(spec(dist=FSDP), {**NEW, "megatron-core": core})
        assert ("MV001" in found) is broken, core


def test_standalone_package_beside_an_old_core() -> None:
    """The standalone package imports core's config class, which before 0.19 lacks its fields."""
    built = spec_from_mapping({"name": "x", "config": {"strategy": "megatron_fsdp"}}, "x.yaml")
    assert rules(built, OLD) == ["MG126"]
    assert rules(built, NEW) == []
    fields = resolve_spec(built).fields
    assert fields["sharding.strategy"].value == "optim_grads_params"
    assert fields["comm.overlap_param_gather"].value is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"strategy": "megatron", "megatron": {"ddp": {"bucket_size": 0}}}}, "at least"),
        ({"config": {"strategy": "megatron", "megatron": {"ddp": {"nccl_ub": 1}}}}, "unknown key"),
        (
            {
                "config": {
                    "strategy": "megatron",
                    "megatron": {"optimizer": {"optimizer_offload_fraction": 1.5}},
                }
            },
            "between 0 and 1",
        ),
        (
            {
                "config": {
                    "strategy": "megatron",
                    "megatron": {"ddp": {"num_distributed_optimizer_instances": 3}},
                }
            },
            "do not divide",
        ),
        (
            {
                "workload": {"model": {"factory": "a:b", "batch": "a:c"}},
                "config": {"strategy": "megatron"},
            },
            "own GPT",
        ),
        ({"config": {"strategy": "ddp"}, "checkpoint": "zarr"}, "not a known value"),
    ],
)
def test_refused_specs(changes: dict[str, Any], message: str) -> None:
    """Values out of range, unknown keys and what is not built are refused when read."""
    with pytest.raises(InputError, match=message):
        spec_from_mapping({"name": "x", **changes}, "x.yaml")


def test_torch_sections_are_inert() -> None:
    """What torch's sections say has no effect under Megatron, and is told so."""
    raw = {"name": "x", "config": {"strategy": "megatron", "precision": {"autocast": "bfloat16"}}}
    fields = resolve_spec(spec_from_mapping(raw, "x.yaml")).fields
    assert fields["config.precision.autocast"].effective is False


def test_live_config_replaces_what_was_asked() -> None:
    """A field that Megatron overwrote is recorded as it is, as seen at run time."""
    built = spec(ddp={"overlap_grad_reduce": True})
    asked = resolve_spec(built).fields
    live = with_live(built, asked, {"ddp": {"overlap_grad_reduce": False}})
    assert asked["comm.overlap_grad_reduce"].value is True
    assert live["comm.overlap_grad_reduce"].value is False
    assert live["comm.overlap_grad_reduce"].source == "runtime"
    assert with_live(built, asked, {"ddp": {"overlap_grad_reduce": True}}) == asked


def test_bridge_config_becomes_a_spec() -> None:
    """Bridge's run_config.yaml is profiled in its own words, scaled, and every change is told."""
    found = load_profiled(BRIDGE, ["world_size=4"], Scale(layers=2, hidden=512))
    built, model = found.written.spec, found.written.spec.workload.model
    assert (model.layers, model.hidden, model.heads, model.ffn) == (2, 512, 8, 2048)
    assert model.tied_embeddings is True
    assert built.world_size == 4
    megatron = built.config.megatron
    assert megatron.engine == "megatron_distopt"
    assert megatron.ddp.bucket_size == 40_000_000
    assert megatron.model.bf16 is True
    assert any("layers: 16 -> 2" in note for note in found.notes)
    assert any("global_batch_size" in note for note in found.notes)
    with pytest.raises(InputError, match="--layers"):
        load_profiled(SPECS[0], [], Scale(layers=2))


def test_bridge_parallelism_is_told(tmp_path: Path) -> None:
    """Tensor parallelism and precision-aware optimizers are not built: the notes say so."""
    text = BRIDGE.read_text().replace(
        "tensor_model_parallel_size: 1", "tensor_model_parallel_size: 8"
    )
    path = tmp_path / "run_config.yaml"
    path.write_text(text)
    notes = load_profiled(path, [], Scale()).notes
    assert any("tensor_model_parallel_size 8: 1 here" in note for note in notes)


def test_sizes_are_those_of_megatrons_gpt() -> None:
    """Differences are weighed by Megatron's two-matrix feed-forward, not by the built-in GPT's."""
    raw = {
        "name": "x",
        "workload": {"model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}},
        "config": {"strategy": "megatron", "megatron": {"model": {"bf16": True}}},
    }
    sizes = model_sizes_from_shape(spec_from_mapping(raw, "x.yaml"))
    assert sizes is not None
    matrices = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 2 * 64 * 256)
    assert sizes.parameters == pytest.approx(matrices, rel=0.01)
    assert sizes.parameter_bytes == 2 * sizes.parameters


def test_h200_matrix() -> None:
    """At least 24 specs of one GPT load, round-trip, and run as one rank with core 0.19.2."""
    assert len(SPECS) >= 24
    models = set()
    for path in SPECS:
        written = load_written_spec(path)
        built = written.spec
        assert built.name == path.stem
        assert spec_from_mapping(spec_to_mapping(built), "again") == built
        assert rules(built, NEW, fake=True) == []
        assert engine_of(built) in FORMATS
        models.add(repr(built.workload))
    assert len(models) == 1
