"""Launches of points in a folder, so that a search that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import click
import msgspec

from fsdp_doctor.attribution.atoms import Flips
from fsdp_doctor.attribution.bisect import BudgetSpentError, Outcome
from fsdp_doctor.attribution.design import Point
from fsdp_doctor.config.spec import spec_to_mapping, written_spec_from_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.run import Run
from fsdp_doctor.profiler.launch import Launcher, LaunchOptions
from fsdp_doctor.runs.reader import is_run_directory, load_manifest, load_run
from fsdp_doctor.runs.writer import MANIFEST_NAME

STATE_NAME = "bisect.json"
_SCHEMA = 1
_TOLD = {"a": "spec A", "b": "spec B", "options": "how it is run", "fields": "the fields"}
_NOT_ITS_OWN = ("interrupted", "launch", "no_space")
"""Failures that are no outcome of the point: it is launched again."""
_FINISHED = ("completed", "failed")


@dataclass(slots=True)
class PointRuns:
    """Runs points below ``directory``; each launch is recorded once and read again later.

    Use as a context manager. ``max_launches`` and ``deadline_s`` (of ``time.monotonic``) limit the
    launches that are made; those that are read again are free.
    """

    directory: Path
    flips: Flips
    options: LaunchOptions
    tell: Callable[[str], None]
    max_launches: int | None = None
    deadline_s: float | None = None
    made: int = 0
    _launcher: Launcher | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # -- the folder ---------------------------------------------------------------------------

    def open(self, *, force: bool) -> None:
        """Claim the folder, or go on in it.

        Raises InputError when it holds the points of other specs or options.
        """
        path = self.directory / STATE_NAME
        told = self._told()
        if force:
            self._remove()
        elif path.exists():
            self._check(path, told)
            return
        elif self.directory.exists() and any(self.directory.iterdir()):
            raise InputError(
                "is not empty and holds no search",
                where=str(self.directory),
                hint="choose another -o",
            )
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
        except OSError as error:
            raise InputError(
                f"cannot write here: {error.strerror or error}", where=str(self.directory)
            ) from None

    def _told(self) -> dict[str, Any]:
        options = self.options
        return {
            "schema": _SCHEMA,
            "a": _plain(spec_to_mapping(self.flips.a)),
            "b": _plain(spec_to_mapping(self.flips.b)),
            "fields": [list(atom.keys) for atom in self.flips.atoms],
            "options": {
                "device": options.device,
                "one_rank_of": options.one_rank_of,
                "rank": options.rank,
                "memory_fraction": options.memory_fraction,
            },
        }

    def _check(self, path: Path, told: dict[str, Any]) -> None:
        try:
            known = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise InputError(f"cannot be read: {error}", where=str(path)) from None
        if not isinstance(known, dict) or known.get("schema") != _SCHEMA:
            raise InputError("no state of a search that this version knows", where=str(path))
        changed = [what for name, what in _TOLD.items() if known.get(name) != told[name]]
        if changed:
            raise InputError(
                f"the search in this folder is another one: {changed[0]} changed since",
                where=str(path),
                hint="choose another -o, or --force to start anew",
            )

    def _remove(self) -> None:
        for folder in self.directory.glob("p-[01]*"):
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            (self.directory / STATE_NAME).unlink()

    def path(self, point: Point, number: int) -> Path:
        """Return where a launch is recorded."""
        bits = "".join("01"[n in point] for n in range(len(self.flips.atoms)))
        return self.directory / f"p-{bits}" / f"launch-{number:03d}"

    def known(self, point: Point, number: int) -> Run | None:
        """Return the run of a launch that came to an end earlier."""
        path = self.path(point, number)
        if not is_run_directory(path):
            return None
        try:
            settled = load_manifest(path / MANIFEST_NAME)
            if settled.status not in _FINISHED:  # cut off, whatever its ranks did since
                return None
            run = load_run(path)
        except InputError:  # killed while it was written
            return None
        failure = run.manifest.failure
        own = failure is None or failure.kind not in _NOT_ITS_OWN
        return run if own else None

    # -- launches -----------------------------------------------------------------------------

    def __call__(self, point: Point, number: int) -> Outcome:
        """Return a launch's outcome: read again, or made now."""
        known = self.known(point, number)
        if known is not None:
            return Outcome(run=known, failure=_failure(known), reused=True)
        try:
            spec = self.flips.spec_at(point)
        except InputError as error:
            return Outcome(failure=f"not valid: {error}")
        self._spend()
        label = f"[{self.made}] {self._named(point)}, launch {number + 1}"
        started = time.monotonic()
        written = written_spec_from_mapping(spec_to_mapping(spec), "the specs between A and B")
        try:
            run = self._launched().run(
                written,
                self.path(point, number),
                replace(self.options, force=True),  # what is there was cut off
                lambda text: self.tell(f"{label}: {text}"),
            )
        except InputError as error:
            return Outcome(failure=f"cannot run: {error}")
        if run.manifest.status == "interrupted":
            raise click.Abort
        return Outcome(run=run, failure=_failure(run), seconds=time.monotonic() - started)

    def _spend(self) -> None:
        if self.max_launches is not None and self.made >= self.max_launches:
            raise BudgetSpentError
        if self.deadline_s is not None and time.monotonic() > self.deadline_s:
            raise BudgetSpentError
        self.made += 1

    def _launched(self) -> Launcher:
        if self._launcher is None:
            self._launcher = self._stack.enter_context(Launcher())
        return self._launcher

    def _named(self, point: Point) -> str:
        if not point:
            return "A"
        if len(point) == len(self.flips.atoms):
            return "B"
        return f"A with {', '.join(self.flips.keys_of(point))}"


def _plain(mapping: dict[str, Any]) -> Any:
    """Return the mapping as JSON reads it back."""
    return msgspec.json.decode(msgspec.json.encode(mapping))


def _failure(run: Run) -> str | None:
    failure = run.manifest.failure
    return None if failure is None else f"{failure.kind}: {failure.message}"
