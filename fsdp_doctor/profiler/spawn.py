"""Two ways to start ranks: torchrun (one launch, any number of hosts) and a fork server (many
short launches on one host). No torch in this process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_doctor.profiler.forkserver import LOG_NAME
from fsdp_doctor.profiler.plan import LaunchPlan
from fsdp_doctor.profiler.ranks import die_with_parent

_STOP_WAIT_S = 10.0


def _environment(local_ranks: int | None) -> dict[str, str]:
    """Return the ranks' environment; host threads are shared out among the ranks of the host.

    (torchrun alone would give each rank one thread, which makes CPU-offloaded optimizers crawl.)
    """
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"  # what a dying rank printed must be in the log
    if local_ranks is not None:
        threads = max(1, (os.cpu_count() or 1) // local_ranks)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path.cwd()), *filter(None, [environment.get("PYTHONPATH")])]
    )
    return environment


class TorchrunLaunch:
    """One launch through ``python -m torch.distributed.run``."""

    def __init__(
        self, plan: LaunchPlan, plan_path: Path, local_ranks: int, options: Sequence[str]
    ) -> None:
        self._log = (Path(plan.run_directory) / LOG_NAME).open("ab")
        rendezvous = list(options) or ["--standalone"]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nproc-per-node", str(local_ranks)),
                *rendezvous,
                *("-m", "fsdp_doctor.profiler.worker", str(plan_path)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=_environment(local_ranks),
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 (one prctl call, no threads yet)
        )

    def poll(self) -> int | None:
        """Return torchrun's exit code, or None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask torchrun to end its workers, then kill it."""
        _stop(self._process)


class ForkServer:
    """Many launches, one import of torch. Use as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fsdp_doctor.profiler.forkserver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(None),  # launches differ in their ranks: see worker
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 (one prctl call, no threads yet)
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_exception: object) -> None:
        _stop(self._process)

    def start(self, plan_path: Path) -> ForkedLaunch:
        """Start a launch."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # poll tells that the server is gone
            self._process.stdin.write(f"{plan_path}\n".encode())
            self._process.stdin.flush()
        return ForkedLaunch(self._process)


class ForkedLaunch:
    """A launch that a fork server runs."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the launch's exit code, or None while it runs."""
        assert self._server.stdout is not None
        if self._code is None and select.select([self._server.stdout], [], [], 0)[0]:
            line = self._server.stdout.readline()
            self._code = int(line) if line.strip() else self._server.wait() or 1
        return self._code

    def stop(self) -> None:
        """End the server and with it every rank."""
        _stop(self._server)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
