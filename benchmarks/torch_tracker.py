"""The peak that torch's own FSDPMemTracker finds for a spec with ``fully_shard``.

    python benchmarks/torch_tracker.py SPEC [--world-size N]

It runs on the fake tensors of ``fsdp-doctor estimate``, where operators behave as on CUDA and
collectives move nothing: the most favourable setting. A first step is not tracked, so that what it
finds is the steady peak. It counts tensors that operators return. What it misses: memory that
kernels take inside (cuBLAS's workspaces above all), what the allocator counts beyond a request
(rounding, which it does on real CUDA devices only, and rests that are not split off), and reserved
memory altogether.

Private: ``torch.distributed._tools.fsdp2_mem_tracker`` (torch 2.13).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.spec import ProfileSpec

TOTAL = "Total"


class _Sink:
    """Passes the training step's batches to the tracker once there is one."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self.tracker: Any = None

    @contextmanager
    def phase(self, phase: Phase, microbatch: int = 0) -> Iterator[None]:
        """Each micro batch counts as an iteration to the tracker, which takes one at a time."""
        if self.tracker is not None and phase is Phase.DATA:
            self.tracker.reset_mod_stats()
        self._observer.begin_phase(0, phase, microbatch)
        yield
        self._observer.end_phase()

    def inputs(self, batch: Any) -> None:
        """Label a batch."""
        self._observer.inputs(batch)
        if self.tracker is not None:
            self.tracker.track_inputs((batch,))


def tracked_peak_bytes(spec: ProfileSpec, rank: int = 0) -> int:
    """Return what the tracker finds on the simulated GPU. Patches torch: once in a process.

    Raises AssertionError or NotImplementedError where the tracker refuses the job.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    from fsdp_doctor.simulator import compat, cuda_autocast, cuda_like
    from fsdp_doctor.simulator.tracker import FakeObserver
    from fsdp_doctor.training.step import build_job
    from fsdp_doctor.training.strategies import RankContext

    observer = FakeObserver(0)  # it answers what the step asks of real data
    compat.join_fake_group(rank, spec.world_size)
    compat.install(observer)
    cuda_like.install(observer.work.kernel)
    cuda_autocast.install()
    context = RankContext(
        rank=rank, local_rank=0, world_size=spec.world_size, device=compat.GPU, fake=True
    )
    sink = _Sink(observer)
    with compat.fake_mode():
        observer.start()
        job: Any = build_job(spec, context, sink)
        observer.watch(job.model, job.optimizer)
        job.run_step(sink)
        sink.tracker = FSDPMemTracker(job.model, job.optimizer)
        with sink.tracker:
            job.run_step(sink)
        observer.stop()
    found: dict[str, int] = sink.tracker.get_tracker_snapshot("peak")[compat.GPU]
    return found[TOTAL]


def main() -> None:
    """Print the peak."""
    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.simulator.estimate import with_world_size

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--world-size", type=int)
    chosen = parser.parse_args()
    spec = with_world_size(load_written_spec(chosen.spec, ()).spec, chosen.world_size)
    print(f"{tracked_peak_bytes(spec):,}")


if __name__ == "__main__":
    main()
