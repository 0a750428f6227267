"""``fsdp_doctor.record``: record a training loop of your own.

    with record("runs/mine", model=model, optimizer=optimizer) as recorder:
        batches = iter(loader)
        for _ in range(len(loader)):
            with recorder.step():
                with recorder.phase("data"):
                    batch = next(batches)
                with recorder.phase("forward"):
                    loss = loss_function(model(batch))
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                recorder.loss(loss)

Nothing that recording does wrong may end the loop, but for a file that cannot be written: an
observer that fails leaves a warning in the run. The profiler's own worker writes through the same
``Recorder``.
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
from fsdp_doctor.model.run import Failure, RunManifest, RunStatus
from fsdp_doctor.profiler.environment import collect_environment
from fsdp_doctor.profiler.observe import make_observer
from fsdp_doctor.profiler.recorder import Recorder
from fsdp_doctor.runs.verdict import first_failure
from fsdp_doctor.runs.writer import MANIFEST_NAME, SCHEMA, rank_file_name, write_manifest


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
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._recorder.close()
        else:
            failure = self._write_down(error)
        self._recorder.remove_heartbeat()
        if self._manifest is not None:
            manifest = replace(self._manifest, status=_status(failure), failure=failure)
            write_manifest(self._recorder.directory, manifest)

    def _write_down(self, error: BaseException) -> Failure:
        """Record the exception; return the first failure of all ranks that is known by now."""
        described = self._recorder.describe(error)
        with contextlib.suppress(OSError):  # the disk may be full: run.json still tells
            self._recorder.fail(error)
        ranks = self._manifest.ranks if self._manifest else (self._recorder.rank,)
        return first_failure(self._recorder.directory, ranks) or described


def _status(failure: Failure | None) -> RunStatus:
    if failure is None:
        return "completed"
    return "interrupted" if failure.kind == "interrupted" else "failed"


def choose_device(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Return the device to record: ``device``, or the one the loop works on by all signs.

    That is the CUDA device of a parameter or buffer; else the current one when the process group
    speaks NCCL, or when CUDA is in use (the parameters are offloaded then); else the CPU.
    """
    if device is not None:
        return _with_index(torch.device(device))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cuda":
            return _with_index(tensor.device)
    if torch.cuda.is_available() and (_speaks_nccl() or torch.cuda.is_initialized()):
        return _with_index(torch.device("cuda"))
    return torch.device("cpu")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _speaks_nccl() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"


def record(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    name: str | None = None,
    observe: bool = True,
    device: str | torch.device | None = None,
) -> Recording:
    """Record a training loop of your own into the run directory ``directory``.

    Every rank calls it with the same directory (shared between hosts, or one per host). Rank and
    world size come from ``torch.distributed``; ``device`` is found out where it is not given
    (``choose_device``). With ``observe`` the first three steps are watched allocation by
    allocation (slower) and tell what fills the peak; memory that was allocated before this call is
    recognised only if it is the model's or the optimizer's. On CUDA that takes the allocator's
    history: while somebody else has it on nothing is observed, and one that is turned on during
    those steps ends with them.

    Raises InputError when the directory already holds a run.
    """
    path = Path(directory)
    ready = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
    _refuse_used(path, rank)
    path.mkdir(parents=True, exist_ok=True)
    chosen = choose_device(model, device)
    recorder = Recorder(
        path, rank=rank, device=chosen, observer=make_observer(chosen) if observe else None
    )
    recorder.start(int(os.environ.get("LOCAL_RANK", rank)))
    recorder.watch(model, optimizer)
    if rank != 0:
        return Recording(recorder, None)
    environment = collect_environment(chosen)
    manifest = RunManifest(
        schema=SCHEMA,
        name=name or path.name,
        tool_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        status="running",
        source="recorded",
        world_size=world_size,
        ranks=tuple(range(world_size)),
        device_type="cuda" if chosen.type == "cuda" else "cpu",
        device_name=environment["device_name"],
        environment=environment,
    )
    write_manifest(path, manifest)
    return Recording(recorder, manifest)


def _refuse_used(path: Path, rank: int) -> None:
    """Raise InputError on every rank whose file is there; rank 0 looks for run.json too."""
    names = [rank_file_name(rank), *([MANIFEST_NAME] if rank == 0 else [])]
    if any((path / name).exists() for name in names):
        raise InputError("already holds a run", where=str(path), hint="choose a new directory")
