"""The options of ``compare`` for CI: limits on metrics, and where their outcome is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsdp_doctor.cli.common import write_text
from fsdp_doctor.errors import InputError

if TYPE_CHECKING:
    from fsdp_doctor.model.comparison import Comparison
    from fsdp_doctor.model.gate import Gate
    from fsdp_doctor.model.run import Run

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--fail-on",
        "fail_on",
        multiple=True,
        metavar="GATE",
        help="Exit with status 1 when this metric got worse by more: 'METRIC>THRESHOLD'. Repeat.",
    ),
    click.option(
        "--fail-on-unclear", is_flag=True, help="Also when the statistics allow no word on a gate."
    ),
    click.option(
        "--junit",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the gates as JUnit XML (replaces the file).",
    ),
    click.option(
        "--summary",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Append a Markdown summary to this file, e.g. $GITHUB_STEP_SUMMARY.",
    ),
)


def gate_options(function: F) -> F:
    """Add the options of ``GateOptions`` to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """What the user asked to be held against the comparison."""

    gates: tuple[Gate, ...]
    fail_on_unclear: bool
    junit: Path | None
    summary: Path | None

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> GateOptions:
        """Take the options out of a command's parameters. Raises InputError for a bad gate."""
        from fsdp_doctor.attribution.gate_grammar import parse_gate

        found = cls(
            gates=tuple(parse_gate(text) for text in options.pop("fail_on", ())),
            fail_on_unclear=bool(options.pop("fail_on_unclear", False)),
            junit=options.pop("junit", None),
            summary=options.pop("summary", None),
        )
        for name, given in (("--junit", found.junit), ("--fail-on-unclear", found.fail_on_unclear)):
            if given and not found.gates:
                raise InputError(f"{name} needs a gate", hint="give --fail-on too")
        return found

    def refuse(self, what: str, where: Path) -> None:
        """Raise InputError when a gate or a file was asked for where there is no comparison."""
        if self.gates or self.summary:
            raise InputError(f"gates and summaries are of runs, not of {what}", where=str(where))

    def held(self, comparison: Comparison, a: Sequence[Run], b: Sequence[Run]) -> Comparison:
        """Return the comparison with what became of the gates."""
        if not self.gates:
            return comparison
        from fsdp_doctor.attribution.gates import hold_gates

        results = hold_gates(
            self.gates, comparison.metrics, a, b, fail_on_unclear=self.fail_on_unclear
        )
        return replace(comparison, gates=results)

    def write(self, comparison: Comparison) -> None:
        """Write the files asked for and say so on standard error."""
        if self.junit is not None:
            from fsdp_doctor.report.junit import render_junit

            write_text(self.junit, render_junit(comparison))
            click.echo(f"Wrote {self.junit}", err=True)
        if self.summary is not None:
            from fsdp_doctor.report.gates import gate_summary

            append_text(self.summary, gate_summary(comparison))
            click.echo(f"Added to {self.summary}", err=True)


def append_text(path: Path, text: str) -> None:
    """Add a paragraph to a file, new where there is none. Raises InputError."""
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(("\n" if stream.tell() else "") + text)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
