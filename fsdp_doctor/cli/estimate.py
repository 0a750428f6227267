"""``fsdp-doctor estimate SPEC``: what would a rank need, computed without a GPU?"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fsdp_doctor.cli.common import emit_json, json_option
from fsdp_doctor.cli.launching import progress_line
from fsdp_doctor.errors import InputError


@click.command("estimate")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--world-size", type=click.IntRange(min=1), help="Number of ranks (else the spec's).")
@click.option(
    "--rank",
    "rank_names",
    multiple=True,
    metavar="R|last",
    help="Which rank to simulate; repeat for several. Default: 0, whose shards are the largest.",
)
@click.option("--gpu", "gpu_name", default="h200", show_default=True, help="GPU by name.")
@click.option(
    "--memory",
    "memory_gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Total memory of the GPU in GiB (else what that GPU reports).",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a spec field.")
@click.option(
    "--expandable-segments",
    is_flag=True,
    help="Predict reserved memory for PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
)
@json_option
def command(
    *,
    spec: Path,
    world_size: int | None,
    rank_names: tuple[str, ...],
    gpu_name: str,
    memory_gib: float | None,
    overrides: tuple[str, ...],
    expandable_segments: bool,
    as_json: bool,
) -> None:
    """Estimate the memory of one rank: peak by phase and category, reserved, fits or not.

    The training step that ``profile`` runs is run on fake tensors, as one rank of any world size:
    no GPU is needed, and nothing of the model's size is allocated.
    """
    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.gpus_table import GIB, find_gpu
    from fsdp_doctor.simulator.estimate import estimate

    if world_size is not None:
        overrides = (*overrides, f"world_size={world_size}")
    loaded = load_written_spec(spec, overrides).spec
    ranks = [_rank(name, loaded.world_size) for name in rank_names] or [0]
    with progress_line() as tell:
        result = estimate(
            loaded,
            gpu=find_gpu(gpu_name),
            memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
            ranks=ranks,
            expandable_segments=expandable_segments,
            tell=tell,
        )
    if as_json:
        from fsdp_doctor.report.estimate_text import estimate_payload

        emit_json("estimate", estimate_payload(result))
        return
    from fsdp_doctor.report.estimate_text import render_estimate

    render_estimate(result, loaded.name, sys.stdout)


def _rank(name: str, world_size: int) -> int:
    if name == "last":
        return world_size - 1
    try:
        return int(name)
    except ValueError:
        raise InputError(f"{name!r} is no rank", where="--rank", hint="a number or last") from None
