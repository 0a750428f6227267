"""``fsdp-doctor check C``: the rules of its framework that a config breaks."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fsdp_doctor.cli.common import emit_json, json_option


@click.command("check")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--framework-version",
    "versions",
    multiple=True,
    metavar="NAME=VERSION",
    help="Version of a framework or package, e.g. megatron-core=0.16.1.",
)
@click.option("--gpu", metavar="NAME", help="GPU or architecture: h100, hopper, blackwell, ...")
@click.option(
    "--world-size", type=click.IntRange(1, 1 << 24), metavar="N", help="Number of ranks of the job."
)
@click.option("--format", "fmt", metavar="FORMAT", help="Format of the file, if it is not obvious.")
@json_option
def command(
    config: Path,
    versions: tuple[str, ...],
    gpu: str | None,
    world_size: int | None,
    fmt: str | None,
    *,
    as_json: bool,
) -> int:
    """Check CONFIG against the rules of its framework, of its version.

    CONFIG is a config file of any framework, several joined by + (a.yaml+ds.json), a spec or a run
    directory. error: the job stops or computes wrong numbers; warning: not what was asked for;
    note: without effect. The exit status is 1 when there are errors.
    """
    from fsdp_doctor.config.rules import Job
    from fsdp_doctor.config.rules.files import check_path
    from fsdp_doctor.config.rules.gpu_names import architecture_of
    from fsdp_doctor.config.versions import parse_versions

    job = Job(gpu_arch=architecture_of(gpu) if gpu else None, world_size=world_size)
    checked = check_path(config, fmt=fmt, versions=parse_versions(versions), job=job)
    if as_json:
        from fsdp_doctor.report.check_text import check_payload

        emit_json("check", check_payload(checked), [checked.assumed] if checked.assumed else [])
    else:
        from fsdp_doctor.report.check_text import render_check

        render_check(checked, str(config), sys.stdout)
    return int(any(v.severity == "error" for v in checked.result.violations))
