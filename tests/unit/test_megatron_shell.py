"""Static reading of Megatron-LM launch scripts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_cases import fixture, source

from fsdp_doctor.config.loaders import megatron_shell
from fsdp_doctor.config.loaders.shell_eval import evaluate_script
from fsdp_doctor.errors import InputError


def words(script: str) -> list[tuple[str, ...]]:
    """Return the words of each command of a script."""
    return [command.words for command in evaluate_script(script, "s.sh").commands]


def test_arrays_defaults_and_continued_lines() -> None:
    """Arrays, ``${X:-y}``, comments in arrays and line continuations come out as the argv."""
    native = megatron_shell.load(fixture("distopt.sh"))
    values = {name: field.value for name, field in native.fields.items()}
    assert values["num_layers"] == 16
    assert values["micro_batch_size"] == 2
    assert values["lr"] == pytest.approx(3e-4)
    assert values["launcher.nproc_per_node"] == 8
    assert values["mock_data"] is True
    assert native.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_an_array_that_is_not_used_sets_nothing() -> None:
    """Flags of an array that the command does not take are not part of the config."""
    assert "recompute_granularity" not in megatron_shell.load(fixture("distopt.sh")).fields


def test_each_value_knows_the_line_it_was_written_on() -> None:
    """A value's line is where it stands, not where the array is used."""
    native = megatron_shell.load(fixture("distopt.sh"))
    lines = fixture("distopt.sh").lines
    for name, flag in (("hidden_size", "--hidden-size"), ("bf16", "--bf16")):
        line = native.fields[name].line
        assert line is not None
        assert flag in lines[line - 1]


def test_what_needs_running_is_told_with_its_place() -> None:
    """Command substitution keeps its text and is reported with file and line."""
    native = megatron_shell.load(fixture("distopt.sh"))
    assert native.fields["save"].value == "$(mktemp -d)/checkpoints"
    assert any(note.endswith(":10: $(mktemp -d)") for note in native.unresolved)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("X='a b'; c $X \"$X\"", ("c", "a", "b", "a b")),
        ("X=1\nX+=2\nc $X", ("c", "12")),
        ("c ${X:-5} ${X-6} ${Y:=7} $Y", ("c", "5", "6", "7", "7")),
        ("X=1; c ${X:+yes} ${Z:+no}", ("c", "yes")),
        ('A=(1 2)\nA+=(3)\nc ${A[@]} "${A[*]}"', ("c", "1", "2", "3", "1", "2", "3")),
        ('A=()\nc "${A[@]}" x', ("c", "x")),
        ("c a\\\n  b # comment", ("c", "a", "b")),
        ("c \"a'b\" 'c\"d' e\\ f", ("c", "a'b", 'c"d', "e f")),
        ("if [ 1 -lt 2 ]; then c yes; else c no; fi", ("c", "yes")),
        ("X=a\nif [[ $X == b ]]; then c 1; elif [[ -n $X ]]; then c 2; fi", ("c", "2")),
        ('[ -z "" ] && X=1\nc $X', ("c", "1")),
        ("[ a = b ] || c shown", ("c", "shown")),
        ("N=4\nc $((N * (2 + 1))) $(($N/3-5)) $((${N}%3)) $((-N))", ("c", "12", "-4", "1", "-4")),
        ("c $((N+1)) $((1/0)) $((2**3))", ("c", "$((N+1))", "$((1/0))", "$((2**3))")),
        ("bash -c 'c inner'", ("c", "inner")),
        ("CMD='c --x 1'\neval \"$CMD --y\"", ("c", "--x", "1", "--y")),
        ("c --seed 5 2>&1 >out.log | tee x", ("tee", "x")),
    ],
)
def test_forms_of_shell(script: str, expected: tuple[str, ...]) -> None:
    """Each form expands as a shell would expand it."""
    assert words(script)[-1] == expected


@pytest.mark.parametrize(
    "script",
    [
        "for i in 1 2; do X=$i; done\nc x",
        "if [ $UNKNOWN -eq 1 ]; then c hidden; fi\nc x",
        "f() { c hidden; }\nc x",
        "case $1 in a) c hidden;; esac\nc x",
        "while true; do c hidden; done\nc x",
        "cat <<EOF\nc hidden\nEOF\nc x",
    ],
)
def test_what_is_not_followed_runs_no_command(script: str) -> None:
    """Loops, functions, undecided branches and here documents add no command of their own."""
    found = words(script)
    assert found[-1] == ("c", "x")
    assert ("c", "hidden") not in found


def test_redirections_are_no_arguments() -> None:
    """``2>&1``, ``>`` and their targets are left out of the words."""
    assert words("c --seed 5 2>&1 >out.log\n") == [("c", "--seed", "5")]


def test_an_undecided_branch_is_told() -> None:
    """A branch that depends on an unknown variable is reported, and no side is taken."""
    script = evaluate_script("if [ $N -gt 1 ]; then X=1; fi\nc ${X:-0}", "s.sh")
    assert any("s.sh:1: if" in note for note in script.unresolved)
    assert script.commands[-1].words == ("c", "0")


def test_a_flag_that_megatron_lacks_is_unknown() -> None:
    """A flag of a fork is kept with its value and named as unknown."""
    text = "torchrun pretrain_gpt.py --bf16 --num-layers 2 --my-own-flag 3"
    native = megatron_shell.load(source(text))
    assert native.unknown == ("my_own_flag",)
    assert native.fields["my_own_flag"].value == 3


def test_negative_and_inverse_flags() -> None:
    """``--no-x`` stores false under the name that it switches, negative numbers are values."""
    text = "python pretrain_gpt.py --num-layers 2 --no-gradient-accumulation-fusion --seed -1"
    fields = megatron_shell.load(source(text)).fields
    assert fields["gradient_accumulation_fusion"].value is False
    assert fields["seed"].value == -1


def test_a_script_without_a_training_command() -> None:
    """A script whose command cannot be seen ends with one clear line."""
    with pytest.raises(InputError, match="no command"):
        megatron_shell.load(source("run --bf16-ish\n"))


@pytest.mark.parametrize(
    "script",
    [
        "X=aa\n" + "X=$X$X\n" * 60,
        'A=("" "")\n' + 'A+=("${A[@]}")\n' * 60,
        "x " * (1 << 18),
    ],
)
def test_scripts_that_grow_without_bound(script: str) -> None:
    """Doubling variables, doubling arrays and huge scripts end with a clear error."""
    with pytest.raises(InputError, match=r"too far|larger than"):
        evaluate_script(script, "s.sh")


@pytest.mark.parametrize(
    "script", ["${" * 3000, "${A:-" * 2000, '"$(' * 3000, "if x; then\n" * 500, "((((" * 500]
)
def test_unfinished_constructs_end(script: str) -> None:
    """Text that never closes its braces, quotes or branches is read in bounded time."""
    start = time.monotonic()
    evaluate_script(script, "s.sh")
    assert time.monotonic() - start < 10


_PIECES = st.sampled_from(
    [
        "if",
        "then",
        "fi",
        "[",
        "]",
        "$X",
        "${X:-1}",
        '"',
        "'",
        "(",
        ")",
        "A=(",
        ";",
        "&&",
        "||",
        "\\",
        "`",
        "$(",
        "--bf16",
        "x=1",
        "{",
        "}",
        "do",
        "done",
        "for",
        "\n",
        "<<E",
        "E",
        "eval",
        "#",
        ">",
        "2>&1",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_PIECES, max_size=40).map(" ".join) | st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text makes the reader crash; it returns commands or one clear error."""
    try:
        script = evaluate_script(text, "s.sh")
    except InputError:
        return
    for command in script.commands:
        assert len(command.words) == len(command.lines)
