"""Argument dumps, recipes and the formats that each loader takes for its own."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_cases import effective, fixture, lost_keys, source

from fsdp_doctor.config.loaders import (
    detect,
    megatron_args,
    megatron_bridge,
    megatron_recipe,
    megatron_shell,
    nemo,
    nemo_automodel,
    nemo_rl,
)
from fsdp_doctor.config.loaders.base import Loader
from fsdp_doctor.config.loaders.megatron_args import version_of
from fsdp_doctor.config.loaders.megatron_flags import flag_table, parse_version
from fsdp_doctor.errors import InputError

LOADERS: tuple[Loader, ...] = (
    megatron_args,
    megatron_bridge,
    megatron_recipe,
    megatron_shell,
    nemo,
    nemo_automodel,
    nemo_rl,
)


def test_a_dump_behind_rank_prefixes() -> None:
    """The dump is read through rank prefixes, other ranks' lines and names without dots."""
    native = megatron_args.load(fixture("dump.log"))
    values = {name: field.value for name, field in native.fields.items()}
    assert values["bf16"] is True
    assert values["params_dtype"] == "bfloat16"
    assert values["recompute_granularity"] is None
    assert values["train_data_path"] == ["a", "b"]
    assert values["inference_dynamic_batching_buffer_guaranteed_fraction"] == pytest.approx(0.2)
    assert values["split"] == "949,50,1"
    assert "not_an_argument" not in values
    assert {field.source for field in native.fields.values()} == {"dump"}
    assert any("not an argument" in note for note in native.unresolved)


def test_sizes_of_a_dump_follow() -> None:
    """Data-parallel size, accumulation and gradient dtype come from the dumped arguments."""
    config = effective(megatron_args, fixture("dump.log"), "0.17.0")
    assert config.fields["parallel.dp"].value == 4
    assert config.fields["batch.accumulation"].value == 8
    assert config.fields["precision.grad"].value == "float32"
    assert config.fields["sharding.impl"].value == "megatron_distopt"


@pytest.mark.parametrize("version", ["0.14", "0.17", "0.18", "0.19"])
def test_a_whole_dump_tells_its_version(version: str) -> None:
    """The names of a whole dump are those of one version of megatron-core."""
    numbers = parse_version(version)
    names = {name for name, flag in flag_table().items() if flag.known(numbers)}
    assert version_of(names | {"rank", "world_size"}) == f"{version}.0"
    assert version_of({"bf16", "lr", "save"}) is None


def test_a_recipe_with_flags_and_variables() -> None:
    """``MODEL_ARGS`` are arguments, ``ENV_VARS`` environment; unknown variables are told."""
    text = (
        "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\n"
        "MODEL_ARGS:\n  --num-layers: 12\n  --bf16: true\n  --no-save-optim: true\n"
        "  --save: ${CHECKPOINTS}\n  --hierarchical-context-parallel-sizes: 2 2\n"
        "TEST_TYPE: regular\n"
    )
    native = megatron_recipe.load(source(text, "recipe.yaml"))
    assert native.fields["num_layers"].value == 12
    assert native.fields["no_save_optim"].value is True
    assert native.fields["hierarchical_context_parallel_sizes"].value == [2, 2]
    assert native.fields["num_layers"].line == 4
    assert native.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert any("${CHECKPOINTS}" in note for note in native.unresolved)


def test_a_false_flag_is_not_given() -> None:
    """``false`` for a switch of a recipe means the opposite of what the switch stores."""
    text = "MODEL_ARGS:\n  --bf16: false\n  --no-gradient-accumulation-fusion: false\n"
    fields = megatron_recipe.load(source(text)).fields
    assert fields["bf16"].value is False
    assert fields["gradient_accumulation_fusion"].value is True


def test_yaml_cfg_sections_are_arguments() -> None:
    """Keys in the nested sections of a ``--yaml-cfg`` file are arguments too."""
    text = (
        "language_model:\n  num_layers: 4\n  hidden_size: 64\n"
        "model_parallel:\n  tensor_model_parallel_size: 2\n  params_dtype: bfloat16\n"
        "micro_batch_size: 2\nown_key: 1\n"
    )
    native = megatron_recipe.load(source(text, "cfg.yaml"))
    assert native.fields["tensor_model_parallel_size"].value == 2
    assert native.unknown == ("own_key",)


_FORMATS = {
    "distopt.sh": "megatron_shell",
    "mfsdp.sh": "megatron_shell",
    "dump.log": "megatron_args",
    "bridge_run_config.yaml": "megatron_bridge",
    "automodel.yaml": "nemo_automodel",
    "nemo1.yaml": "nemo",
    "nemo_rl.yaml": "nemo_rl",
}


@pytest.mark.parametrize(("name", "fmt"), _FORMATS.items())
def test_each_fixture_is_taken_for_what_it_is(name: str, fmt: str) -> None:
    """One loader is sure of each file; the others are less so, and none of them raises."""
    given_source = fixture(name)
    scores = {loader.FORMAT: loader.detect(given_source) for loader in LOADERS}
    assert max(scores, key=lambda key: scores[key]) == fmt
    assert scores[fmt] >= 70
    assert fmt == detect(given_source).FORMAT


@pytest.mark.parametrize("name", _FORMATS)
def test_no_key_of_a_fixture_is_lost(name: str) -> None:
    """Each native key is a field of its own or named by a canonical one."""
    given_source = fixture(name)
    loader = next(one for one in LOADERS if _FORMATS[name] == one.FORMAT)
    assert lost_keys(loader.load(given_source), effective(loader, given_source)) == set()


@pytest.mark.parametrize("loader", [megatron_bridge, nemo, nemo_rl, nemo_automodel])
def test_tags_are_text(loader: Loader) -> None:
    """A YAML tag that names a constructor is not acted on, and said so."""
    text = "model:\n  x: !!python/object/apply:os.system [echo hi]\n"
    native = loader.load(source(text, "c.yaml"))
    assert native.fields["model.x"].value == ["echo hi"]
    assert any("python/object" in note for note in native.unresolved)


@pytest.mark.parametrize("loader", [megatron_bridge, megatron_recipe, nemo, nemo_rl])
def test_an_anchor_bomb_is_refused(loader: Loader) -> None:
    """Aliases that expand without bound end with a clear error."""
    lines = ["MODEL_ARGS: {}", "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(InputError, match="values"):
        loader.load(source("\n".join(lines), "c.yaml"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=20))
def test_any_dump_is_read_or_refused(lines: list[str]) -> None:
    """Whatever stands in the block, the dump's reader returns arguments or one clear error."""
    text = "---- arguments ----\n" + "\n".join(lines) + "\n---- end of arguments ----\n"
    try:
        native = megatron_args.load(source(text))
    except InputError:
        return
    assert native.fields


_KEYS = st.sampled_from(["ddp", "dist", "model", "train", "policy", "trainer", "x", "--bf16"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(_KEYS | st.just("MODEL_ARGS"), _VALUES, min_size=1, max_size=4))
def test_any_mapping_is_resolved_or_refused(data: dict[str, object]) -> None:
    """Every loader of YAML reads and resolves any mapping, or ends with one clear error."""
    text = yaml.safe_dump(data, allow_unicode=False)
    for loader in (megatron_bridge, megatron_recipe, nemo, nemo_rl, nemo_automodel):
        given_source = source(text, "c.yaml")
        assert 0 <= loader.detect(given_source) <= 100
        try:
            native = loader.load(given_source)
        except InputError:
            continue
        assert lost_keys(native, effective(loader, given_source)) == set()


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=300)
    | st.lists(
        st.sampled_from(
            [
                "trainer:",
                "model:",
                "  tensor_model_parallel_size: 1",
                "policy:",
                "ddp:",
                "- x",
                "  a: [",
                "MODEL_ARGS:",
                "--bf16",
                "ddp.x=1",
                "torchrun p.py",
                "{",
                "!!x y",
            ]
        ),
        max_size=12,
    ).map("\n".join)
)
def test_detection_never_raises(text: str) -> None:
    """Whatever a text holds, each loader says how sure it is, from 0 to 100."""
    for loader in LOADERS:
        assert 0 <= loader.detect(source(text, "x.yaml")) <= 100
