"""Render the reports in this folder from the runs recorded under profiles/.

    python reports/render.py

A test fails when a Markdown or JSON report is not what this writes (HTML holds plots, whose exact
text depends on the version of matplotlib).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
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
MEGATRON = ROOT / "profiles" / "h200-megatron"
MEGATRON_PAIRS = {
    "megatron-ddp-to-distopt": ("ddp", "distopt"),
    "megatron-zero1-to-zero3": ("fsdp-optim", "fsdp-params"),
    "megatron-zero1-to-zero2": ("fsdp-optim", "fsdp-grads"),
    "megatron-small-unit": ("fsdp-params", "fsdp-params-small-unit"),
}
"""Report name -> two Megatron runs of one rank of 8."""
WITH_HTML = ("reshard-off", "ddp-to-fsdp2", "megatron-small-unit", "megatron-zero1-to-zero2")


def reports() -> Iterator[tuple[str, str]]:
    """Yield (file name, text) of every report that is the same on every machine."""
    for name in (*PAIRS, *MEGATRON_PAIRS):
        yield from compared(name, {"markdown": "md", "json": "json"})
    yield (
        "h200-out-of-memory.md",
        render_runs(load_launches(RECORDED / "oom" / "fsdp2-reshard"), "markdown"),
    )
    yield "h200-peaks.md", peaks_table()
    yield "h200-megatron.md", megatron_page()


def compared(name: str, formats: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (file name, text) of one pair in several formats (format -> extension)."""
    if name in PAIRS:
        paths = [RECORDED / "world-2" / side for side in PAIRS[name]]
    else:
        paths = [MEGATRON / "of-8" / side for side in MEGATRON_PAIRS[name]]
    a, b = map(load_launches, paths)
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


_TABLE = (
    Category.PARAMETERS,
    Category.UNSHARDED_PARAMETERS,
    Category.GRADIENTS,
    Category.UNSHARDED_GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.ACTIVATIONS,
)
_SECTIONS = (
    (
        "Without a communication unit optim_grads_params gathers the whole model",
        "Megatron-FSDP gathers ahead of the layer in use until half of "
        "`suggested_communication_unit_size` elements are whole, and lets as many gradients "
        "as that number wait for their reduction. Left unset it is *at least* 1,000,000,000 "
        "(the `max` in megatron_fsdp.py that is meant as a cap), so a model of up to half a "
        "billion elements in its layers is gathered whole in every backward: "
        "`unsharded_parameters` is the whole model. Set to about two layers (100,000,000 "
        "here), only embedding, head and two layers are.",
        ("fsdp-optim", "fsdp-params", "fsdp-params-small-unit", "fsdp-params-double-buffer"),
    ),
    (
        "optim_grads keeps every gradient whole until backward ends",
        "Through core 0.19 only `optim_grads_params` divides the model into units. Under "
        "`optim_grads` with the unset unit every gradient of a micro batch waits whole, in "
        "float32, for its reduction: what sharding takes out of `gradients` stands in "
        "`unsharded_gradients`, the peak moves to the end of backward, and reserved memory is"
        " no smaller. A small unit helps here too.",
        ("fsdp-optim", "fsdp-grads", "fsdp-grads-small-unit", "fsdp-params-small-unit"),
    ),
    (
        "An offloaded optimizer leaves its main weights on the GPU",
        "Without the precision-aware optimizer `optimizer_cpu_offload` moves the moments (8 "
        "bytes an element) and keeps the float32 main weights (4 bytes) where they are, with "
        "a copy on the host. A fraction is rounded up to whole parameters of the rank's "
        "shard: as one rank of 8 the shard is a single weight, so one half moves as much as "
        "all.",
        ("distopt-offload-0", "distopt-offload-half", "distopt-offload-all"),
    ),
    (
        "bf16 gradients: smaller under the distributed optimizer, larger under plain DDP",
        "The optimizer copies bf16 gradients to float32 before its step. Plain DDP copies all"
        " of them, the distributed optimizer its shard.",
        ("ddp", "ddp-bf16-grads", "distopt", "distopt-bf16-grads"),
    ),
    (
        "Activation recomputation",
        "Local layers with an unfused attention: its float32 softmax and the bf16 copy of it "
        "are most of what forward saves, so `selective` (core attention) takes more than half"
        " of it.",
        (
            "distopt",
            "distopt-recompute-selective",
            "distopt-recompute-block-4",
            "distopt-recompute-full",
        ),
    ),
)


def megatron_page() -> str:
    """Return the page on the Megatron runs: what each setting moved, then every peak."""
    names = sorted(path.parent.name for path in (MEGATRON / "of-8").glob("*/run.json"))
    parts = [
        "# Megatron's engines on an H200",
        "",
        "One GPT of 0.54 billion parameters (8 layers, width 2048, vocabulary 32768, bf16,",
        "sequence 1024), megatron-core 0.19.2, one rank of N (`profiles/h200-megatron`). MiB at",
        "the allocated peak of a steady step.",
    ]
    for title, text, runs in _SECTIONS:
        parts += ["", f"## {title}", "", *textwrap.wrap(text, 98), "", *_megatron_rows(runs)]
    parts += ["", "## Every run", "", *_megatron_rows(names)]
    return "\n".join(parts) + "\n"


def _megatron_rows(names: Sequence[str]) -> Iterator[str]:
    heads = [category.value.replace("_", " ") for category in _TABLE]
    yield f"| run | peak | in | {' | '.join(heads)} | other | reserved | between steps |"
    yield "|---|--:|---" + "|--:" * (len(heads) + 3) + "|"
    for ranks in (2, 8):
        for name in names:
            series = load_run(MEGATRON / f"of-{ranks}" / name).ranks[0]
            anatomy = series.anatomy
            assert anatomy is not None
            sizes = [anatomy.categories.get(category, 0) for category in _TABLE]
            other = anatomy.peak_allocated_bytes - sum(sizes)
            reserved = steady_peak_bytes(series, counter="reserved_bytes")
            cells = [_mib(size) for size in (*sizes, other, reserved, resident_bytes(series))]
            peak = f"{_mib(anatomy.peak_allocated_bytes)} | {anatomy.peak_phase}"
            yield f"| 1 of {ranks}: {name} | {peak} | {' | '.join(cells)} |"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / (1 << 20):,.0f}"


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
