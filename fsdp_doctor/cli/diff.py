"""``fsdp-doctor diff A B``: what really changed between two configs, and what it means."""

from __future__ import annotations

import sys

import click

from fsdp_doctor.cli.common import emit_json, json_option


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--set-a", "set_a", multiple=True, metavar="KEY=VALUE", help="Change a key of A.")
@click.option("--set-b", "set_b", multiple=True, metavar="KEY=VALUE", help="Change a key of B.")
@click.option("--format", "fmt", metavar="NAME", help="Format of both, when it is not detected.")
@click.option("--format-a", metavar="NAME", help="Format of A.")
@click.option("--format-b", metavar="NAME", help="Format of B.")
@click.option(
    "--framework-version",
    "versions",
    multiple=True,
    metavar="NAME=VERSION",
    help="Rules of this version hold for both, e.g. transformers=5.9. Repeatable.",
)
@click.option(
    "--to",
    "versions_b",
    multiple=True,
    metavar="NAME=VERSION",
    help="Rules of this version hold for B: an upgrade.",
)
@click.option("--params", metavar="N", help="Parameters of the model, e.g. 8B: gives bytes.")
@click.option("--layers", type=click.IntRange(1, 100_000), help="Layers of the model.")
@click.option("--hidden", type=click.IntRange(1, 1_000_000), help="Hidden size of the model.")
@click.option("--world-size", type=click.IntRange(1, 10_000_000), help="Ranks that share a model.")
@json_option
def command(
    *,
    a: str,
    b: str,
    set_a: tuple[str, ...],
    set_b: tuple[str, ...],
    fmt: str | None,
    format_a: str | None,
    format_b: str | None,
    versions: tuple[str, ...],
    versions_b: tuple[str, ...],
    params: str | None,
    layers: int | None,
    hidden: int | None,
    world_size: int | None,
    as_json: bool,
) -> None:
    """Show what really changed between configs A and B and what each change means.

    A and B are configs of any framework, spec files or run directories; files that belong together
    are joined by +: train.yaml+ds.json+job.env. Bytes are per rank, from B's side: + is more in B.
    They are given where a formula and the model's sizes are known.
    """
    from fsdp_doctor.config.diff import diff_configs
    from fsdp_doctor.config.diff_payload import diff_payload, diff_warnings
    from fsdp_doctor.config.load import Known, load_config
    from fsdp_doctor.config.model_size import parse_count
    from fsdp_doctor.config.versions import parse_versions

    known = Known(
        params=None if params is None else parse_count(params),
        layers=layers,
        hidden=hidden,
        world_size=world_size,
    )
    both = parse_versions(versions)
    later = {**both, **parse_versions(versions_b, "--to")}
    left = load_config(a, set_a, format_a or fmt, both, known)
    right = load_config(b, set_b, format_b or fmt, later, known)
    diff = diff_configs(left.config, right.config, left.sizes, right.sizes)
    if as_json:
        emit_json("diff", diff_payload(diff), diff_warnings(left.config, right.config))
        return
    from fsdp_doctor.report.diff_text import render_diff

    render_diff(diff, a, b, sys.stdout, diff_warnings(left.config, right.config))
