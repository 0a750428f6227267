"""Render the reports in this folder from the runs recorded under profiles/.

    python reports/render.py

A test fails when a Markdown or JSON report is not what this writes (HTML holds plots, whose exact
text depends on the version of matplotlib).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.report import render_comparison, render_runs
from fsdp_doctor.runs import load_launches, load_run
from fsdp_doctor.runs.summary import resident_bytes, steady_peak_bytes

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "profiles" / "h200"
PAIRS = {
    "reshard-off": ("fsdp2-reshard", "fsdp2-no-reshard"),
    "ddp-to-fsdp2": ("ddp", "fsdp2-reshard"),
    "checkpointing-on": ("fsdp2-reshard", "fsdp2-checkpoint-full"),
    "bf16-to-fp32": ("fsdp2-reshard", "fsdp2-reshard-fp32"),
    "accumulation-no-sync": ("fsdp2-accumulate-sync", "fsdp2-accumulate-no-sync"),
    "three-fields-two-decoys": (
        "factorial-reshard-save-batch1",
        "factorial-keep-checkpoint-batch2",
    ),
    "nothing-moves": ("fsdp2-reshard", "fsdp2-decoys"),
    "out-of-memory-after": ("fsdp2-checkpoint-full", "../oom/fsdp2-reshard"),
}
"""Report name -> two runs of one rank of 2."""
WITH_HTML = ("reshard-off", "ddp-to-fsdp2")


def reports() -> Iterator[tuple[str, str]]:
    """Yield (file name, text) of every report that is the same on every machine."""
    for name in PAIRS:
        yield from compared(name, {"markdown": "md", "json": "json"})
    yield (
        "h200-out-of-memory.md",
        render_runs(load_launches(RECORDED / "oom" / "fsdp2-reshard"), "markdown"),
    )
    yield "h200-peaks.md", peaks_table()


def compared(name: str, formats: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (file name, text) of one pair in several formats (format -> extension)."""
    a, b = (load_launches(RECORDED / "world-2" / side) for side in PAIRS[name])
    comparison = compare_runs(a, b)
    for fmt, extension in formats.items():
        yield f"h200-{name}.{extension}", render_comparison(comparison, a, b, fmt)


def peaks_table() -> str:
    """Return a Markdown table of all recorded runs: exact bytes."""
    lines = [
        "# Recorded peaks",
        "",
        "One H200, 953,223,168 parameters, one rank of N (`profiles/h200`), peak bytes.",
        "",
        "| run | forward | backward | optimizer | reserved | resident | unknown |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for directory in sorted(RECORDED.glob("world-*/*"), key=_order):
        run = load_run(directory)
        series = run.ranks[0]
        phases = [
            steady_peak_bytes(series, phase)
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
        ]
        reserved = steady_peak_bytes(series, counter="reserved_bytes")
        unknown = series.anatomy.categories.get(Category.UNKNOWN, 0) if series.anatomy else None
        cells = [*phases, reserved, resident_bytes(series), unknown]
        texts = ["-" if cell is None else f"{cell:,}" for cell in cells]
        lines.append(f"| 1 of {run.manifest.world_size}: {directory.name} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _order(directory: Path) -> tuple[int, str]:
    return int(directory.parent.name.removeprefix("world-")), directory.name


def main() -> int:
    """Write every report beside this file."""
    here = Path(__file__).parent
    pages = (page for name in WITH_HTML for page in compared(name, {"html": "html"}))
    for name, text in (*reports(), *pages):
        (here / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
