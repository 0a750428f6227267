"""Hostile and broken configs: a clear error, in bounded time, and nothing is ever run."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.load import load_config, resolve
from fsdp_doctor.config.loaders import formats, load_native, load_source
from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.errors import DoctorError, InputError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "configs"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 10)}]" for n in range(8)
)


def written(tmp_path: Path, text: str | bytes, name: str = "c.yaml") -> Path:
    """Write a file and return its path."""
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases expand too far"),
        ("a: " + "[" * 500 + "]" * 500, "not valid YAML|nested deeper"),
        ("a: [" * 5000, "not valid YAML|nested deeper"),
        ("a: b: c", "not valid YAML"),
        ("- 1\n- 2\n", "no mapping"),
        ("just text", "no mapping"),
        ("&a [*a]", "no mapping|not valid YAML|nested deeper"),
        ("a: &a {b: *a}", "nested deeper|not valid YAML"),
        (b"\xff\xfea\x00:\x001\x00", "UTF-16"),
        (b"\x7fELF\x00\x00", "binary"),
        (b"a: \xff\n", "not UTF-8"),
        ("", "empty"),
        ("# only a comment\n", "no mapping"),
    ],
)
def test_broken_yaml_is_one_clear_error(text: str | bytes, message: str, tmp_path: Path) -> None:
    """The file is named, with what is wrong."""
    path = written(tmp_path, text)
    started = time.perf_counter()
    with pytest.raises(InputError, match=message) as raised:
        load_config(path)
    assert time.perf_counter() - started < 5
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{"a": ' * 3000 + "1" + "}" * 3000, "not valid|nested deeper"),
        ("c.json", '{"a": 1', "not valid JSON"),
        ("c.json", "[1, 2]", "not valid JSON|no mapping"),
        ("c.toml", "[a\nb = 1\n", "not valid"),
        ("c.toml", "a = \n", "not valid"),
    ],
)
def test_broken_json_and_toml(name: str, text: str, message: str, tmp_path: Path) -> None:
    """Syntax that the extension promises is held to it."""
    with pytest.raises(InputError, match=message):
        load_config(written(tmp_path, text, name))


def test_a_json_of_50_mb_is_refused_at_once(tmp_path: Path) -> None:
    """The file is not read whole."""
    path = written(tmp_path, '{"a": "' + "x" * (50 << 20) + '"}', "big.json")
    started = time.perf_counter()
    with pytest.raises(InputError, match="larger than"):
        load_config(path)
    assert time.perf_counter() - started < 2


def test_many_values_are_refused(tmp_path: Path) -> None:
    """A data file with the extension of a config is no config."""
    path = written(tmp_path, json.dumps({str(n): n for n in range(200_000)}), "data.json")
    with pytest.raises(InputError, match="not a config"):
        load_config(path)


def test_a_long_yaml_is_refused(tmp_path: Path) -> None:
    """Composing YAML is slow: its size is limited."""
    path = written(tmp_path, "a: 1\n" + "# padding\n" * 120_000)
    with pytest.raises(InputError, match="1 MiB of YAML"):
        load_config(path)


@pytest.mark.parametrize(
    "text",
    [
        "\n" * (6 << 20) + "a",
        '{"a": 1, ' + "/*" * (1 << 20),
        "{" + "[" * (1 << 20),
        "a = " + "[" * (1 << 20),
        '{"' + "\\" * (2 << 20),
        "[a]\n" * (1 << 20),
        "a.b" * (1 << 20) + " = 1",
        "=" * (4 << 20),
    ],
    ids=["newlines", "comments", "brackets", "toml", "escapes", "tables", "dots", "equals"],
)
def test_no_text_takes_long(text: str, tmp_path: Path) -> None:
    """Megabytes that look like some syntax are refused in seconds."""
    path = written(tmp_path, text, "c.cfg")
    started = time.perf_counter()
    with contextlib.suppress(DoctorError):
        load_config(path)
    assert time.perf_counter() - started < 10


def test_a_vanished_file_and_a_folder(tmp_path: Path) -> None:
    """What is not a file is said so."""
    with pytest.raises(InputError, match="No such file"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(InputError, match="directory"):
        load_config(f"{written(tmp_path, 'a: 1')}+{tmp_path}")


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    """They change nothing."""
    text = (FIXTURES / "accelerate_fsdp1.yaml").read_text()
    path = written(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    plain = load_config(FIXTURES / "accelerate_fsdp1.yaml").config
    diff = diff_configs(load_config(path).config, plain)
    assert (diff.changed, diff.cosmetic, diff.unknown) == ((), (), ())


def test_tags_and_targets_are_text(tmp_path: Path) -> None:
    """Nothing that a config names is imported, built or called."""
    marker = tmp_path / "ran"
    text = (
        f"a: !!python/object/apply:os.system ['touch {marker}']\n"
        f"b: !!python/name:os.system\n"
        f"c: !custom {{x: 1}}\n"
        f"d: {{_target_: os.system, command: 'touch {marker}'}}\n"
        f"e: ${{oc.env:HOME}}\n"
        f"f: $(touch {marker})\n"
    )
    found = load_native(written(tmp_path, text))
    assert not marker.exists()
    assert found.fields["d._target_"].value == "os.system"
    assert any("python/object/apply:os.system" in note for note in found.unresolved)


def test_merge_keys_and_repeated_keys(tmp_path: Path) -> None:
    """``<<`` is followed; a key that stands twice has the last value, and that is told."""
    text = "base: &b {x: 1, y: 2}\nuse: {<<: *b, y: 3}\nz: 1\nz: 2\n"
    found = load_native(written(tmp_path, text))
    assert (found.fields["use.x"].value, found.fields["use.y"].value) == (1, 3)
    assert found.fields["z"].value == 2
    assert any("z stands twice" in note for note in found.unresolved)


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    """Tokens do not reach the effective config."""
    token = "hf_" + "a" * 30
    path = written(tmp_path, f"per_device_train_batch_size: 1\nhub_token: {token}\nx: {token}\n")
    assert token not in repr(load_config(path))


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["auto", "5e8", "bf16", "true", "no", "${a.b}", "FULL_SHARD", "1e999", ""]),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def known_keys() -> list[str]:
    """Return every key that the fixtures hold."""
    return sorted({key for path in FIXTURES.iterdir() for key in load_native(path).fields})


KEYS = known_keys()
FORMATS = [name for name in formats() if name not in ("spec", "env")]


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested mappings."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        section = result
        *parents, last = key.split(".")
        for name in parents:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                break
        else:
            section.setdefault(last, value)
    return result


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    flat=st.dictionaries(st.sampled_from(KEYS), values, max_size=12),
    fmt=st.sampled_from(FORMATS),
)
def test_any_value_under_any_key_is_survived(flat: dict[str, Any], fmt: str) -> None:
    """Whatever stands under a known key, each format loads, resolves and compares, or says why."""
    text = json.dumps(nested(flat))
    if text == "{}":
        return
    try:
        native = load_source(Source(path=Path("fuzz.json"), text=text), fmt)
        config = resolve(native)
    except DoctorError:
        return
    diff = diff_configs(config, config)
    assert diff.changed == ()


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=200), name=st.sampled_from(["a.yaml", "a.json", "a.toml", "a"]))
def test_any_text_is_survived(text: str, name: str) -> None:
    """Any text is detected and loaded, or refused with an error of ours."""
    with contextlib.suppress(DoctorError):
        resolve(load_source(Source(path=Path(name), text=text)))
