"""Config files of every format: found by what they hold, read whole, references followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_doctor.config.load import load_config
from fsdp_doctor.config.loaders import detect_format, formats, load_native
from fsdp_doctor.config.loaders.base import read_source
from fsdp_doctor.config.loaders.structure import fields_of, structure_of
from fsdp_doctor.errors import InputError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"
REAL = Path(__file__).parents[2].parent / "shared" / "configs"
FORMAT_OF = {
    "accelerate_fsdp1.yaml": ("accelerate", "accelerate"),
    "accelerate_fsdp2.yaml": ("accelerate", "accelerate"),
    "accelerate_unknown_keys.json": ("accelerate", "accelerate"),
    "accelerate_deepspeed.yaml": ("accelerate", "accelerate"),
    "deepspeed_z2.json": ("deepspeed", "deepspeed"),
    "deepspeed_template.json": ("deepspeed", "deepspeed"),
    "hf_trainer.json": ("hf_trainer", "hf-trainer"),
    "hf_trainer_deepspeed.yaml": ("hf_trainer", "hf-trainer"),
    "axolotl.yaml": ("axolotl", "axolotl"),
    "llama_factory_v0.yaml": ("llama_factory", "llama-factory"),
    "llama_factory_v1.yaml": ("llama_factory", "llama-factory"),
    "torchtitan_2024.toml": ("torchtitan", "torchtitan"),
    "torchtitan_022.toml": ("torchtitan", "torchtitan"),
    "torchtune.yaml": ("torchtune", "torchtune"),
    "composer.yaml": ("composer", "composer"),
    "verl.yaml": ("verl", "verl"),
    "prime_rl.toml": ("prime_rl", "prime-rl"),
    "lightning.yaml": ("lightning", "lightning"),
    "olmo.yaml": ("olmo", "olmo"),
    "gpt_neox.yml": ("gpt_neox", "gpt-neox"),
    "levanter.yaml": ("levanter", "levanter"),
    "openrlhf_flat.sh": ("openrlhf", "openrlhf"),
    "openrlhf_dotted.sh": ("openrlhf", "openrlhf"),
    "wandb.yaml": ("wandb", "hf-trainer"),
    "job.env": ("env", "environment"),
    "plain.yaml": ("generic", "unknown"),
}
FOLDERS = {
    "accelerate": {"accelerate"},
    "axolotl": {"axolotl"},
    "composer-llmfoundry": {"composer"},
    "deepspeed": {"deepspeed"},
    "gpt-neox": {"gpt-neox"},
    "hf-trainer": {"hf-trainer", "accelerate"},
    "levanter": {"levanter"},
    "lightning": {"lightning"},
    "llama-factory": {"llama-factory"},
    "megatron-bridge": {"megatron-bridge"},
    "megatron-lm": {"megatron-lm"},
    "nemo": {"nemo"},
    "nemo-automodel": {"nemo-automodel"},
    "nemo-rl": {"nemo-rl"},
    "olmo": {"olmo"},
    "prime-rl": {"prime-rl"},
    "torchtitan": {"torchtitan"},
    "torchtune": {"torchtune"},
    "verl": {"verl"},
}
"""Folder of real configs -> frameworks its files are for."""


def real_files() -> list[Path]:
    """Return the real configs that are there."""
    return sorted(REAL.glob("*/*")) if REAL.is_dir() else []


def test_every_fixture_has_its_format() -> None:
    """No fixture is left out of the table."""
    assert {path.name for path in FIXTURES.iterdir()} == set(FORMAT_OF)


@pytest.mark.parametrize("name", FORMAT_OF)
def test_a_format_is_found_by_its_content(name: str) -> None:
    """The right loader reads each fixture, and its rules are the framework's."""
    found = load_native(FIXTURES / name)
    assert (found.format, found.framework) == FORMAT_OF[name]


@pytest.mark.parametrize("name", FORMAT_OF)
def test_no_key_is_lost(name: str) -> None:
    """Each native key is in the effective config: as a field, or as where one comes from."""
    path = FIXTURES / name
    loaded = load_config(path)
    assert loaded.native is not None
    known = set(loaded.config.fields)
    for value in loaded.config.fields.values():
        known |= set(value.native)
    missing = {k for k in loaded.native.fields if k not in known and not k.startswith("_")}
    assert {k for k in missing if k not in CLAIMED} == set()


CLAIMED = {
    "precision", "variables.length", "HF_TOKEN",
}  # fmt: skip
"""Keys that only say which other keys act, or that are told under a canonical name."""


@pytest.mark.skipif(not real_files(), reason="the real configs are not on this machine")
def test_real_configs_are_read_by_the_right_rules() -> None:
    """Every real config loads, and is detected as its folder says."""
    wrong = []
    for path in real_files():
        found = load_native(path)
        if found.framework not in FOLDERS[path.parent.name]:
            wrong.append((path.name, found.framework))
        assert found.fields
    assert wrong == []


@pytest.mark.skipif(not real_files(), reason="the real configs are not on this machine")
def test_real_configs_do_not_differ_from_themselves() -> None:
    """A config compared with itself has no change."""
    from fsdp_doctor.config.diff import diff_configs

    for path in real_files():
        config = load_config(path).config
        diff = diff_configs(config, config)
        assert (diff.changed, diff.cosmetic, diff.unknown) == ((), (), ()), path.name


def test_a_format_can_be_forced() -> None:
    """``--format`` wins over detection; an unknown name lists the known ones."""
    assert load_native(FIXTURES / "plain.yaml", "hf-trainer").framework == "hf-trainer"
    assert load_native(FIXTURES / "hf_trainer.json", "generic").framework == "unknown"
    with pytest.raises(InputError, match=r"one of: .*accelerate.*deepspeed"):
        load_native(FIXTURES / "plain.yaml", "nonsense")
    assert {"spec", "generic", "env", "accelerate"} <= set(formats())


def test_a_config_named_by_another_is_followed() -> None:
    """``deepspeed: file.json`` beside the config becomes a part; ``auto`` is filled in."""
    loaded = load_config(FIXTURES / "hf_trainer_deepspeed.yaml")
    fields = loaded.config.fields
    assert fields["sharding.strategy"].value == "optim_grads_params"
    assert (fields["batch.micro"].value, fields["batch.accumulation"].value) == (3, 5)
    assert fields["optimizer.grad_clip"].value == 0.7
    assert fields["comm.bucket_bytes"].value == "auto"


def test_a_missing_reference_is_told(tmp_path: Path) -> None:
    """A DeepSpeed JSON that is not there leaves a note, not an error."""
    path = tmp_path / "a.yaml"
    path.write_text("per_device_train_batch_size: 1\ndeepspeed: ../elsewhere/ds.json\n")
    assert any("elsewhere/ds.json was not found" in t for t in load_config(path).config.unresolved)


def test_references_do_not_leave_to_absolute_paths(tmp_path: Path) -> None:
    """An absolute path in a config is not opened."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"zero_optimization": {"stage": 3}}')
    path = tmp_path / "a.yaml"
    path.write_text(f"per_device_train_batch_size: 1\ndeepspeed: {secret}\n")
    assert load_native(path).parts == ()


def test_several_files_are_one_config() -> None:
    """``a.yaml+ds.json+job.env``: the JSON is a part, the variables are the config's."""
    joined = f"{FIXTURES / 'hf_trainer.json'}+{FIXTURES / 'job.env'}"
    loaded = load_config(joined)
    fields = loaded.config.fields
    assert fields["env.cuda_device_max_connections"].value == 1
    assert fields["env.alloc_conf"].value == "expandable_segments:True"
    assert fields["packages.torch"].value == "2.9.0"
    assert loaded.native is not None
    assert loaded.native.environment["HF_TOKEN"] == "[redacted]"
    first = load_config(f"{FIXTURES / 'job.env'}+{FIXTURES / 'hf_trainer.json'}")
    assert first.config.framework == "hf-trainer"


def test_a_second_file_of_the_same_format_overlays_the_first(tmp_path: Path) -> None:
    """Later keys win."""
    over = tmp_path / "over.yaml"
    over.write_text("distributed_type: FSDP\nnum_processes: 16\n")
    fields = load_config(f"{FIXTURES / 'accelerate_fsdp1.yaml'}+{over}").config.fields
    assert fields["world.size"].value == 16


def test_wandb_is_unwrapped_with_its_versions() -> None:
    """The version that W&B noted decides on the rules."""
    config = load_config(FIXTURES / "wandb.yaml").config
    assert (config.version, config.assumed) == ("5.9.0", None)
    assert config.fields["sharding.impl"].value == "fsdp1"
    assert config.fields["batch.micro"].value == 4


def test_values_keep_their_meaning_and_place() -> None:
    """``1e-5`` is a number, ``no`` is text, and each key has its line."""
    source = read_source(FIXTURES / "plain.yaml")
    fields = fields_of(structure_of(source), source)
    assert (fields["lr"].value, fields["switch"].value) == (1e-5, "no")
    assert (fields["depth"].line, fields["depth"].file) == (2, str(FIXTURES / "plain.yaml"))
    titan = load_native(FIXTURES / "torchtitan_022.toml")
    assert titan.fields["training.seq_len"].line == 15
    spread = load_native(FIXTURES / "hf_trainer.json")
    assert spread.fields["bf16"].line == 6


def test_interpolation_stays_within_the_file() -> None:
    """``${a.b}`` is filled in from the same file and keeps its type; the rest is told."""
    found = load_native(FIXTURES / "composer.yaml")
    assert found.fields["max_seq_len"].value == 1024
    assert load_native(FIXTURES / "torchtune.yaml").fields["log_dir"].value == "${output_dir}/logs"


def test_unknown_framework_is_flat(tmp_path: Path) -> None:
    """Without rules the keys are compared as written, and the config says so."""
    config = load_config(FIXTURES / "plain.yaml").config
    assert not config.resolved
    assert config.fields["depth"].native == ("depth",)
    assert json.dumps(sorted(config.fields)) == '["depth", "engine", "lr", "switch"]'


def test_detection_imports_no_other_framework() -> None:
    """Once cheap markers have decided, loaders of other frameworks are not imported."""
    import subprocess
    import sys

    program = (
        "import sys; from fsdp_doctor.config.load import load_config; "
        f"load_config({str(FIXTURES / 'torchtune.yaml')!r}); "
        "heavy = {'torch', 'pandas', 'scipy', 'matplotlib', 'deepdiff'} & set(sys.modules); "
        "mine = [m for m in sys.modules if m.startswith('fsdp_doctor.config.')]; "
        "print(heavy, any('megatron' in m or 'prime' in m or 'verl' in m for m in mine))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set() False"


def test_detect_format_names_the_loader() -> None:
    """The name is what ``--format`` takes."""
    assert detect_format(read_source(FIXTURES / "verl.yaml")) == "verl"
