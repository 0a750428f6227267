"""``fsdp-doctor estimate SPEC``: what would a rank need, computed without a GPU?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdp_doctor.cli.collection import collect_as_usual
from fsdp_doctor.cli.common import emit_json, json_option, terminal_style
from fsdp_doctor.cli.launching import progress_line
from fsdp_doctor.errors import InputError

if TYPE_CHECKING:
    from fsdp_doctor.model.estimate import Estimate
    from fsdp_doctor.model.spec import ProfileSpec

Tell = Callable[[str], None]


@click.command("estimate")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--world-size", type=click.IntRange(min=1), help="Number of ranks (else the spec's).")
@click.option(
    "--rank",
    "rank_names",
    multiple=True,
    metavar="R|first|last",
    help="Which rank to simulate; repeat for several. Default: first, whose shards are largest.",
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
    help="Short for --alloc-conf expandable_segments:True.",
)
@click.option(
    "--alloc-conf",
    default="",
    metavar="KEY:VALUE,...",
    help="Predict reserved memory under these settings of PYTORCH_CUDA_ALLOC_CONF.",
)
@click.option(
    "--every-layer",
    is_flag=True,
    help="Simulate all layers, also where a few of them tell what the others do.",
)
@click.option(
    "--sweep",
    metavar="KEY=V1,V2,...",
    help="Estimate each value of one field too (also world_size), and compare them in a table.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.png|svg",
    help="Draw the variants of --sweep.",
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
    alloc_conf: str,
    every_layer: bool,
    sweep: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Estimate the memory of one rank: peak by phase and category, reserved, fits or not.

    The training step that ``profile`` runs is run on fake tensors, as one rank of any world size:
    no GPU is needed, and nothing of the model's size is allocated.
    """
    from fsdp_doctor.gpus_table import GIB, find_gpu
    from fsdp_doctor.memory.allocator_conf import parse_alloc_conf
    from fsdp_doctor.report.estimate_text import estimate_payload, render_estimate

    parse_alloc_conf(alloc_conf)
    _check_plot(plot, sweep)
    if world_size is not None:
        overrides = (*overrides, f"world_size={world_size}")
    swept = _swept(sweep)
    specs = [_load(spec, (*overrides, *change)) for change in ((), *((text,) for text in swept))]
    options: dict[str, Any] = {
        "gpu": find_gpu(gpu_name),
        "memory_bytes": None if memory_gib is None else int(memory_gib * GIB),
        "expandable_segments": expandable_segments,
        "alloc_conf": alloc_conf,
        "every_layer": every_layer,
    }
    with progress_line() as tell:
        written, *others = [_estimate(one, rank_names, options, tell) for one in specs]
    rows = list(zip(swept, others, strict=True))
    if plot is not None:
        from fsdp_doctor.report.estimate_plot import save_sweep_plot

        save_sweep_plot([("as written", written), *rows], specs[0].name, plot)
    if as_json:
        payload = estimate_payload(written)
        if sweep:
            payload["sweep"] = [{"set": text} | estimate_payload(one) for text, one in rows]
        emit_json("estimate", payload)
        return
    render_estimate(written, specs[0].name, sys.stdout, sweep=rows, **terminal_style())


def _load(path: Path, overrides: tuple[str, ...]) -> ProfileSpec:
    from fsdp_doctor.config.spec import load_written_spec

    return load_written_spec(path, overrides).spec


def _estimate(
    spec: ProfileSpec, rank_names: tuple[str, ...], options: dict[str, Any], tell: Tell
) -> Estimate:
    from fsdp_doctor.simulator.estimate import estimate

    collect_as_usual()
    ranks = [_rank(name, spec.world_size) for name in rank_names] or [0]
    return estimate(spec, ranks=ranks, tell=tell, **options)


def _check_plot(plot: Path | None, sweep: str | None) -> None:
    if plot is None:
        return
    from fsdp_doctor.report.estimate_plot import check_plot_path

    if sweep is None:
        raise InputError("there is nothing to draw without --sweep", where="--plot")
    check_plot_path(plot)


def _swept(sweep: str | None) -> list[str]:
    """Split ``KEY=A,B`` into overrides, one for each value."""
    if sweep is None:
        return []
    key, equals, values = sweep.partition("=")
    if not equals or not key or not all(values.split(",")):
        raise InputError(f"{sweep!r} is no sweep", where="--sweep", hint="KEY=V1,V2,...")
    return [f"{key}={value}" for value in values.split(",")]


def _rank(name: str, world_size: int) -> int:
    if name in ("first", "last"):
        return 0 if name == "first" else world_size - 1
    try:
        return int(name)
    except ValueError:
        raise InputError(
            f"{name!r} is no rank", where="--rank", hint="a number, first or last"
        ) from None
