"""Record real out-of-memory failures with a known cause, for the tests of the diagnosis.

    python benchmarks/record_ooms.py [CASE ...] [--out tests/recorded/ooms] [--list] [--dry-run]

Needs one CUDA device and nobody else on it. Not run yet: no recording is in the repository.

Each case of ``ooms/cases.py`` is run twice or more: once without a limit, to see what every phase
reserves, then under a limit between two phases until the phase that is meant to fail does. Of each
are kept ``log.txt`` (with torch's ``[rank0]:`` prefix), ``snapshot.pickle.gz`` (its oldest events
cut off until it is below 300 kB), ``config.json`` and ``case.json`` (the cause that was put in,
phase and step that really ran, limit). At the end each is diagnosed, and the table of first causes
printed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "ooms"))
from cases import ANY, CASES, OomCase, case_named  # noqa: E402

MAX_BYTES = 300_000
TRIES = 7
RUN_S = 300
OUTSIDE = 3 << 29
"""What a context and the libraries take outside of PyTorch's pool: 1.5 GiB on an H200."""
HOLDER = """
import ctypes, sys, time, torch
torch.zeros(1, device="cuda")
free, total = torch.cuda.mem_get_info()
held = torch.empty(max(free - int(sys.argv[1]), 0), dtype=torch.uint8, device="cuda")
print("holding", flush=True)
time.sleep(3600)
"""


def run_job(case: OomCase, folder: Path, limit: int | None) -> tuple[int, str]:
    """Run the job once; return its status and everything it printed."""
    command = [sys.executable, str(HERE / "ooms" / "job.py"), case.name, "--out", str(folder)]
    if limit is not None:
        command += ["--limit", str(limit)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if case.allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = case.allocator
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=RUN_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def limits(peaks: dict[str, int], case: OomCase) -> list[int]:
    """Return limits to try, from the most likely one to the outermost."""
    low, high = (peaks.get(name, 0) for name in case.between)
    if case.between[0] == "wrap":
        low = low or peaks.get("init", 0)
    span = max(high - low, 64 << 20)
    return [int(low + part * span) for part in (0.5, 0.35, 0.65, 0.2, 0.8, 0.1, -0.1)][:TRIES]


def provoke(case: OomCase, folder: Path) -> tuple[str, int | None] | None:
    """Run a case until it fails where it should; return its output and the limit."""
    if case.phase == "fault" and case.fault in ("cublas", "driver"):
        return _failing(case, folder, None)
    status, printed = run_job(case, folder, None)
    if status != 0:
        print(printed[-2000:], file=sys.stderr)
        return None
    peaks = json.loads((folder / "peaks.json").read_text())
    for limit in limits(peaks, case):
        if case.holder:
            leave = limit + OUTSIDE
            holder = subprocess.Popen(
                [sys.executable, "-c", HOLDER, str(leave)], stdout=subprocess.PIPE, text=True
            )
            try:
                assert holder.stdout is not None
                holder.stdout.readline()
                found = _failing(case, folder, None)
            finally:
                holder.kill()
                holder.wait()
        else:
            found = _failing(case, folder, limit)
        if found is not None:
            return found
    return None


def _failing(case: OomCase, folder: Path, limit: int | None) -> tuple[str, int | None] | None:
    for name in ("truth.json", "snapshot.pickle"):
        (folder / name).unlink(missing_ok=True)
    status, printed = run_job(case, folder, limit)
    truth = folder / "truth.json"
    if status == 0 or not truth.exists():
        return None
    ran = json.loads(truth.read_text())["phase"]
    return (printed, limit) if case.holder or case.phase in (ran, ANY) else None


def trimmed(snapshot: dict[str, Any], most: int = MAX_BYTES) -> bytes:
    """Return a snapshot as gzip of at most ``most`` bytes: its oldest events are cut off.

    The pickle is one that this script's own job has just written.
    """
    while True:
        data = gzip.compress(pickle.dumps(snapshot, protocol=4), 9, mtime=0)
        traces = snapshot["device_traces"]
        longest = max(traces, key=len)
        if len(data) <= most or len(longest) < 64:
            return data
        del longest[: len(longest) // 4]
        first = longest[0].get("time_us", 0)
        notes = snapshot.get("external_annotations") or []
        snapshot["external_annotations"] = [n for n in notes if n.get("time_us", 0) >= first]


def keep(case: OomCase, folder: Path, out: Path, printed: str, limit: int | None) -> None:
    """Write what the tests need."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"[rank0]: {line}" if line else line for line in printed.splitlines()]
    home = str(HERE.parent)
    (out / "log.txt").write_text("\n".join(lines).replace(home, "/workspace") + "\n")
    source = folder / "snapshot.pickle"
    if source.exists():
        snapshot = pickle.loads(source.read_bytes())  # noqa: S301 (our own, just written)
        (out / "snapshot.pickle.gz").write_bytes(trimmed(snapshot))
    config = {**case.spec(), "PYTORCH_CUDA_ALLOC_CONF": case.allocator}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    truth = json.loads((folder / "truth.json").read_text())
    told = {"cause": case.cause, "limit_bytes": limit, "fault": case.fault, **truth}
    (out / "case.json").write_text(json.dumps(told, indent=1) + "\n")


def diagnosed(out: Path) -> list[str]:
    """Return the causes that the tool names, in order."""
    from fsdp_doctor.postmortem import examine

    snapshots = [path for path in (out / "snapshot.pickle.gz",) if path.exists()]
    result = examine([out / "log.txt"], out / "config.json", snapshots)
    return [finding.cause for finding in result.findings]


def main(arguments: list[str] | None = None) -> int:
    """Record the cases asked for, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--out", type=Path, default=HERE.parent / "tests" / "recorded" / "ooms")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run and stop")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.cases) - {case.name for case in CASES})
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; --list names them")
    chosen = [case_named(name) for name in options.cases] or list(CASES)
    if options.list or options.dry_run:
        for case in chosen:
            how = case.allocator or "default allocator"
            print(f"{case.name:28} {case.cause:24} {case.fault:16} {case.phase:10} {how}")
            if options.dry_run:
                print(json.dumps(case.spec()))
        return 0
    missed = 0
    for case in chosen:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = provoke(case, folder)
            if found is None:
                missed += 1
                print(f"{case.name:28} did not fail where it should")
                continue
            keep(case, folder, options.out / case.name, *found)
        causes = diagnosed(options.out / case.name)
        right = causes[:1] == [case.cause]
        missed += not right
        mark = "first" if right else f"MISSED: {', '.join(causes[:3])}"
        print(f"{case.name:28} {case.cause:24} {mark}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} recorded and diagnosed right")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
