"""``fsdp-doctor diff A B``: what really changed between two configs, and what it means."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fsdp_doctor.cli.common import emit_json, json_option


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--set-a", "set_a", multiple=True, metavar="KEY=VALUE", help="Change a key of A.")
@click.option("--set-b", "set_b", multiple=True, metavar="KEY=VALUE", help="Change a key of B.")
@json_option
def command(
    a: Path, b: Path, set_a: tuple[str, ...], set_b: tuple[str, ...], *, as_json: bool
) -> None:
    """Show what really changed between configs A and B and what each change means.

    A and B are spec files or run directories. Bytes are per rank, from B's side: + is more in B.
    They are given where a formula and the model's sizes are known.
    """
    from fsdp_doctor.config.diff import diff_configs
    from fsdp_doctor.config.diff_payload import diff_payload
    from fsdp_doctor.config.load import load_config

    left, right = load_config(a, set_a), load_config(b, set_b)
    diff = diff_configs(left.config, right.config, left.sizes, right.sizes)
    if as_json:
        emit_json("diff", diff_payload(diff))
        return
    from fsdp_doctor.report.diff_text import render_diff

    render_diff(diff, str(a), str(b), sys.stdout)
