"""Loading, checking, changing and writing specs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_doctor.config.schema import spec_keys
from fsdp_doctor.config.spec import (
    apply_overrides,
    load_spec,
    load_written_spec,
    spec_from_mapping,
    spec_to_mapping,
)
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.spec import (
    ActivationCheckpointing,
    CPUOffload,
    CPUOffloadPolicy,
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    GradientAccumulation,
    MeshConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ModelSpec,
    OptimizerConfig,
    Precision,
    ProfileSpec,
    StepPlan,
    TrainingConfig,
    Workload,
)

MINIMAL: dict[str, Any] = {"name": "x", "config": {"strategy": "fsdp2"}}


def merged(base: Any, changes: Any) -> Any:
    """Return nested mappings laid over each other."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    keys = base.keys() | changes.keys()
    return {k: merged(base.get(k), changes[k]) if k in changes else base[k] for k in keys}


def spec(**changes: Any) -> ProfileSpec:
    """Return the minimal spec with changes."""
    return spec_from_mapping(merged(MINIMAL, changes), "s.yaml")


def config(strategy: str, **changes: Any) -> dict[str, Any]:
    """Return a config section."""
    return {"config": {"strategy": strategy, **changes}}


def test_a_minimal_file_gets_its_name_from_the_file(tmp_path: Path) -> None:
    """Only the strategy must be written; the name is the file's stem."""
    path = tmp_path / "small.yaml"
    path.write_text("config: {strategy: ddp}\n")
    assert load_spec(path) == ProfileSpec(name="small", config=TrainingConfig(strategy="ddp"))


def test_config_can_live_in_another_file(tmp_path: Path) -> None:
    """``config: FILE`` reads the mapping from there, and errors name that file and line."""
    (tmp_path / "how.yaml").write_text("strategy: fsdp1\nfsdp1:\n  wrapp: none\n")
    path = tmp_path / "s.yaml"
    path.write_text("config: how.yaml\n")
    with pytest.raises(InputError, match=r"how.yaml:3: config.fsdp1.wrapp: .*did you mean wrap"):
        load_spec(path)
    (tmp_path / "how.yaml").write_text("strategy: fsdp1\nfsdp1:\n  wrap: none\n")
    assert load_spec(path).config.fsdp1.wrap == "none"


def test_a_missing_config_file_names_both_files(tmp_path: Path) -> None:
    """The error says which key of which file led to the missing one."""
    path = tmp_path / "s.yaml"
    path.write_text("config: gone.yaml\n")
    with pytest.raises(InputError, match=r"s.yaml:1: config: .*gone.yaml: No such file"):
        load_spec(path)


def test_errors_name_file_line_and_key(tmp_path: Path) -> None:
    """An unknown key is named with its line and the nearest known one."""
    path = tmp_path / "s.yaml"
    path.write_text("config:\n  strategy: fsdp2\n  fsdp2:\n    reshard_after_fwd: false\n")
    with pytest.raises(InputError) as caught:
        load_spec(path)
    assert str(caught.value) == (
        f"{path}:4: config.fsdp2.reshard_after_fwd: unknown key 'reshard_after_fwd' "
        "(did you mean reshard_after_forward?)"
    )


def test_a_key_at_the_wrong_level_is_sent_home() -> None:
    """A known key in the wrong section is told where it belongs."""
    with pytest.raises(InputError, match=r"belongs at: config.fsdp2.reshard_after_forward"):
        spec(config={"reshard_after_forward": False})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"strategy": "fsdp3"}}, "config.strategy: 'fsdp3' is not a known value"),
        ({"config": {"compile": "yes"}}, "YAML 1.2 reads yes as text; write true or false"),
        ({"world_size": 2.0}, "world_size: expected a whole number, got a number: 2.0"),
        ({"world_size": True}, "world_size: expected a whole number, got true or false"),
        ({"world_size": "1_000"}, "write 1000"),
        ({"config": {"fsdp2": None}}, "remove the key to get the default"),
        ({"config": "ddp"}, "config: expected a mapping, got text: 'ddp'"),
        ({"config": {"fsdp2": {"mesh": {"shard": 2}}}}, "missing key config.fsdp2.mesh.replicate"),
        ({"config": {"fsdp2": {"mp_policy": {"param_dtype": "bf16"}}}}, "did you mean bfloat16?"),
        ({"config": {"fsdp2": {"wrap": [1]}}}, "config.fsdp2.wrap: expected text"),
        ({"config.strategy": "ddp"}, "unknown key 'config.strategy'"),
    ],
)
def test_wrong_types_are_named(changes: dict[str, Any], message: str) -> None:
    """A value of the wrong type gives its key, what was expected and what to write."""
    with pytest.raises(InputError) as caught:
        spec(**changes)
    assert message in str(caught.value)


def test_missing_strategy_lists_the_choices() -> None:
    """The one required key of a config is asked for with its choices."""
    with pytest.raises(
        InputError, match=r"missing key config.strategy \(one of: ddp, fsdp1, fsdp2"
    ):
        spec_from_mapping({"name": "x", "config": {}}, "s.yaml")


HYBRID = {"sharding_strategy": "HYBRID_SHARD"}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"world_size": 0}, "world_size: must be at least 1"),
    ({"world_size": 1 << 50}, "out of all proportion"),
    ({"workload": {"micro_batch": 0}}, "workload.micro_batch: must be at least 1"),
    ({"workload": {"sequence_length": -1}}, "workload.sequence_length"),
    ({"workload": {"model": {"layers": 0}}}, "workload.model.layers"),
    ({"workload": {"model": {"heads": 7}}}, "7 heads do not divide hidden 256"),
    ({"workload": {"model": {"heads": 8, "kv_heads": 3}}}, "do not divide 8 heads"),
    ({"workload": {"model": {"hidden": 24, "heads": 8}}}, "hidden / heads is 3, which is odd"),
    ({"workload": {"model": {"factory": "a:b"}}}, "factory is given without batch"),
    ({"workload": {"model": {"batch": "a:b"}}}, "batch is given without factory"),
    ({"workload": {"model": {"kwargs": {"a": 1}}}}, "kwargs is given without factory"),
    ({"workload": {"model": {"factory": "a.b", "batch": "a:b"}}}, "is not an import path"),
    ({"workload": {"model": {"loss": "a:b c"}}}, "is not an import path"),
    ({"steps": {"warmup": 2}}, "steps.warmup: must be at least 3, not 2"),
    ({"steps": {"timed": 0}}, "steps.timed: must be at least 1"),
    ({"name": " "}, "name: is empty"),
    ({"config": {"activation_checkpointing": {"every_n": 0}}}, "every_n: must be at least 1"),
    ({"config": {"fsdp2": {"blocks_per_unit": 0}}}, "blocks_per_unit: must be at least 1"),
    ({"config": {"gradient_accumulation": {"steps": 0}}}, "steps: must be at least 1"),
    ({"config": {"fsdp2": {"wrap": []}}}, "the list of classes is empty"),
    ({"config": {"fsdp1": {"wrap": []}}}, "the list of classes is empty"),
    ({"config": {"ddp": {"bucket_cap_mb": 0}}}, "must be more than 0 MiB"),
    ({"config": {"ddp": {"bucket_cap_mb": float("inf")}}}, "must be more than 0 MiB"),
    ({"config": {"optimizer": {"learning_rate": float("nan")}}}, "must be a finite number"),
    ({"config": {"optimizer": {"max_grad_norm": 0}}}, "0 would erase every gradient"),
    ({"config": {"precision": {"grad_scaler": True}}}, "GradScaler is for float16 only"),
    (
        {"config": {"precision": {"grad_scaler": True, "parameters": "float16"}}},
        "cannot unscale float16 gradients",
    ),
    (config("fsdp1", fsdp1=HYBRID), "HYBRID_SHARD needs config.fsdp1.mesh"),
    (
        {
            "world_size": 3,
            **config("fsdp1", fsdp1={**HYBRID, "mesh": {"replicate": 2, "shard": 2}}),
        },
        "replicate 2 x shard 2 = 4 ranks, but world_size is 3",
    ),
    (
        config("fsdp1", fsdp1={"mesh": {"replicate": 1, "shard": 2}}),
        "a 2-D mesh does not go with FULL_SHARD",
    ),
    (
        config("fsdp2", fsdp2={"mesh": {"replicate": 2, "shard": 2}}),
        "replicate 2 x shard 2 = 4 ranks, but world_size is 2",
    ),
    (config("fsdp2", fsdp2={"reshard_after_forward": 0}), "0 is not a factor of the shard size 2"),
    ({"world_size": 8, **config("fsdp2", fsdp2={"reshard_after_forward": 3})}, "3 is not a factor"),
    (
        config(
            "fsdp1",
            fsdp1={"cpu_offload": {"offload_params": True}},
            gradient_accumulation={"steps": 2},
        ),
        "cannot accumulate gradients outside no_sync()",
    ),
    (config("fsdp1", compile=True), "needs use_orig_params"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_values_that_torch_would_refuse_are_named(changes: dict[str, Any], message: str) -> None:
    """Each broken rule gives one line with the key."""
    with pytest.raises(InputError) as caught:
        spec(**changes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("s.yaml: ")


def test_rules_of_another_strategy_do_not_apply() -> None:
    """A hybrid FSDP1 section without a mesh is harmless under FSDP2."""
    assert spec(config={"fsdp1": HYBRID}).config.fsdp1.mesh is None


def test_grad_scaler_goes_with_float16() -> None:
    """Autocast float16, or float16 compute of the engine in use, admits the scaler."""
    assert spec(config={"precision": {"grad_scaler": True, "autocast": "float16"}})
    assert spec(
        config={
            "precision": {"grad_scaler": True},
            "fsdp2": {"mp_policy": {"param_dtype": "float16"}},
        }
    )


def test_overrides_change_keys_and_keep_the_rest() -> None:
    """``KEY=VALUE`` sets YAML values, creating sections where needed."""
    changed = apply_overrides(
        spec(workload={"micro_batch": 3}),
        ["config.fsdp2.reshard_after_forward=false", "config.fsdp2.mp_policy.param_dtype=bfloat16"],
    )
    assert changed.config.fsdp2.reshard_after_forward is False
    assert changed.config.fsdp2.mp_policy == MixedPrecisionPolicy(param_dtype="bfloat16")
    assert changed.workload.micro_batch == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config.fsdp2", "not of the form KEY=VALUE"),
        ("config.fsdp2.reshard=1", "did you mean reshard_after_forward?"),
        ("confg.fsdp2.wrap=none", "did you mean config?"),
        ("world_size=many", "option world_size=many: world_size: expected a whole number"),
        ("world_size=0", "must be at least 1"),
        ("config.fsdp2.wrap=[", "not valid YAML"),
    ],
)
def test_wrong_overrides_are_named(text: str, message: str) -> None:
    """A wrong option is quoted, with the same advice as in a file."""
    with pytest.raises(InputError) as caught:
        apply_overrides(spec(), [text])
    assert message in str(caught.value)
    assert f"option {text}" in str(caught.value)


def test_written_keys_are_noted(tmp_path: Path) -> None:
    """Keys of the file and of options are told from defaults, empty sections included."""
    path = tmp_path / "s.yaml"
    path.write_text("config: {strategy: fsdp2, fsdp2: {offload_policy: {}, wrap: block}}\n")
    written = load_written_spec(path, ["world_size=4"]).written
    assert written["config.fsdp2.offload_policy"] == "file"
    assert written["config.fsdp2.wrap"] == "file"
    assert written["world_size"] == "cli"
    assert "config.fsdp2.mesh" not in written


def test_defaults_are_left_out_of_a_mapping() -> None:
    """What a spec writes is what differs from the defaults; ``true`` is not ``1``."""
    assert spec_to_mapping(spec()) == {
        "name": "x",
        "config": {
            "strategy": "fsdp2",
        },
    }


def test_every_key_has_a_path() -> None:
    """The schema lists nested and optional sections."""
    assert {"name", "config.fsdp1.mixed_precision.param_dtype", "workload.model.kwargs"} <= set(
        spec_keys()
    )


def instances(cls: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return instances with some of ``fields`` set and the others at their default."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: cls(**values))


DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])
SWITCH = st.booleans()
COUNT = st.integers(1, 64)
WRAP: st.SearchStrategy[Any] = st.sampled_from(["block", "none"]) | st.lists(
    st.text("AbcBlock", min_size=1), min_size=1, max_size=3
)
maybe: Callable[[st.SearchStrategy[Any]], st.SearchStrategy[Any]] = lambda s: st.none() | s  # noqa: E731
REALS = st.floats(0.001, 1000, allow_nan=False)


@st.composite
def specs(draw: st.DrawFn) -> ProfileSpec:
    """Return valid specs that use every section."""
    shard, replicate = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    strategy = draw(st.sampled_from(["ddp", "fsdp1", "fsdp2"]))
    mesh = MeshConfig(replicate=replicate, shard=shard)
    hybrid = draw(SWITCH)
    fsdp1 = draw(
        instances(
            FSDP1Config,
            mixed_precision=maybe(
                instances(MixedPrecision, param_dtype=maybe(DTYPES), buffer_dtype=maybe(DTYPES))
            ),
            cpu_offload=maybe(st.just(CPUOffload(offload_params=False))),
            backward_prefetch=st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", None]),
            forward_prefetch=SWITCH,
            wrap=WRAP,
        ).map(lambda c: replace(c, sharding_strategy="HYBRID_SHARD", mesh=mesh) if hybrid else c)
    )
    fsdp2 = draw(
        instances(
            FSDP2Config,
            reshard_after_forward=st.sampled_from([None, True, False, 1, shard]),
            mp_policy=maybe(
                instances(
                    MixedPrecisionPolicy, param_dtype=maybe(DTYPES), cast_forward_inputs=SWITCH
                )
            ),
            offload_policy=maybe(instances(CPUOffloadPolicy, pin_memory=SWITCH)),
            wrap=WRAP,
            blocks_per_unit=COUNT,
        ).map(lambda c: replace(c, mesh=mesh))
    )
    return ProfileSpec(
        name=draw(st.text("ab 0-é", min_size=1).filter(str.strip)),
        world_size=shard * replicate,
        workload=draw(
            instances(
                Workload,
                model=instances(
                    ModelSpec, layers=COUNT, ffn=maybe(COUNT), vocab=COUNT, tied_embeddings=SWITCH
                ),
                micro_batch=COUNT,
                seed=st.integers(0, 10),
            )
        ),
        steps=draw(instances(StepPlan, warmup=st.integers(3, 9), kernel_profile=SWITCH)),
        config=TrainingConfig(
            strategy=strategy,
            ddp=draw(instances(DDPConfig, bucket_cap_mb=maybe(REALS), static_graph=SWITCH)),
            fsdp1=fsdp1,
            fsdp2=fsdp2,
            precision=draw(instances(Precision, parameters=DTYPES, autocast=st.just("bfloat16"))),
            activation_checkpointing=draw(
                instances(ActivationCheckpointing, mode=st.just("every_n"), every_n=COUNT)
            ),
            gradient_accumulation=draw(
                instances(GradientAccumulation, steps=COUNT, sync=st.just("last_microbatch"))
            ),
            optimizer=draw(
                instances(OptimizerConfig, learning_rate=REALS, max_grad_norm=maybe(REALS))
            ),
        ),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_specs_survive_the_round_trip(original: ProfileSpec) -> None:
    """Writing a spec as a mapping and reading it back gives the same spec."""
    assert spec_from_mapping(spec_to_mapping(original), "round trip") == original
