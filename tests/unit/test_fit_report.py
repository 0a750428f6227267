"""What ``fit`` prints: terminal, Markdown, HTML, JSON; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from golden_files import assert_golden

from fsdp_doctor.cli import main
from fsdp_doctor.cli.fit import parse_memory
from fsdp_doctor.errors import InputError
from fsdp_doctor.fit.recorded import RecordedRuns
from fsdp_doctor.fit.verify import default_fraction
from fsdp_doctor.model.fit import (
    Change,
    Fit,
    Measured,
    NeededRanks,
    Refused,
    RelativeRange,
    Variant,
)
from fsdp_doctor.model.work import TimeRange
from fsdp_doctor.report.fit_document import render_fit

GIB = 1 << 30
ROOT = Path(__file__).parent.parent.parent
SPEC = ROOT / "profiles" / "h200" / "specs" / "fsdp2-no-reshard.yaml"

CHECKPOINT = Change(
    name="checkpoint-full",
    title="checkpoint every block",
    saves="activations of blocks",
    costs="blocks run their forward again in backward",
    numerics="same",
)
BFLOAT16 = Change(
    name="pure-bf16",
    title="weights and optimizer state in bfloat16",
    saves="half of parameters, gradients and optimizer state",
    costs="small updates are lost to rounding: convergence must be looked at",
    numerics="precision",
)


def variant(*changes: Change, reserved: float, headroom: float, fits: bool | None) -> Variant:
    """A variant whose overrides are made from its changes' names."""
    return Variant(
        changes=changes,
        overrides=tuple(f"config.{change.name}=true" for change in changes),
        fits=fits,
        peak_allocated_bytes=int((reserved - 1) * GIB),
        peak_reserved_bytes=int(reserved * GIB),
        headroom_bytes=int(headroom * GIB),
        step_time=TimeRange(low_s=0.05, high_s=0.2),
        step_time_change=RelativeRange(low=0.11, high=0.32) if changes else None,
        numerics=changes[-1].numerics if changes else "same",
    )


def sample() -> Fit:
    """An answer with two prescriptions, one of them run."""
    cheap = variant(CHECKPOINT, reserved=30, headroom=8.25, fits=True)
    run = Measured(
        source="runs/fit/prescription-1",
        kind="verified",
        status="completed",
        peak_allocated_bytes=int(28.99 * GIB),
        peak_reserved_bytes=int(30.5 * GIB),
        step_time_s=0.081,
        step_time_change=0.21,
        note="one rank of 8: its step time lacks communication",
    )
    return Fit(
        world_size=8,
        gpu="h200",
        memory_bytes=40 * GIB,
        outside_pytorch_bytes=(GIB, int(1.75 * GIB)),
        as_written=variant(reserved=45, headroom=-6.75, fits=False),
        prescriptions=(
            replace(cheap, measured=(run,)),
            replace(
                variant(CHECKPOINT, BFLOAT16, reserved=20, headroom=18.25, fits=True),
                environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
                warnings=("PT010: gradients are reduced at the last micro batch only.",),
            ),
        ),
        smallest=variant(CHECKPOINT, BFLOAT16, reserved=20, headroom=18.25, fits=True),
        tried=(),
        needed=None,
        refused=(Refused(name="offload", title="offload", reason="--keep config.fsdp2"),),
        kept=("config.fsdp2",),
        simulations=17,
        complete=True,
        assumptions=("step time is a first guess for direction and rank: nothing is decided",),
    )


def nothing(needed: NeededRanks | None) -> Fit:
    """An answer in which nothing fits."""
    return replace(
        sample(),
        prescriptions=(),
        smallest=variant(CHECKPOINT, reserved=39, headroom=-0.75, fits=False),
        needed=needed,
        complete=False,
    )


def test_terminal_report() -> None:
    """What a user reads at 80 columns."""
    assert_golden("fit.txt", render_fit(sample(), "llama", "terminal"))


def test_terminal_report_when_nothing_fits() -> None:
    """The smallest peak that was reached, and at how many ranks it would fit."""
    needed = NeededRanks(world_size=16, tried=(16, 16384), peak_reserved_bytes=35 * GIB)
    assert_golden("fit_nothing.txt", render_fit(nothing(needed), "llama", "terminal"))


@pytest.mark.parametrize(
    ("needed", "text"),
    [
        (None, "More ranks would not make a rank's part smaller"),
        (
            NeededRanks(world_size=None, tried=(16384,), peak_reserved_bytes=39 * GIB),
            "not even 16,384 ranks would do",
        ),
    ],
)
def test_when_more_ranks_do_not_help_it_says_so(needed: NeededRanks | None, text: str) -> None:
    """Unsharded engines, and what is not sharded."""
    assert text in render_fit(nothing(needed), "llama", "terminal", width=200)


def test_what_fits_as_written_needs_no_change() -> None:
    """Neither a prescription nor a failure is reported."""
    roomy = variant(reserved=20, headroom=18, fits=True)
    answer = replace(sample(), as_written=roomy, prescriptions=(), smallest=roomy)
    text = render_fit(answer, "llama", "terminal")
    assert "fits as written" in text
    assert "Nothing fits" not in text


def test_a_larger_gpu_is_limited_to_what_the_memory_would_leave_torch() -> None:
    """Of 40 GiB 1.75 lie outside torch: 38.25 of 153 GiB; never more than all of it."""
    assert default_fraction(sample(), 153 * GIB) == pytest.approx(0.25)
    assert default_fraction(sample(), 10 * GIB) == 1.0


@pytest.mark.parametrize("fmt", ["markdown", "html"])
def test_other_formats_say_the_same(fmt: str) -> None:
    """Titles, texts to paste and numbers are in every format, and nothing is left unescaped."""
    text = render_fit(replace(sample()), "<b>llama</b>", fmt)
    assert "<b>llama" not in text
    for words in ("checkpoint every block", "--set config.checkpoint-full=true", "30.00 GiB"):
        assert words in text


def test_csv_is_refused() -> None:
    """There is no one table that would hold an answer."""
    with pytest.raises(InputError, match="no csv report"):
        render_fit(sample(), "llama", "csv")


def test_json_has_bytes_as_integers_and_unknown_as_null() -> None:
    """The JSON contract."""
    payload = json.loads(render_fit(sample(), "llama", "json"))
    assert payload["command"] == "fit"
    first = payload["prescriptions"][0]
    assert first["overrides"] == ["config.checkpoint-full=true"]
    assert first["peak_reserved_bytes"] == 30 * GIB
    assert first["step_time_change"] == {"low": 0.11, "high": 0.32}
    assert first["measured"][0]["step_time_s"] == 0.081
    assert payload["as_written"]["step_time_change"] is None
    assert payload["needed"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80", 80 * GIB), ("79.5GiB", int(79.5 * GIB)), ("40 GB", 40 * GIB), ("1024MiB", GIB)],
)
def test_memory_is_read_with_and_without_a_unit(text: str, expected: int) -> None:
    """GiB is the unit; GB means the same."""
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "0", "much", "-3", "80TiB", "1e3"])
def test_no_amount_of_memory_is_refused(text: str) -> None:
    """One clear error."""
    with pytest.raises(InputError, match="no amount of memory"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--keep", "config.fsdp9"], "no field 'config.fsdp9'"),
        (["--one-rank-of", "4", "--world-size", "8"], "differ"),
        (["--gpu", "abacus"], "unknown GPU"),
        (["--recorded", str(ROOT / "docs")], "no run with a spec"),
        (["--set", "config.strategy=megatron_fsdp"], "has no table of changes yet"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and one line that names the option, before anything is simulated."""
    assert main(["fit", str(SPEC), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_recorded_runs_are_found_by_their_effective_fields() -> None:
    """The run of the same spec is found whatever its name; that of another one is not."""
    from fsdp_doctor.config.spec import load_written_spec

    runs = RecordedRuns(ROOT / "profiles" / "h200" / "world-2")
    spec = load_written_spec(SPEC, ["config.activation_checkpointing.mode=none"]).spec
    sources = {Path(found.source).name for found in runs(replace(spec, name="other"))}
    assert "fsdp2-no-reshard" in sources
    assert "fsdp2-reshard" not in sources
    assert not runs(replace(spec, world_size=4))
