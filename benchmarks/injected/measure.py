"""Runs specs for real, each once and several at a time, and keeps what they measured.

A folder holds ``measured.jsonl`` (one line a launch: spec, peak, or why there is none) and the runs
of the sides of pairs, by the hash of their spec. Whoever has it can judge without a device.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

from fsdp_doctor.config.spec import written_spec_from_mapping
from fsdp_doctor.errors import DoctorError
from fsdp_doctor.model.run import Run
from fsdp_doctor.profiler.launch import Launcher, LaunchOptions
from fsdp_doctor.profiler.ranks import die_with_parent
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import steady_peak_bytes
from injected.pairs import Pair, digest

FILE = "measured.jsonl"
PHASE_LIMIT_S = 100.0
NOT_RUN = "not recorded"
_ATTEMPTS = 2
"""What is left when a process of the pool died is tried again."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a launch gave."""

    spec: str
    """Digest of the spec."""
    peak_allocated_bytes: int | None = None
    """Steady peak of the played rank."""
    failure: str | None = None
    seconds: float = 0.0


class Measurements:
    """Peaks and runs of specs. Use as a context manager; ``jobs`` 0: what is there already."""

    def __init__(
        self, work: Path, *, device: str, ranks: int, jobs: int, until: float | None = None
    ) -> None:
        """``until``: time (``time.time()``) from which no launch is started."""
        self._work, self._until = work, until
        self._options = LaunchOptions(
            device=device, one_rank_of=ranks, force=True, phase_limit_s=PHASE_LIMIT_S
        )
        self._known = {one.spec: one for one in _read(work / FILE)}
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self.ran = 0
        """Launches so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def peak(self, raw: dict[str, Any]) -> int | str:
        """Return the peak of a spec; text: why there is none."""
        found = self._known.get(digest(raw))
        if found is None:
            return NOT_RUN
        if found.peak_allocated_bytes is None:
            return found.failure or NOT_RUN
        return found.peak_allocated_bytes

    def run_of(self, raw: dict[str, Any]) -> Run:
        """Return the run of a pair's side."""
        return load_run(self._work / digest(raw))

    def knows(self, pair: Pair) -> bool:
        """Return whether any launch of a pair was tried."""
        return any(digest(raw) in self._known for raw in pair.every_spec())

    def take(self, pairs: Iterable[Pair]) -> None:
        """Run what is missing of these pairs; failures are kept as such."""
        wanted: dict[str, tuple[dict[str, Any], bool]] = {}
        for pair in pairs:
            ends = {digest(pair.a), digest(pair.b)}
            for raw in pair.every_spec():
                name = digest(raw)
                keep = name in ends or (name in wanted and wanted[name][1])
                if not self._has(name, keep=keep):
                    wanted[name] = (raw, keep)
        if not self._jobs:
            return
        for _ in range(_ATTEMPTS):
            if not wanted:
                return
            for done in self._launched(dict(wanted)):
                self._keep(done)
                del wanted[done.spec]
            if self._pool is not None:
                return

    def _keep(self, done: Measured) -> None:
        self.ran += 1
        self._known[done.spec] = done
        with (self._work / FILE).open("a") as file:
            file.write(json.dumps(vars(done)) + "\n")
        text = done.failure or f"{done.peak_allocated_bytes:,} bytes"
        print(f"  {done.spec}: {text} ({done.seconds:.1f} s)", flush=True)

    def _has(self, name: str, *, keep: bool) -> bool:
        known = self._known.get(name)
        if known is None or known.peak_allocated_bytes is None:
            return False
        return not keep or (self._work / name / "run.json").exists()

    def _launched(self, wanted: dict[str, tuple[dict[str, Any], bool]]) -> Iterator[Measured]:
        """Yield results as they come; a broken pool ends it early, and the next call has a new one.

        Launches that time did not allow give nothing.
        """
        if self._pool is None:
            spawn = get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, spawn, initializer=die_with_parent)
        futures: list[Future[Measured | None]] = [
            self._pool.submit(_launch, raw, self._work / name, self._options, keep, self._until)
            for name, (raw, keep) in wanted.items()
        ]
        for future in as_completed(futures):
            try:
                done = future.result()
            except BrokenProcessPool as error:
                print(f"  a process of the benchmark died: {error}", flush=True)
                self._pool = None
                return
            if done is not None:
                yield done


def _read(path: Path) -> Iterator[Measured]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield Measured(**json.loads(line))


_launcher: Launcher | None = None
"""Of this process."""


def _launch(
    raw: dict[str, Any], directory: Path, options: LaunchOptions, keep: bool, until: float | None
) -> Measured | None:
    """Run one spec in this process's launcher."""
    global _launcher  # noqa: PLW0603 (one for each process of the pool)
    started = time.time()
    if until is not None and started > until:
        return None
    own = directory.with_name(f"{directory.name}.{os.getpid()}")
    failure, peak = None, None
    try:
        if _launcher is None:
            _launcher = Launcher().__enter__()
        run = _launcher.run(
            written_spec_from_mapping(raw, "the benchmark"), own, options, lambda _text: None
        )
        if run.manifest.status == "completed":
            peak = steady_peak_bytes(run.ranks[0])
            failure = None if peak is not None else "nothing was counted"
        else:
            why = run.manifest.failure
            failure = "failed" if why is None else f"{why.kind}: {why.message[:300]}"
            _launcher.__exit__()
            _launcher = None  # a launch that hung takes its server along
    except DoctorError as error:
        failure = str(error)
    except Exception as error:  # noqa: BLE001 (the other launches go on)
        failure = f"{type(error).__name__}: {error}"
    kept = directory if peak is not None else directory.with_name(f"failed-{directory.name}")
    if own.exists() and (keep or peak is None):
        shutil.rmtree(kept, ignore_errors=True)
        own.rename(kept)
    shutil.rmtree(own, ignore_errors=True)
    seconds = round(time.time() - started, 1)
    return Measured(
        spec=directory.name, peak_allocated_bytes=peak, failure=failure, seconds=seconds
    )
