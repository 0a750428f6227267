"""``fsdp-doctor verify SPEC``: does this config train right?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp_doctor.cli.common import emit_json, json_option
from fsdp_doctor.cli.launching import progress_line
from fsdp_doctor.profiler.launch import LaunchOptions

if TYPE_CHECKING:
    from fsdp_doctor.profiler.verification import Verification

_SIGNS = {"passed": "ok", "failed": "FAILED", "not_checked": "not checked"}


@click.command("verify")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a spec field.")
@click.option(
    "--ranks", type=click.IntRange(min=1), default=2, help="Real ranks to train on (default 2)."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="auto: CUDA when every rank has a GPU of its own, else CPU with gloo.",
)
@click.option(
    "--phase-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    metavar="SECONDS",
    help="A rank that stays in one phase longer than this hangs (default 120).",
)
@json_option
def command(
    spec: Path,
    overrides: tuple[str, ...],
    ranks: int,
    device: str,
    phase_timeout: float,
    *,
    as_json: bool,
) -> int:
    """Train SPEC for a few steps on real ranks and say whether it trains right.

    The rules of the installed versions, a finite loss at every step, a checkpoint of the config's
    format that can be saved and loaded, and gradients and losses as under plain DDP. What could not
    be looked at here is named. The exit status is 1 when anything failed.
    """
    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.profiler.verification import verify_spec

    written = load_written_spec(spec, (*overrides, f"world_size={ranks}"))
    options = LaunchOptions(device=device, phase_limit_s=phase_timeout)
    with (
        tempfile.TemporaryDirectory(prefix="fsdp-doctor-verify-") as folder,
        progress_line() as tell,
    ):
        result = verify_spec(written, ranks, options, Path(folder), tell)
    if as_json:
        emit_json("verify", {"verification": result})
    else:
        _print(result)
    return int(result.verdict == "failed")


def _print(result: Verification) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    click.echo(
        f"{result.spec}: {result.engine} on {result.ranks} {result.device} ranks ({versions})"
    )
    for check in result.checks:
        rule = f" [{check.rule}]" if check.rule else ""
        click.echo(f"  {_SIGNS[check.status]:<12}{check.name}{rule}: {check.text}")
        if check.fix:
            click.echo(f"  {'':<12}fix: {check.fix}")
    click.echo("It trains right." if result.verdict == "passed" else "It does not train right.")
