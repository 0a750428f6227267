"""``fsdp-doctor fit SPEC``: which changes make it fit, and what they cost?"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import click

from fsdp_doctor.cli.collection import collect_as_usual
from fsdp_doctor.cli.common import deliver, report_options
from fsdp_doctor.cli.launching import make_launch_options, progress_line
from fsdp_doctor.errors import InputError

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)?", re.IGNORECASE)


@click.command("fit")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option(
    "--memory", metavar="GIB", help="Total memory of the GPU, 80 or 80GiB (else what it reports)."
)
@click.option("--gpu", "gpu_name", default="h200", show_default=True, help="GPU by name.")
@click.option("--world-size", type=click.IntRange(min=1), help="Number of ranks (else the spec's).")
@click.option(
    "--keep",
    metavar="FIELD,...",
    multiple=True,
    help="Fields or sections that must stay, e.g. workload.micro_batch,config.precision.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a spec field.")
@click.option(
    "--max-simulations",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    help="Limit of dry runs.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Dry runs side by side (else one a CPU).")
@click.option(
    "--recorded",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Recorded runs, shown where they are of the very spec that is proposed.",
)
@click.option(
    "--verify",
    "verify_in",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run every prescription with the profiler and keep the runs in DIR.",
)
@click.option(
    "--one-rank-of",
    type=click.IntRange(min=1),
    metavar="N",
    help="The job has N ranks; --verify plays one of them.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="Where --verify runs.",
)
@click.option(
    "--memory-fraction",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --verify on CUDA: limit of the allocator (else what --memory leaves of --gpu).",
)
@report_options
def command(
    *,
    spec: Path,
    memory: str | None,
    gpu_name: str,
    world_size: int | None,
    keep: tuple[str, ...],
    overrides: tuple[str, ...],
    max_simulations: int,
    jobs: int | None,
    recorded: Path | None,
    verify_in: Path | None,
    one_rank_of: int | None,
    device: str,
    memory_fraction: float | None,
    **output: Any,
) -> int:
    """Search the changes that make SPEC fit into a GPU's memory, and say what they cost.

    Every proposed combination is legal by the rules, keeps model, data and global batch, and was
    simulated as by ``estimate``. Step times are first guesses, for direction and rank only.
    """
    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.fit.prescribe import fit
    from fsdp_doctor.fit.recorded import RecordedRuns
    from fsdp_doctor.gpus_table import find_gpu
    from fsdp_doctor.report.fit_document import render_fit

    ranks = one_rank_of or world_size
    if one_rank_of and world_size and one_rank_of != world_size:
        raise InputError("--one-rank-of and --world-size differ", where="--world-size")
    if ranks:
        overrides = (*overrides, f"world_size={ranks}")
    written = load_written_spec(spec, overrides)
    gpu = find_gpu(gpu_name)
    collect_as_usual()
    with progress_line() as tell:
        found = fit(
            written.spec,
            gpu=gpu,
            memory_bytes=None if memory is None else parse_memory(memory),
            keep=[key.strip() for text in keep for key in text.split(",") if key.strip()],
            max_simulations=max_simulations,
            jobs=jobs,
            tell=tell,
            evidence=(lambda _spec: ()) if recorded is None else RecordedRuns(recorded),
        )
        if verify_in is not None:
            from fsdp_doctor.fit.verify import default_fraction, verify

            on_gpu = device == "cuda" or (device == "auto" and _has_gpu())
            limit = memory_fraction or default_fraction(found, gpu.memory_bytes)
            options = make_launch_options(
                {"device": device, "one_rank_of": one_rank_of},
                memory_fraction=limit if on_gpu else None,
            )
            found = verify(found, written, verify_in, options, tell)
    deliver(partial(render_fit, found, written.spec.name), **output)
    failed = any(m.status != "completed" for p in found.prescriptions for m in p.measured)
    return 1 if verify_in is not None and failed else 0


def parse_memory(text: str) -> int:
    """Return the bytes of ``80``, ``80GiB`` or ``81920MiB``; GB and MB are binary too.

    Raises InputError for anything else.
    """
    match = _MEMORY.fullmatch(text.strip())
    scale = 20 if match and (match[2] or "G")[0].upper() == "M" else 30
    found = 0 if match is None else int(float(match[1]) * (1 << scale))
    if found <= 0:
        raise InputError(f"{text!r} is no amount of memory", where="--memory", hint="e.g. 80GiB")
    return found


def _has_gpu() -> bool:
    from fsdp_doctor.gpus import visible_gpu_count

    return visible_gpu_count() > 0
