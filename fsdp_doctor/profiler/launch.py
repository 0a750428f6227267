"""Turn specs into recorded runs: prepare the directory, start the ranks, settle the outcome.

No torch in this process; the ranks import it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from fsdp_doctor import __version__
from fsdp_doctor.config.megatron_support import known_wrong, refuse
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.spec import WrittenSpec, spec_to_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.gpus import visible_gpu_count
from fsdp_doctor.model.config import ConfigValue
from fsdp_doctor.model.run import Failure, Run, RunManifest, RunStatus
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.profiler.forkserver import LOG_NAME
from fsdp_doctor.profiler.plan import PLAN_NAME, LaunchPlan, read_plan
from fsdp_doctor.profiler.spawn import ForkServer, TorchrunLaunch
from fsdp_doctor.profiler.supervise import Outcome, Progress, supervise
from fsdp_doctor.redact import redact, redact_text
from fsdp_doctor.runs.heartbeat import heartbeat_path
from fsdp_doctor.runs.reader import load_manifest, load_run
from fsdp_doctor.runs.verdict import first_failure, hang_failure
from fsdp_doctor.runs.writer import MANIFEST_NAME, SCHEMA, write_manifest

_NEEDED_FREE_BYTES = 64 << 20
"""A run takes well under 1 MiB per rank; below this the disk is as good as full."""


_CLAIM_NAME = ".leading-host"
_LEAD_WAIT_S = 120.0
_STALE_S = 60.0
_NOT_OBSERVED = (
    "compiled on a CPU: under the dispatch mode that counts memory torch would not compile, so "
    "this run has times only"
)
_NO_SPACE = re.compile("No space left|Disk quota exceeded|File too large")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How specs are executed."""

    device: str = "auto"
    """``cuda``, ``cpu`` or ``auto``."""
    one_rank_of: int | None = None
    """Play one rank of this many instead of starting all ranks."""
    rank: int = 0
    """Which rank to play."""
    phase_limit_s: float = 300.0
    """A rank that stays in one phase longer than this hangs."""
    memory_fraction: float | None = None
    """Limit the CUDA allocator to this fraction of the device."""
    nodes: int = 1
    """Hosts; each starts ``world_size / nodes`` ranks."""
    torchrun: tuple[str, ...] = ()
    """Further options of torchrun (rendezvous), as its own command line has them."""
    observe: bool = True
    """Watch the first steps allocation by allocation."""
    record: bool = True
    """Record phases of timed steps (off only to measure the cost of recording)."""
    force: bool = False
    """Replace an existing run."""


def profile(spec: WrittenSpec, directory: Path, options: LaunchOptions, progress: Progress) -> Run:
    """Run ``spec`` once through torchrun (or as one rank) and return the recorded run.

    A job that fails is a result too: see ``manifest.failure``. Raises InputError before training
    starts when the directory cannot be used or there are fewer GPUs than ranks.
    """
    if options.one_rank_of:
        return profile_many([(spec, directory)], options, progress)[0]
    leads = options.nodes == 1 or _claim(directory, options)
    if leads:
        try:
            _check(spec, directory, options)
            _prepare(spec, directory, options)
        except BaseException:
            with contextlib.suppress(OSError):
                (directory / _CLAIM_NAME).unlink()
            raise
    else:
        _check_devices(spec.spec, options)
        _wait_for_plan(directory / PLAN_NAME)
    plan = read_plan(directory / PLAN_NAME)
    local_ranks = _local_ranks(spec.spec, options)
    with _terminable():
        launch = TorchrunLaunch(plan, directory / PLAN_NAME, local_ranks, options.torchrun)
        outcome = supervise(launch, directory, plan.ranks, options.phase_limit_s, progress)
    if leads:
        return _settle(plan, directory, outcome, options.phase_limit_s)
    return _as_this_host_saw_it(plan, directory, outcome, options.phase_limit_s)


def profile_many(
    jobs: Sequence[tuple[WrittenSpec, Path]], options: LaunchOptions, progress: Progress
) -> list[Run]:
    """Run many launches on this host, each in fresh processes forked from one that knows torch.

    All are checked before the first starts. After Ctrl-C the remaining ones are not started.
    """
    for spec, directory in jobs:
        _check(spec, directory, options)
    runs: list[Run] = []
    with Launcher() as launcher:
        for number, (spec, directory) in enumerate(jobs, 1):
            label = f"[{number}/{len(jobs)}] {'/'.join(directory.parts[-2:])}"

            def tell(text: str, label: str = label) -> None:
                progress(f"{label}: {text}")

            runs.append(launcher.run(spec, directory, options, tell))
            if runs[-1].manifest.status == "interrupted":
                break
    return runs


class Launcher:
    """Runs launches one after another on this host; torch is imported once, by a process apart."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_terminable())
        self._server = self._stack.enter_context(ForkServer())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(
        self, spec: WrittenSpec, directory: Path, options: LaunchOptions, progress: Progress
    ) -> Run:
        """Run ``spec`` once, in fresh processes, and return the recorded run."""
        _check(spec, directory, options)
        plan = _prepare(spec, directory, options)
        launch = self._server.start(directory / PLAN_NAME)
        outcome = supervise(launch, directory, plan.ranks, options.phase_limit_s, progress)
        return _settle(plan, directory, outcome, options.phase_limit_s)


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a scheduler's end is as clean as the user's."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _redacted(fields: dict[str, ConfigValue]) -> dict[str, ConfigValue]:
    return {
        key: replace(field, value=redact(field.value, key), written=redact(field.written, key))
        for key, field in fields.items()
    }


def _local_ranks(spec: ProfileSpec, options: LaunchOptions) -> int:
    if spec.world_size % options.nodes:
        raise InputError(
            f"world_size {spec.world_size} cannot be divided over {options.nodes} nodes",
            where="--nnodes",
        )
    return spec.world_size // options.nodes


def _check(written: WrittenSpec, directory: Path, options: LaunchOptions) -> None:
    """Raise InputError when the launch cannot work; leave its directory ready."""
    _check_devices(written.spec, options)
    on_cpu = not _on_gpus(written.spec, options)
    refuse(written.spec, fake=options.one_rank_of is not None, on_cpu=on_cpu)
    _check_directory(directory, force=options.force)


def _prepare(written: WrittenSpec, directory: Path, options: LaunchOptions) -> LaunchPlan:
    """Write manifest and plan of a launch that is about to start."""
    spec = written.spec
    world_size = options.one_rank_of or spec.world_size
    played = replace(spec, world_size=world_size)
    unobservable = spec.config.compile and not _on_gpus(spec, options)
    plan = LaunchPlan(
        run_directory=str(directory.resolve()),
        spec=spec_to_mapping(played),
        world_size=world_size,
        one_rank_of=options.one_rank_of,
        rank=options.rank,
        device=options.device,
        observe=options.observe and not unobservable,
        record=options.record,
        memory_fraction=options.memory_fraction,
    )
    write_manifest(
        directory,
        RunManifest(
            schema=SCHEMA,
            name=spec.name,
            tool_version=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            status="running",
            source="one_rank" if options.one_rank_of else "real_ranks",
            world_size=world_size,
            ranks=plan.ranks,
            device_type="cuda" if options.device == "cuda" else "cpu",
            spec=redact(plan.spec),
            effective_config=_redacted(resolve_spec(played, written.written).fields),
            warnings=(
                *(f"rule {v.rule}: {v.message}" for v in known_wrong(played)),
                *([_NOT_OBSERVED] if unobservable else []),
            ),
        ),
    )
    plan.write()
    return plan


def _claim(directory: Path, options: LaunchOptions) -> bool:
    """Return whether this host keeps run.json: of several hosts with one directory, the first.

    A directory that already held a finished run is refused by ``_check`` on the host that leads.
    """
    claim = directory / _CLAIM_NAME
    try:
        if options.force and time.time() - claim.stat().st_mtime > _STALE_S:
            claim.unlink(missing_ok=True)  # of an earlier try whose leader died
    except OSError:
        pass
    try:
        directory.mkdir(parents=True, exist_ok=True)
        claim.open("x").close()
    except FileExistsError:
        return False
    except OSError as error:
        raise InputError(
            f"cannot write here: {error.strerror or error}", where=str(directory)
        ) from None
    return True


def _wait_for_plan(path: Path) -> None:
    """Wait for the plan of this try; one that an earlier try left is not followed."""
    started = time.time()
    while not (path.is_file() and path.stat().st_mtime > started - _STALE_S):
        if time.time() > started + _LEAD_WAIT_S:
            raise InputError(
                "the leading host did not prepare the run",
                where=str(path.parent),
                hint="give every host the same, shared -o; after a crash use --force",
            )
        time.sleep(0.1)


def _on_gpus(spec: ProfileSpec, options: LaunchOptions) -> bool:
    """Return whether every rank of this host gets a GPU (as ``worker.choose_device`` decides)."""
    needed = 1 if options.one_rank_of else _local_ranks(spec, options)
    return options.device == "cuda" or (options.device == "auto" and visible_gpu_count() >= needed)


def _check_devices(spec: ProfileSpec, options: LaunchOptions) -> None:
    needed = 1 if options.one_rank_of else _local_ranks(spec, options)
    if options.device == "cuda" and visible_gpu_count() < needed:
        raise InputError(
            f"{needed} ranks need {needed} GPUs, this host shows {visible_gpu_count()}",
            where="--device cuda",
            hint="use --device cpu, a smaller world_size, or --one-rank-of",
        )
    if options.one_rank_of and not 0 <= options.rank < options.one_rank_of:
        raise InputError(
            f"rank {options.rank} is not one of 0..{options.one_rank_of - 1}", where="--rank"
        )


def _check_directory(directory: Path, *, force: bool) -> None:
    """Make the directory usable, or say why not before any training starts."""
    where = str(directory)
    if (directory / MANIFEST_NAME).exists():
        if not force:
            raise InputError("already holds a run", where=where, hint="use --force to replace it")
        for path in [*directory.glob("rank-*"), directory / LOG_NAME, directory / MANIFEST_NAME]:
            path.unlink(missing_ok=True)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise InputError(
            f"cannot write here: {error.strerror or error}", where=where, hint="choose another -o"
        ) from None
    if free < _NEEDED_FREE_BYTES:
        raise InputError(
            f"only {free} bytes free, {_NEEDED_FREE_BYTES} needed",
            where=where,
            hint="free some space or choose another -o",
        )


def _settle(plan: LaunchPlan, directory: Path, outcome: Outcome, limit_s: float) -> Run:
    """Write the final status into run.json, tidy up, and read the run back."""
    failure = _failure(plan, directory, outcome, limit_s)
    status: RunStatus = "completed"
    if failure is not None:
        status = "interrupted" if failure.kind == "interrupted" else "failed"
    manifest = load_manifest(directory / MANIFEST_NAME)
    write_manifest(directory, replace(manifest, status=status, failure=failure))
    _tidy(plan, directory, keep_log=failure is not None)
    return load_run(directory)


def _as_this_host_saw_it(
    plan: LaunchPlan, directory: Path, outcome: Outcome, limit_s: float
) -> Run:
    """Read the run with the outcome of this host's ranks: the leading host may still write it."""
    failure = _failure(plan, directory, outcome, limit_s)
    status: RunStatus = "completed" if failure is None else "failed"
    run = load_run(directory)
    return replace(run, manifest=replace(run.manifest, status=status, failure=failure))


def _failure(plan: LaunchPlan, directory: Path, outcome: Outcome, limit_s: float) -> Failure | None:
    if outcome.interrupted:
        return Failure(kind="interrupted", message="stopped by Ctrl-C or SIGTERM")
    if outcome.hung_ranks:
        return hang_failure(directory, outcome.hung_ranks, outcome.heartbeats, limit_s)
    if outcome.exit_code == 0:
        return None
    known = first_failure(directory, plan.ranks)
    if known is not None:
        return known
    last = _last_line(directory)
    return Failure(
        kind="no_space" if _NO_SPACE.search(last) else "launch",
        message=f"the launcher ended with exit code {outcome.exit_code}: {last}",
        exit_code=outcome.exit_code,
    )


def _last_line(directory: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (directory / LOG_NAME).read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1][:500]
    return "no output"


def _tidy(plan: LaunchPlan, directory: Path, *, keep_log: bool) -> None:
    for rank in plan.ranks:
        heartbeat_path(directory, rank).unlink(missing_ok=True)
        stack = directory / f"rank-{rank:05d}.stack"
        if stack.exists() and stack.stat().st_size == 0:
            stack.unlink()
    for name in (PLAN_NAME, _CLAIM_NAME):
        (directory / name).unlink(missing_ok=True)
    log = directory / LOG_NAME
    if not keep_log:
        log.unlink(missing_ok=True)
    elif log.exists():
        log.write_text(redact_text(log.read_text(errors="replace")))
