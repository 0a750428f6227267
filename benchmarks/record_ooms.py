"""Record real out-of-memory failures with a known cause, for the tests of the diagnosis.

    python benchmarks/record_ooms.py [CASE ...] [--out tests/recorded/ooms] [--jobs N]
    python benchmarks/record_ooms.py --diagnose [--markdown docs/oom-recorded.md]

Recording needs one CUDA device with nobody else on it; ``--diagnose`` only reads what was recorded.
``tests/recorded/ooms`` was recorded so on an H200 (torch 2.11.0).

Each case of ``ooms/cases.py`` is run twice: once without a limit, to see what every phase needs,
then under a limit between two phases (``ooms/limits.py``), again with another limit where it
failed elsewhere. Cases that need the whole device for themselves come last, one after the other.
Of each are kept ``log.txt`` as the job printed it, ``snapshot.pickle.gz`` (its oldest events cut
off until it is below 300 kB), ``config.json`` and ``case.json`` (the cause that was put in, phase
and step that really ran, limit). At the end each is diagnosed, from the log alone and with the
snapshot, and the table of first causes printed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "ooms")]
from cases import CASES, OomCase, case_named  # noqa: E402
from keep import keep  # noqa: E402
from limits import Window, as_meant, limit_in, narrowed, window  # noqa: E402
from table import Row, markdown, row, summary  # noqa: E402

TRIES = 4
RUN_S = 60.0
"""What one run of a job may take."""
OUTSIDE = 700 << 20
"""What a context takes outside of PyTorch's pool: about 0.6 GiB on an H200."""
TAIL = 1500
HOLDER = """
import sys, time, torch
torch.zeros(1, device="cuda")
free, total = torch.cuda.mem_get_info()
held = torch.empty(max(free - int(sys.argv[1]), 0), dtype=torch.uint8, device="cuda")
print("holding", flush=True)
time.sleep(600)
"""


class NotRecordedError(Exception):
    """A case did not fail as it should; the text tells what it did."""


class Clock:
    """The time that is left for everything."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Return the seconds left."""
        return self._end - time.monotonic()

    def share(self, most: float) -> float:
        """Return ``most`` seconds, or what is left. Raises NotRecordedError when nothing is."""
        left = self.left()
        if left < 3:
            raise NotRecordedError("no time was left for it")
        return min(most, left)


def environment(case: OomCase) -> dict[str, str]:
    """Return the environment of a case's job."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "2",
    }
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        found.pop(name, None)
    if case.allocator:
        found["PYTORCH_CUDA_ALLOC_CONF"] = case.allocator
    return found


def run_job(
    case: OomCase, folder: Path, limit: int | None, clock: Clock, options: Sequence[str]
) -> tuple[int, str]:
    """Run the job once; return its status and everything it printed."""
    for name in ("truth.json", "snapshot.pickle", "peaks.json"):
        (folder / name).unlink(missing_ok=True)
    command = [sys.executable]
    if case.torchrun and limit is not None:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += [str(HERE / "ooms" / "job.py"), case.name, "--out", str(folder), *options]
    if limit is not None and not case.alone:
        command += ["--limit", str(limit)]
    log = folder / "printed.txt"
    with log.open("wb") as file:
        job = subprocess.Popen(
            command, env=environment(case), stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = job.wait(clock.share(RUN_S))
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            end(job)
    printed = log.read_text(errors="replace")
    if status == -1:
        raise NotRecordedError(f"a run took too long\n{printed[-TAIL:]}")
    return status, printed


def end(job: subprocess.Popen[bytes]) -> None:
    """End a process that this script started, with all that it started."""
    if job.poll() is None:
        try:
            os.killpg(job.pid, signal.SIGKILL)
        except ProcessLookupError:
            job.kill()
        job.wait()


@contextmanager
def held(leave: int, case: OomCase, clock: Clock) -> Iterator[None]:
    """Another process holds all of the device but ``leave`` bytes."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(leave)], env=environment(case),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        ready, _, _ = select.select([holder.stdout], [], [], clock.share(60))
        if not ready or not holder.stdout.readline():
            raise NotRecordedError("the second process did not come to hold the device")
        yield
    finally:
        end(holder)


def peaks_of(case: OomCase, folder: Path, clock: Clock) -> Window:
    """Run a case without a limit; return where its limit lies."""
    status, printed = run_job(case, folder, None, clock, ())
    if status != 0:
        raise NotRecordedError(f"without a limit it ended with {status}\n{printed[-TAIL:]}")
    phases = json.loads((folder / "peaks.json").read_text())
    found = window(phases, case)
    if found is None:
        told = [(p["step"], p["phase"], p["allocated"] >> 20, p["reserved"] >> 20) for p in phases]
        raise NotRecordedError(f"no limit makes {case.phase} fail first; peaks in MiB: {told}")
    return found


def provoke(
    case: OomCase, folder: Path, found: Window | None, clock: Clock
) -> tuple[str, int | None]:
    """Run a case until it fails where it should; return its output and the limit."""
    told: list[str] = []
    for number in range(TRIES):
        limit = limit_in(found, case.aim if number == 0 else 0.5) if found else None
        if case.holder and limit is not None:
            with held(limit + OUTSIDE, case, clock):
                status, printed = run_job(case, folder, limit, clock, ())
        else:
            status, printed = run_job(case, folder, limit, clock, ())
        truth = None
        if (folder / "truth.json").exists():
            truth = json.loads((folder / "truth.json").read_text())
            if as_meant(case, found, truth):
                return printed, limit
        place = f"failed in {truth['phase']} of step {truth['step']}" if truth else "no failure"
        told.append(f"limit {limit}: {place} (status {status})\n{printed[-TAIL // 2 :]}")
        if truth is None and status != 0 and case.torchrun:
            case = replace(case, torchrun=False)  # it is the launcher that does not work here
        elif found is None or (truth is None and status != 0):
            break
        else:
            found = narrowed(found, limit or 0, truth)
    raise NotRecordedError("\n".join(told))


class Recording:
    """One session of recording."""

    def __init__(self, out: Path, clock: Clock) -> None:
        self.out, self.clock = out, clock
        self.windows: dict[str, Window] = {}
        self.recorded: list[str] = []

    def measure(self, case: OomCase) -> None:
        """Find the limit of a case that is provoked later."""
        self._guarded(case, self._measure)

    def record(self, case: OomCase) -> None:
        """Record one case, whatever happens."""
        self._guarded(case, self._record)

    def _guarded(self, case: OomCase, what: object) -> None:
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                text = what(case, Path(name))  # type: ignore[operator]
        except NotRecordedError as error:
            text = f"NOT RECORDED: {error}"
        except Exception:  # noqa: BLE001 (the others go on)
            text = f"NOT RECORDED: {traceback.format_exc()}"
        print(f"{case.name:28} {time.monotonic() - began:4.0f} s  {text}", flush=True)

    def _measure(self, case: OomCase, folder: Path) -> str:
        self.windows[case.name] = peaks_of(case, folder, self.clock)
        return "measured"

    def _record(self, case: OomCase, folder: Path) -> str:
        found = self.windows.get(case.name)
        if found is None and not case.whole_device:
            if case.holder:
                raise NotRecordedError("it was not measured")
            found = peaks_of(case, folder, self.clock)
        printed, limit = provoke(case, folder, found, self.clock)
        kept = keep(case, folder, self.out / case.name, printed, limit)
        self.recorded.append(case.name)
        truth = json.loads((folder / "truth.json").read_text())
        error = truth["error"].replace("\n", " ")[:110]
        size = "no limit" if limit is None else f"limit {limit / (1 << 30):.2f} GiB"
        return f"{size}, {truth['phase']} of step {truth['step']}; {kept}; {error}"

    def run(self, cases: Sequence[OomCase], jobs: int) -> None:
        """Record cases, ``jobs`` at once; those that need the device alone come last."""
        alone = [case for case in cases if case.alone]
        with ThreadPoolExecutor(jobs) as pool:
            first = [pool.submit(self.measure, case) for case in alone if case.holder]
            others = [pool.submit(self.record, case) for case in cases if not case.alone]
            for done in (*first, *others):
                done.result()
        for case in alone:
            self.record(case)


def diagnose(out: Path, names: Sequence[str], jobs: int, page: Path | None = None) -> int:
    """Print the table of causes; return how many are not first with the snapshot."""
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [(name, pool.submit(row, out / name)) for name in sorted(names)]
        for name, done in waiting:
            try:
                found = done.result(timeout=120)
            except Exception as error:  # noqa: BLE001 (the others go on)
                print(f"{name:28} could not be read: {error!r}", flush=True)
                continue
            rows.append(found)
            told, log = ([cause for cause, _ in causes] for causes in (found.both, found.log))
            mark = "first" if found.right else f"MISSED: {', '.join(told[:3])}"
            print(f"{name:28} {found.cause:24} {mark}; log alone: {', '.join(log[:2])}", flush=True)
    print(summary(rows))
    if page is not None:
        page.write_text(markdown(rows))
    return len(names) - sum(found.right for found in rows)


def show_cases(cases: Sequence[OomCase], specs: bool) -> None:
    """Print the cases."""
    for case in cases:
        how = case.allocator or "default allocator"
        print(f"{case.name:28} {case.cause:24} {case.fault:16} {case.phase:10} {how}")
        if specs:
            print(json.dumps(case.spec()))


def main(arguments: list[str] | None = None) -> int:
    """Record the cases asked for, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "recorded" / "ooms")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--max-minutes", type=float, default=60.0, help="time for everything")
    parser.add_argument("--diagnose", action="store_true", help="only read what was recorded")
    parser.add_argument("--markdown", type=Path, help="write the table of --diagnose here")
    parser.add_argument("--no-diagnosis", action="store_true", help="only record")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run and stop")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.cases) - {case.name for case in CASES})
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; --list names them")
    chosen = [case_named(name) for name in options.cases] or list(CASES)
    if options.list or options.dry_run:
        show_cases(chosen, options.dry_run)
        return 0
    if options.diagnose:
        names = [case.name for case in chosen if (options.out / case.name / "case.json").exists()]
        return 1 if diagnose(options.out, names, options.jobs, options.markdown) else 0
    clock = Clock(options.max_minutes)
    recording = Recording(options.out, clock)
    recording.run(chosen, options.jobs)
    print(f"{len(recording.recorded)} of {len(chosen)} recorded", flush=True)
    missed = len(chosen) - len(recording.recorded)
    if not options.no_diagnosis and clock.left() > 30:
        missed += diagnose(options.out, recording.recorded, options.jobs)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
