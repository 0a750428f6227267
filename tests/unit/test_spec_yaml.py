"""Reading YAML that is not trusted."""

import math
from pathlib import Path

import pytest

from fsdp_doctor.config import yaml_source
from fsdp_doctor.config.yaml_source import parse_value, plain_scalar, read_yaml
from fsdp_doctor.errors import InputError


def write(directory: Path, text: str | bytes) -> Path:
    """Write a spec file."""
    path = directory / "spec.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("012", 12),
        ("0o14", 12),
        ("0x1F", 31),
        ("-7", -7),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"),
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        (".inf", math.inf),
        ("-.inf", -math.inf),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    """A plain scalar has the type of YAML 1.2's core schema, not of YAML 1.1."""
    assert plain_scalar(text) == value
    assert type(plain_scalar(text)) is type(value)


def test_quoted_scalars_and_str_tags_are_text(tmp_path: Path) -> None:
    """Quotes and the tag !!str keep a number text."""
    document = read_yaml(write(tmp_path, "a: '12'\nb: !!str 12\nc: \"true\"\n"))
    assert document.data == {"a": "12", "b": "12", "c": "true"}


def test_lines_are_remembered_by_key_path(tmp_path: Path) -> None:
    """Each key path knows its line, and a path without one that of its parent."""
    path = write(tmp_path, "a:\n  b: 1\n\n  c: {d: 2}\n")
    places = read_yaml(path).places
    assert places.where("a.b") == f"{path}:2: a.b"
    assert places.where("a.c.d") == f"{path}:4: a.c.d"
    assert places.where("a.x.y") == f"{path}:1: a.x.y"
    assert places.where("z") == f"{path}: z"


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "", "the file is empty"),
        ("# nothing\n", "", "holds comments only"),
        ("- 1\n", "", "the top level is a list, not a mapping"),
        ("3\n", "", "the top level is the value 3"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", ":4: b.c", "duplicate key (first on line 3)"),
        ("a: 1\nb: [1\n", ":3", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", ":2", "not valid YAML"),
        ("a: !!python/object:os.system x\n", ":1: a", "is not allowed"),
        ("a: !!int 3\n", ":1: a", "the tag 'int' is not allowed"),
        ("? [1]\n: 2\n", ":1", "a key must be plain text"),
        ("a: &a [*a]\n", ":1: a", "nested deeper"),
        ("[" * 3000, ":1", "not valid YAML"),
        ("a: \x00\n", "", "not valid YAML"),
        (f"a: {'9' * 5000}\n", ":1: a", "too many digits"),
    ],
)
def test_bad_yaml_is_one_error_with_its_place(
    tmp_path: Path, text: str, place: str, message: str
) -> None:
    """Each kind of broken file gives one line that names file, line and key."""
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}{place}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_directory_are_errors(tmp_path: Path) -> None:
    """A path that is no file is named."""
    with pytest.raises(InputError, match="No such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a directory"):
        read_yaml(tmp_path)


def test_text_that_is_not_utf_8_names_the_line(tmp_path: Path) -> None:
    """A wrong byte is shown with its line."""
    with pytest.raises(InputError, match=r"spec.yaml:2: not UTF-8 text \(byte 0xe9\)"):
        read_yaml(write(tmp_path, b"a: 1\nb: caf\xe9\n"))


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    """Windows editors write a mark that is no part of the first key."""
    assert read_yaml(write(tmp_path, b"\xef\xbb\xbfa: 1\n")).data == {"a": 1}


def test_alias_bombs_are_bounded(tmp_path: Path) -> None:
    """Nested aliases that expand to a billion values are refused."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    with pytest.raises(InputError, match="aliases expand too far"):
        read_yaml(write(tmp_path, "\n".join(lines)))


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beyond the limit is not parsed."""
    monkeypatch.setattr(yaml_source, "MAX_BYTES", 1 << 20)
    with pytest.raises(InputError, match="larger than 1 MiB"):
        read_yaml(write(tmp_path, b"#" * ((1 << 20) + 1)))


def test_a_value_is_parsed_as_yaml() -> None:
    """Option values have YAML's types; a broken one is named."""
    assert parse_value("[A, 1]", "option") == ["A", 1]
    assert parse_value("", "option") is None
    with pytest.raises(InputError, match=r"option x:\d: not valid YAML"):
        parse_value("[", "option x")
