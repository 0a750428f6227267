"""Compare resolved configs with what the libraries themselves make of them.

The libraries need a virtual environment of their own (torch for CPU is enough):

    python -m venv /tmp/libraries
    /tmp/libraries/bin/pip install torch==2.13.0
    /tmp/libraries/bin/pip install accelerate==1.15.0 transformers==5.24.0 lightning==2.6.6
    DS_BUILD_OPS=0 /tmp/libraries/bin/pip install deepspeed==0.19.8
    /tmp/libraries/bin/pip install megatron-core==0.16.1 einops
    /tmp/libraries/bin/pip install -e .
    /tmp/libraries/bin/python benchmarks/library_agreement.py [--markdown docs/library-agreement.md]

Older versions: put another one first on PYTHONPATH and give ``--only transformers --append FILE``.

Each case is written to a file, read and resolved here, and given to the library's own objects; the
fields that both have are compared. Exit status 1 when any differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from agreement import (
    accelerate_side,
    deepspeed_side,
    lightning_side,
    megatron_side,
    transformers_side,
)
from agreement.base import Case, Outcome, compare

LIBRARIES: dict[str, Callable[[], Iterator[Case]]] = {
    "accelerate": accelerate_side.cases,
    "transformers": transformers_side.cases,
    "lightning": lightning_side.cases,
    "deepspeed": deepspeed_side.cases,
    "megatron-core": megatron_side.cases,
}
MODULES = {"megatron-core": "megatron.core"}
"""Library -> module, where the names differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One library's result."""

    name: str
    version: str
    outcomes: tuple[Outcome, ...]

    @property
    def fields(self) -> int:
        """Number of compared fields."""
        return sum(len(outcome.compared) for outcome in self.outcomes)

    @property
    def differing(self) -> int:
        """Number of fields that differ."""
        return sum(len(outcome.differing) for outcome in self.outcomes)


def installed(name: str) -> bool:
    """Return whether a library is there."""
    try:
        return importlib.util.find_spec(MODULES.get(name, name)) is not None
    except ModuleNotFoundError:
        return False


def run(name: str) -> Summary:
    """Compare all cases of one library."""
    outcomes = tuple(compare(case) for case in LIBRARIES[name]())
    return Summary(name=name, version=version(name), outcomes=outcomes)


def row(summary: Summary) -> str:
    """Return the line of one library."""
    taken = sum(not outcome.refused for outcome in summary.outcomes)
    cells = (summary.name, summary.version, taken, summary.fields, summary.differing)
    return f"| {' | '.join(map(str, cells))} |"


def table(summaries: list[Summary]) -> str:
    """Return a Markdown document of all results."""
    lines = [
        "# Agreement with the libraries",
        "",
        "Written by `benchmarks/library_agreement.py`; how to run it stands there.",
        "",
        "| library | version | configs | fields compared | differ |",
        "|---|---|---|---|---|",
    ]
    lines += [row(summary) for summary in summaries]
    for summary in summaries:
        lines += ["", f"## {summary.name} {summary.version}", "", "| config | fields | differ |"]
        lines.append("|---|---|---|")
        for outcome in summary.outcomes:
            shown = "; ".join(f"`{k}`: here {a}, there {b}" for k, a, b in outcome.differing)
            shown = "the library refuses it" if outcome.refused else shown or "none"
            lines.append(f"| {outcome.name} | {len(outcome.compared)} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table; return 1 when a field differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    parser.add_argument("--only", choices=list(LIBRARIES), help="compare this library alone")
    parser.add_argument("--append", type=Path, help="add one line to the end of this file")
    arguments = parser.parse_args()
    names = [n for n in LIBRARIES if installed(n) and arguments.only in (None, n)]
    summaries = [run(name) for name in names]
    text = table(summaries)
    print(text)
    for name in LIBRARIES:
        if not installed(name):
            print(f"{name} is not installed: skipped")
    if arguments.markdown is not None:
        arguments.markdown.write_text(text, encoding="utf-8")
    if arguments.append is not None:
        with arguments.append.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{row(summary)}\n" for summary in summaries)
    return 1 if any(summary.differing for summary in summaries) else 0


if __name__ == "__main__":
    sys.exit(main())
