"""Gates: what they may say, when they fail, and what CI gets to read."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import yaml
from builders import GIB, MIB, make_diff, make_run
from test_cli_compare import OOM, write_run

from fsdp_doctor.attribution.compare import compare_with_diff
from fsdp_doctor.attribution.gate_grammar import parse_gate
from fsdp_doctor.attribution.gates import hold_gates
from fsdp_doctor.cli import COMMANDS, group, main
from fsdp_doctor.errors import InputError
from fsdp_doctor.report.junit import render_junit
from fsdp_doctor.runs import RankWriter, write_manifest

DOCS = Path(__file__).parent.parent.parent / "docs"


def hold(text, a, b, **options):
    """Return the results of one gate on a comparison, without that of ``completed``."""
    comparison = compare_with_diff(a, b, make_diff())
    results = hold_gates([parse_gate(text)], comparison.metrics, a, b, **options)
    assert results[0].gate == "completed"
    return results[1:]


def outcome(text, a, b, **options):
    """Return the one outcome of a gate."""
    (result,) = hold(text, a, b, **options)
    return result.outcome


def peaks(size):
    """Return a rank's peaks with ``size`` bytes of activations in backward."""
    return {"forward": {"parameters": GIB}, "backward": {"parameters": GIB, "activations": size}}


def with_peak(size, **options):
    """Return one launch with a peak of 1 GiB + ``size``."""
    return [make_run(peaks=peaks(size), times=[0.1] * 3, **options)]


def launches(seed, scale, count=5, sigma=0.004):
    """Return launches whose step times differ by ``sigma`` from launch to launch."""
    rng = np.random.default_rng(seed)
    return [
        make_run(
            times=list(0.1 * scale * np.exp(rng.normal(0, sigma) + rng.normal(0, 0.002, 12))),
            world_size=1,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("peak_alocated_bytes>2%", "did you mean peak_allocated_bytes?"),
        ("step_time>3%", "did you mean step_time_s?"),
        ("peak_allocated_bytes>2", "no unit for peak_allocated_bytes"),
        ("peak_allocated_bytes>2ms", "unit 'ms' for peak_allocated_bytes"),
        ("peak_allocated_bytes>2gib", "unit 'gib'"),
        ("peak_allocated_bytes<2%", "less of peak_allocated_bytes is better"),
        ("peak_allocated_bytes>-2%", "a threshold below 0"),
        ("peak_allocated_bytes>=2%", "not a gate"),
        ("peak_allocated_bytes>1e999%", "no finite number"),
        ("tokens_per_s>3%", "e.g. tokens_per_s<-3%"),
        ("tokens_per_s<3%", "e.g. tokens_per_s<-3%"),
        ("step_time_s[rank=x]>3%", "no rank 'x'"),
        ("phase_time_s[phase=backwards]>3%", "did you mean backward?"),
        ("category_bytes[category=activation]>3%", "did you mean activations?"),
        ("peak_allocated_bytes[host=a]>3%", "not a selector"),
        ("peak_allocated_bytes[rank=1,rank=2]>3%", "not a selector"),
        ("", "not a gate"),
    ],
)
def test_a_gate_that_cannot_be_read_says_what_would_be_right(text, hint):
    """One line with the gate and the nearest thing that exists."""
    with pytest.raises(InputError) as error:
        parse_gate(text)
    assert hint in str(error.value)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "threshold", "relative"),
    [
        ("peak_allocated_bytes>2%", 0.02, True),
        (" peak_reserved_bytes > 100 MiB ", 100 * MIB, False),
        ("peak_reserved_bytes>1.5GB", 1.5e9, False),
        ("step_time_s>5ms", 0.005, False),
        ("retries>0", 0, False),
        ("tokens_per_s<-3%", -0.03, True),
    ],
)
def test_thresholds_are_shares_or_amounts_in_the_metrics_unit(text, threshold, relative):
    """``%`` is a share of A; other units are turned into bytes, seconds, counts."""
    gate = parse_gate(text)
    assert gate.threshold == pytest.approx(threshold)
    assert gate.relative is relative


def test_bytes_are_taken_at_their_word():
    """A peak that rose by 10 MiB passes a limit of 10 MiB and fails one byte below."""
    a, b = with_peak(100 * MIB), with_peak(110 * MIB)
    assert outcome("peak_allocated_bytes>10MiB", a, b) == "passed"
    assert outcome(f"peak_allocated_bytes>{10 * MIB - 1}B", a, b) == "failed"
    assert outcome("peak_allocated_bytes>0.5%", a, b) == "failed"
    assert outcome("peak_allocated_bytes>1%", a, b) == "passed"
    assert outcome("peak_allocated_bytes>0B", b, a) == "passed"


def test_selectors_choose_rows_and_stars_take_each():
    """One result for each phase or rank that was measured in both."""
    a, b = with_peak(100 * MIB), with_peak(110 * MIB)
    ranks = hold("peak_allocated_bytes[rank=*]>1MiB", a, b)
    assert [(r.rank, r.outcome) for r in ranks] == [(0, "failed"), (1, "failed")]
    phases = hold("peak_allocated_bytes[phase=*]>1MiB", a, b)
    assert {r.phase: r.outcome for r in phases} == {"forward": "passed", "backward": "failed"}
    (one,) = hold("category_bytes[category=activations]>1MiB", a, b)
    assert (one.category, one.outcome) == ("activations", "failed")


def test_what_was_not_recorded_is_unclear():
    """It fails only where unclear gates are asked to."""
    a = b = with_peak(MIB)
    (result,) = hold("out_of_memory_bytes>1%", a, b)
    assert (result.outcome, result.fails) == ("unclear", False)
    (result,) = hold("out_of_memory_bytes>1%", a, b, fail_on_unclear=True)
    assert (result.outcome, result.fails) == ("unclear", True)


def test_reserved_memory_needs_more_than_its_usual_variation():
    """Identical launches differ by up to 3 % in it, so one launch a side proves 10 %, not 4 %."""
    a = with_peak(MIB, reserved=10_000 * MIB)
    ten, four = (with_peak(MIB, reserved=int(10_000 * MIB * x)) for x in (1.10, 1.04))
    assert outcome("peak_reserved_bytes>2%", a, ten) == "failed"
    assert outcome("peak_reserved_bytes>2%", a, four) == "unclear"
    assert outcome("peak_reserved_bytes>8%", a, four) == "passed"


def test_a_time_fails_only_by_its_whole_interval():
    """Five launches a side of 10 % more: over 3 % for sure, over 10 % perhaps, never over 20 %."""
    a, b = launches(1, 1.0), launches(2, 1.10)
    assert outcome("step_time_s>3%", a, b) == "failed"
    assert outcome("step_time_s>3ms", a, b) == "failed"
    assert outcome("step_time_s>10%", a, b) == "unclear"
    assert outcome("step_time_s>20%", a, b) == "passed"
    assert outcome("tokens_per_s<-3%", a, b) == "failed"
    assert outcome("tokens_per_s<-20%", a, b) == "passed"


def test_single_launches_leave_a_time_unclear():
    """Steps of one launch are no replicates, however many and however slow."""
    a, b = launches(1, 1.0, count=1), launches(2, 2.0, count=1)
    (result,) = hold("step_time_s>3%", a, b)
    assert result.outcome == "unclear"
    assert "at least 3 launches" in result.reason


def test_launches_that_did_not_alternate_leave_a_time_unclear():
    """A drift of the machine would look the same."""
    a, b = launches(1, 1.0), launches(2, 1.5)
    b = [replace(r, manifest=replace(r.manifest, created="2026-02-01T00:00:00Z")) for r in b]
    (result,) = hold("step_time_s>3%", a, b)
    assert result.outcome == "unclear"
    assert "drift of the machine" in result.reason


def test_equal_launches_hardly_ever_fail():
    """Of 60 pairs of equal sides at most two (3 %) fail a gate on time."""
    pairs = [(launches(2 * i, 1.0), launches(2 * i + 1, 1.0)) for i in range(60)]
    failed = [outcome("step_time_s>1%", a, b) == "failed" for a, b in pairs]
    assert sum(failed) <= 2


def write_peak(directory: Path, size: int, name: str = "run") -> Path:
    """Write a run whose peak is ``size`` bytes."""
    directory.mkdir()
    manifest = make_run(name, world_size=1).manifest
    write_manifest(directory, manifest)
    writer = RankWriter(directory, 0)
    counters = {"allocated_bytes": size, "reserved_bytes": size}
    writer.write("phase", {"step": 0, "phase": "forward", "end": counters, "peak": counters})
    writer.write("step", {"step": 0, "kind": "timed"})
    writer.write("end", {})
    writer.close()
    return directory


def test_the_command_fails_and_says_why_in_every_format(tmp_path, capsys):
    """Status 1, the gate first in the report, in JSON, as JUnit XML and in the summary."""
    name = "<b>&\x1b[31m`x`|"
    a = str(write_peak(tmp_path / "a", GIB, name))
    b = str(write_peak(tmp_path / "b", 2 * GIB, name))
    junit, summary = tmp_path / "gates.xml", tmp_path / "summary.md"
    gates = ["--fail-on", "peak_allocated_bytes>2%", "--fail-on", "step_time_s>3%"]
    summary.write_text("earlier\n")
    more = ["--junit", str(junit), "--summary", str(summary)]
    assert main(["compare", a, b, *gates, *more]) == 1
    assert "Gates ─" in capsys.readouterr().out
    suite = ET.fromstring(junit.read_text())[0]
    assert [suite.get(k) for k in ("tests", "failures", "skipped")] == ["3", "1", "1"]
    assert name.replace("\x1b", "\\x1b") in suite.get("name")
    cases = {case.get("classname"): [child.tag for child in case] for case in suite}
    assert cases == {
        "completed": ["system-out"],
        "peak_allocated_bytes>2%": ["failure"],
        "step_time_s>3%": ["skipped"],
    }
    text = summary.read_text()
    assert text.startswith("earlier\n\n# ")
    assert "| `peak_allocated_bytes>2%` | peak allocated | failed |" in text
    assert "<b>" not in text
    assert main(["compare", a, b, *gates, "--json"]) == 1
    payload = json.loads(capsys.readouterr().out)
    found = {gate["gate"]: (gate["outcome"], gate["fails"]) for gate in payload["gates"]}
    assert found == {
        "completed": ("passed", False),
        "peak_allocated_bytes>2%": ("failed", True),
        "step_time_s>3%": ("unclear", False),
    }
    assert main(["compare", b, a, *gates]) == 0
    assert main(["compare", b, a, *gates, "--fail-on-unclear"]) == 1


def test_b_that_died_cannot_pass(tmp_path):
    """A gate on what a dead run did not reach would else stay silent."""
    write_run(tmp_path / "good")
    write_run(tmp_path / "bad", OOM)
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    gate = ["--fail-on", "peak_allocated_bytes>50%"]
    assert main(["compare", good, bad, *gate]) == 1
    assert main(["compare", bad, good, *gate]) == 0
    assert main(["compare", bad, bad, *gate]) == 0


@pytest.mark.parametrize(
    "arguments",
    [["--fail-on", "peak>2%"], ["--junit", "x.xml"], ["--fail-on-unclear"]],
    ids=lambda a: a[0],
)
def test_bad_options_are_unusable_input(arguments, tmp_path, capsys):
    """Status 2 and one line, before anything is read or trained."""
    assert main(["compare", str(tmp_path), str(tmp_path), *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_junit_of_hostile_text_is_well_formed():
    """What XML cannot hold is replaced."""
    a = [make_run("a\x00\ud800]]>", peaks=peaks(MIB))]
    comparison = compare_with_diff(a, a, make_diff())
    results = hold_gates([parse_gate("peak_allocated_bytes>1%")], comparison.metrics, a, a)
    text = render_junit(replace(comparison, gates=results))
    assert ET.fromstring(text.encode()).tag == "testsuites"


def test_the_actions_example_is_yaml_and_its_commands_exist():
    """Every fsdp-doctor line of the page parses with the real command's options."""
    page = (DOCS / "gate.md").read_text()
    workflow = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    steps = workflow["jobs"]["compare"]["steps"]
    commands = [shlex.split(step["run"]) for step in steps if "run" in step]
    ours = [words for words in commands if words[0] == "fsdp-doctor"]
    assert len(ours) == 1
    for _, name, *arguments in ours:
        assert name in COMMANDS
        command = group.get_command(None, name)
        context = command.make_context(name, list(arguments))
        for gate in context.params["fail_on"]:
            parse_gate(gate)
    rows = [line.split("`") for line in page.splitlines() if line.startswith("| `")]
    for row in rows:
        parse_gate(row[1])
