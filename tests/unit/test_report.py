"""Every renderer, on whole, partial, failed and hostile records."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable

import pytest
import report_comparisons as comparisons
import report_samples as samples
from golden_files import assert_golden

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.run import Run
from fsdp_doctor.report import FORMATS, format_of, render_comparison, render_runs, renderer_for

RUNS: dict[str, Callable[[], Run]] = {
    "complete": samples.complete_run,
    "checkpoint": samples.checkpoint_run,
    "one_rank": samples.one_rank_run,
    "failed": samples.failed_run,
    "empty": samples.empty_run,
    "silent_rank": samples.silent_rank_run,
    "cpu": samples.cpu_run,
    "many_ranks": samples.many_ranks_run,
    "hostile": samples.hostile_run,
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", RUNS)
def test_every_renderer_accepts_every_run(name, fmt):
    """Runs with less than everything are rendered, and end with one newline."""
    text = render_runs([RUNS[name]()], fmt)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


@pytest.mark.parametrize("fmt", FORMATS)
def test_several_runs_keep_their_names_apart(fmt):
    """Launches of the same name are numbered."""
    text = render_runs([samples.cpu_run(), samples.cpu_run()], fmt)
    assert "cpu #2" in text.replace("\\#", "#")


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_runs_is_an_empty_report(fmt):
    """An empty list of runs is no error in a renderer."""
    assert render_runs([], fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_renderer_accepts_an_empty_comparison(fmt):
    """A comparison of nothing is rendered, with and without runs."""
    nothing = comparisons.empty_comparison()
    assert render_comparison(nothing, [], [], fmt)
    assert render_comparison(nothing, [samples.empty_run()], [samples.failed_run()], fmt)


@pytest.mark.parametrize(
    ("fmt", "hidden"),
    [
        (fmt, hidden)
        for fmt in FORMATS
        for hidden in ("\x1b", "\x00", "\ud800")
        if (fmt, hidden) != ("json", "\ud800")  # such a name cannot be read from a run file
    ],
)
def test_control_characters_never_reach_the_output(fmt, hidden):
    """A recorded name can neither move a cursor nor break the encoding."""
    run = samples.hostile_run()
    comparison = comparisons.sample_comparison(name_b=f"b{hidden}[2J")
    for text in (render_runs([run], fmt), render_comparison(comparison, [run], [run], fmt)):
        assert hidden not in text
        text.encode("utf-8")


def test_renderers_declare_their_file_extension():
    """The extension of each renderer leads back to its format."""
    from pathlib import Path

    for fmt in FORMATS:
        renderer = renderer_for(fmt)
        assert format_of(Path(f"report{renderer.file_extension}")) == fmt
        assert renderer.is_binary is False


def test_unknown_formats_are_refused():
    """A wrong format or extension names the right ones."""
    from pathlib import Path

    with pytest.raises(InputError, match="terminal, html, markdown, json, csv"):
        render_runs([], "pdf")
    with pytest.raises(InputError, match=r"\.pdf.*\.html"):
        format_of(Path("report.pdf"))


@pytest.mark.parametrize("name", ["complete", "checkpoint", "one_rank", "failed"])
def test_terminal_report_of_a_run(name):
    """The terminal report of a run reads as agreed, at 80 columns."""
    text = render_runs([RUNS[name]()], "terminal")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert_golden(f"report_{name}.txt", text)


def test_terminal_report_of_a_comparison():
    """The terminal report of a comparison reads as agreed, at 80 columns."""
    a, b = samples.complete_run(), samples.complete_run("gpt-no-reshard", regressed=True)
    text = render_comparison(comparisons.sample_comparison(), [a], [b] * 3, "terminal")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert_golden("report_comparison.txt", text)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_terminal_report_never_exceeds_its_width(name, width):
    """No line is wider than the terminal."""
    text = render_runs([RUNS[name]()], "terminal", width=width)
    assert max(len(line) for line in text.splitlines()) <= width


def test_terminal_is_plain_unless_colour_is_asked_for(monkeypatch):
    """Pipes get no escape codes, terminals do, NO_COLOR wins for colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    run = samples.failed_run()
    assert "\x1b[" not in render_runs([run], "terminal")
    assert "\x1b[1;31m" in render_runs([run], "terminal", color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in render_runs([run], "terminal", color=True)


def test_unknown_values_are_dashes_and_never_zero():
    """A run without counters shows no number of bytes."""
    text = render_runs([samples.silent_rank_run()], "terminal")
    assert "peak allocated, all steps seen      -" in text
    assert " 0 B" not in text


def test_one_rank_runs_say_what_they_cannot_know():
    """The header of a one-rank run tells that communication and loss are missing."""
    for fmt in ("terminal", "html", "markdown"):
        text = " ".join(render_runs([samples.one_rank_run()], fmt).split())
        assert "ONE RANK OF 1024 (memory is real, step time lacks communication, no loss)" in text


def test_a_checkpoint_is_told_in_every_format():
    """Memory and time of save and load of each rank, and where parameters did not come back."""
    run = samples.checkpoint_run()
    for fmt in ("terminal", "html", "markdown"):
        text = " ".join(render_runs([run], fmt).split())
        assert "The loaded parameters are not the saved ones on 1 rank: 1." in text
        assert "5.00 GiB" in text
        assert "14.00 GiB" in text
    ranks = json.loads(render_runs([run], "json"))["runs"][0]["ranks"]
    assert [rank["checkpoint"]["restored"] for rank in ranks] == [True, False]
    save, load = ranks[0]["checkpoint"]["phases"]
    assert (save["phase"], load["phase"]) == ("checkpoint_save", "checkpoint_load")
    assert save["peak_allocated_bytes"] - save["allocated_before_bytes"] == 2 * samples.GIB
    assert (save["host_peak_bytes"], load["time_s"]) == (14 * samples.GIB, 2.5)
    nothing = json.loads(render_runs([samples.complete_run()], "json"))["runs"][0]["ranks"]
    assert nothing[0]["checkpoint"] is None


def test_a_checkpoint_that_did_not_end_is_told():
    """A rank that failed while saving has its phase, and the report says it did not end."""
    from dataclasses import replace

    run = samples.checkpoint_run()
    ranks = [replace(series, checkpoint=None) for series in run.ranks]
    assert "It did not come to its end." in render_runs([replace(run, ranks=ranks)], "terminal")
    ranks[0] = run.ranks[0]
    assert "Only 1 of 2 ranks" in render_runs([replace(run, ranks=ranks)], "terminal")


def test_a_loss_that_is_not_finite_is_named():
    """The first step and rank without a finite loss stand in the report."""
    from dataclasses import replace

    run = samples.complete_run()
    first, *others = run.ranks[1].steps
    steps = (replace(first, loss=float("nan"), loss_finite=False), *others)
    broken = replace(run, ranks=(run.ranks[0], replace(run.ranks[1], steps=steps)))
    text = render_runs([broken], "terminal")
    assert "Finite: NO. First not finite in step 0 on rank 1; 1 of 12 records" in text


def test_unexplained_is_shown_even_when_no_row_says_so():
    """What attribution rows do not cover appears as their difference to the metric."""
    from dataclasses import replace

    comparison = comparisons.sample_comparison()
    only_first = replace(comparison, attribution=comparison.attribution[:1])
    text = render_comparison(only_first, [], [], "terminal")
    row = next(line for line in text.splitlines() if "unexplained" in line)
    assert "+512.00 MiB" in row


def test_markdown_tables_have_as_many_cells_as_columns():
    """Pipes in names are escaped, so that rows keep their cells."""
    text = render_runs([samples.hostile_run()], "markdown")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    counts: list[int] = []
    for before, row in zip(["", *rows], rows, strict=False):
        cells = row.replace("\\|", "").count("|")
        if before and text.index(row) - text.index(before) == len(before) + 1:
            counts.append(cells - before.replace("\\|", "").count("|"))
    assert counts
    assert not any(counts)


def test_markdown_names_are_no_markup():
    """Outside of code spans, every special character of a name is escaped."""
    text = render_runs([samples.hostile_run()], "markdown")
    prose = re.sub(r"(?<![\\`])(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert re.search(r"(?<!\\)<(?!br>|/?details>|/?summary>)", prose) is None
    assert re.search(r"(?<!\\)\[bold", prose) is None


def test_markdown_of_a_comparison_leads_with_its_findings():
    """Findings come first, with level, bytes and advice."""
    text = render_comparison(comparisons.sample_comparison(), [], [], "markdown")
    assert text.index("## Findings") < text.index("## What changed") < text.index("## Metrics")
    assert "(error, predicted)" in text
    assert "saves 3.25 GiB" in text
    assert "| resident | 3.00 GiB | 3.00 GiB | 0 B | \\~ | same | exact |" in text
    assert "`accumulation.steps + accumulation.sync (together)`" in text


def test_json_of_runs_keeps_integers_and_nulls():
    """Bytes are exact, what is not known is null, and the envelope is the common one."""
    report = json.loads(render_runs([samples.complete_run()], "json"))
    assert (report["schema"], report["command"]) == (1, "report")
    assert report["warnings"] == ["rank-00001.jsonl:7: line skipped (torn by a crash)"]
    rank = report["runs"][0]["ranks"][0]
    assert rank["steady"]["peak_allocated_bytes"] == sum(samples.PEAKS_A["backward"].values())
    assert rank["out_of_memory_count"] is None
    assert rank["anatomy"]["categories"]["rounding"] == 4096
    assert report["runs"][0]["step_time_s"]["count"] == len(samples.TIMES)


def test_json_of_a_failed_run_has_the_failure():
    """The failure is part of the manifest."""
    report = json.loads(render_runs([samples.failed_run()], "json"))
    failure = report["runs"][0]["manifest"]["failure"]
    assert (failure["kind"], failure["rank"], failure["victims"]) == ("device_oom", 1, [0])


def test_json_of_a_comparison_is_the_compare_contract():
    """A report file of a comparison holds what ``compare --json`` prints."""
    report = json.loads(render_comparison(comparisons.sample_comparison(), [], [], "json"))
    assert report["command"] == "compare"
    assert report["warnings"] == ["A and B ran on different drivers"]
    assert {"metrics", "changed", "attribution", "unexplained", "findings"} <= report.keys()


def test_csv_of_runs_is_long_and_exact():
    """One value a row; integers keep their digits; unknown values have no row."""
    rows = list(csv.DictReader(io.StringIO(render_runs([samples.complete_run()], "csv"))))
    assert list(rows[0]) == ["run", "rank", "step", "phase", "category", "metric", "unit", "value"]
    peaks = [
        row["value"]
        for row in rows
        if (row["rank"], row["step"], row["phase"], row["metric"])
        == ("1", "3", "backward", "peak_allocated_bytes")
    ]
    assert peaks == [str(sum(samples.PEAKS_A["backward"].values()))]
    assert all(row["value"] for row in rows)
    assert not any(row["metric"] == "host_rss_bytes" for row in rows)


def test_csv_of_a_comparison_has_sides_and_attribution():
    """Both sides, the difference with its verdict, and who did it."""
    text = render_comparison(comparisons.sample_comparison(), [], [], "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["side"] for row in rows} == {"a", "b", "delta", "attribution"}
    joint = next(row for row in rows if row["keys"].startswith("accumulation"))
    assert (joint["keys"], joint["value"]) == (
        "accumulation.steps + accumulation.sync",
        str(512 * samples.MIB),
    )
    assert any(row["keys"] == "unexplained" for row in rows)


def test_footnote_marks_are_short():
    """Neighbouring footnotes of a value become a range."""
    from fsdp_doctor.report.layout import marks

    assert marks((3, 4, 5, 6, 9)) == " [3-6,9]"
    assert marks((1, 2)) == " [1,2]"
    assert marks(()) == ""
