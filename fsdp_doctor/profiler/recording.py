"""``fsdp_doctor.record``: record a training loop of your own.

    with record("runs/mine", model=model, optimizer=optimizer) as recorder:
        for batch in loader:
            with recorder.step():
                with recorder.phase("forward"):
                    loss = loss_function(model(batch))
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                recorder.loss(loss)

The profiler's own worker writes through the same ``Recorder``.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from fsdp_doctor import __version__
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.run import Failure, RunManifest
from fsdp_doctor.profiler.environment import collect_environment
from fsdp_doctor.profiler.observe import make_observer
from fsdp_doctor.profiler.recorder import Recorder
from fsdp_doctor.runs.verdict import first_failure
from fsdp_doctor.runs.writer import SCHEMA, write_manifest


class Recording:
    """Context manager of ``record``: closes the recorder, or writes down the exception."""

    def __init__(self, recorder: Recorder, manifest: RunManifest | None) -> None:
        self._recorder, self._manifest = recorder, manifest

    def __enter__(self) -> Recorder:
        return self._recorder

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failure = None
        if error is None:
            self._recorder.close()
        else:
            failure = self._write_down(error)
        if self._manifest is not None:
            manifest = replace(
                self._manifest, status="failed" if failure else "completed", failure=failure
            )
            write_manifest(self._recorder.directory, manifest)

    def _write_down(self, error: BaseException) -> Failure:
        """Record the exception; return the first failure of all ranks that is known by now."""
        described = self._recorder.describe(error)
        with contextlib.suppress(OSError):  # the disk may be full: run.json still tells
            self._recorder.fail(error)
        ranks = self._manifest.ranks if self._manifest else (self._recorder.rank,)
        return first_failure(self._recorder.directory, ranks) or described


def record(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    name: str | None = None,
    observe: bool = True,
) -> Recording:
    """Record a training loop of your own into the run directory ``directory``.

    Every rank calls it with the same directory (shared between hosts, or one per host). Rank and
    world size come from ``torch.distributed``; the device is that of the model's parameters.
    With ``observe`` the first three steps are watched allocation by allocation (slower) and tell
    what fills the peak; memory that was allocated before this call is recognised only if it is
    the model's or the optimizer's.

    Raises InputError when the directory already holds a run.
    """
    path = Path(directory)
    ready = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
    if rank == 0 and (path / "run.json").exists():
        raise InputError("already holds a run", where=str(path), hint="choose a new directory")
    path.mkdir(parents=True, exist_ok=True)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    recorder = Recorder(
        path, rank=rank, device=device, observer=make_observer(device) if observe else None
    )
    recorder.start(int(os.environ.get("LOCAL_RANK", rank)))
    recorder.watch(model, optimizer)
    if rank != 0:
        return Recording(recorder, None)
    manifest = RunManifest(
        schema=SCHEMA,
        name=name or path.name,
        tool_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        status="running",
        source="recorded",
        world_size=world_size,
        ranks=tuple(range(world_size)),
        device_type="cuda" if device.type == "cuda" else "cpu",
        environment=collect_environment(device),
    )
    write_manifest(path, manifest)
    return Recording(recorder, manifest)
