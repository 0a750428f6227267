"""``fsdp-doctor show C``: the effective config, what each value comes from, what does nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fsdp_doctor.cli.common import emit_json, json_option


@click.command("show")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--framework-version",
    "versions",
    multiple=True,
    metavar="NAME=VERSION",
    help="Version of a framework or package, e.g. transformers=5.10.1.",
)
@click.option("--format", "fmt", metavar="FORMAT", help="Format of the file, if it is not obvious.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a native key.")
@json_option
def command(
    config: Path,
    versions: tuple[str, ...],
    fmt: str | None,
    overrides: tuple[str, ...],
    *,
    as_json: bool,
) -> None:
    """Show the effective config: every field's value, where it comes from, and whether it acts.

    CONFIG is a config file of any framework, several joined by + (a.yaml+ds.json), a spec or a run
    directory.
    """
    from fsdp_doctor.config.load import load_config
    from fsdp_doctor.config.versions import parse_versions

    loaded = load_config(config, overrides, fmt, parse_versions(versions)).config
    if as_json:
        from fsdp_doctor.report.show_text import show_payload

        emit_json("show", show_payload(loaded), [loaded.assumed] if loaded.assumed else [])
        return
    from fsdp_doctor.report.show_text import render_show

    render_show(loaded, str(config), sys.stdout)
