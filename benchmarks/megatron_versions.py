"""Which Megatron strategies train right with the installed megatron-core: two CPU processes each.

    python benchmarks/megatron_versions.py [--output docs/megatron-versions/0.19.2.txt]

Needs torch, megatron-core, einops (and triton for core 0.19) and nothing else of this project's
dependencies, so that it runs in an environment of its own for a version that the tests do not have.
Prints gradient norms against Megatron's DDP, checkpoints that were restored, and one rank of 8
through a fake process group.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import shutil
import subprocess
import sys
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

_FSDP = {"use_megatron_fsdp": True}
_MAIN = {"grad_reduce_in_fp32": True, "megatron_fsdp_main_grads_dtype": "float32"}
_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_SHARD = "data_parallel_sharding_strategy"
_FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_SMALL = {"suggested_communication_unit_size": 100_000}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "ddp": ({}, _MAIN, {}, "torch_dist"),
    "ddp, overlap": ({}, {**_MAIN, "overlap_grad_reduce": True}, {}, "full"),
    "distributed optimizer": (
        {},
        {**_MAIN, **_OVERLAP, "use_distributed_optimizer": True},
        {},
        "torch_dist",
    ),
    "distributed optimizer, full recompute": (
        {},
        {**_MAIN, "use_distributed_optimizer": True},
        _FULL,
        "",
    ),
    "distributed optimizer, selective recompute": (
        {},
        {**_MAIN, "use_distributed_optimizer": True},
        {"recompute_granularity": "selective"},
        "",
    ),
    "fsdp no_shard": (_FSDP, {**_MAIN, **_OVERLAP}, {}, ""),
    "fsdp optim": (_FSDP, {**_MAIN, _SHARD: "optim"}, {}, "fsdp_dtensor"),
    "fsdp optim, overlap": (
        _FSDP,
        {**_MAIN, _SHARD: "optim", "overlap_grad_reduce": True},
        {},
        "",
    ),
    "fsdp optim_grads": (_FSDP, {**_MAIN, _SHARD: "optim_grads"}, {}, "fsdp_dtensor"),
    "fsdp optim_grads_params": (
        _FSDP,
        {**_MAIN, _SHARD: "optim_grads_params"},
        {},
        "fsdp_dtensor",
    ),
    "fsdp optim_grads_params, small unit, double buffer": (
        _FSDP,
        {**_MAIN, **_SMALL, _SHARD: "optim_grads_params", "fsdp_double_buffer": True},
        _FULL,
        "",
    ),
    "torch fsdp2 wrapper": ({"use_torch_fsdp2": True}, {}, {}, "torch_dcp"),
}
"""Name -> fields of dist, ddp and model; checkpoint format or none."""


class _Silent:
    """A phase sink that takes no notes."""

    def phase(self, phase: Any, microbatch: int = 0) -> Any:  # noqa: ARG002 (the sink's signature)
        """Do nothing around a phase."""
        return nullcontext()

    def inputs(self, batch: Any) -> None:
        """Ignore a batch."""


def make_spec(name: str) -> Any:
    """Return the spec of a case."""
    from fsdp_doctor.model import megatron_spec as megatron
    from fsdp_doctor.model import spec

    dist, ddp, model, checkpoint = CASES[name]
    return spec.ProfileSpec(
        name=name,
        world_size=2,
        workload=spec.Workload(
            model=spec.ModelSpec(layers=2, hidden=64, heads=4, vocab=256), sequence_length=32
        ),
        config=spec.TrainingConfig(
            strategy="megatron",
            gradient_accumulation=spec.GradientAccumulation(steps=2),
            megatron=megatron.MegatronConfig(
                dist=megatron.MegatronDist(**dist),
                ddp=megatron.MegatronDDP(**ddp),
                model=megatron.MegatronModel(bf16=True, **model),
            ),
        ),
        checkpoint=checkpoint or None,  # type: ignore[arg-type]
    )


def run_case(name: str, *, fake_of: int | None, folder: Path) -> str:
    """Train one case in this process; return a line of text."""
    import torch
    import torch.distributed as dist

    from fsdp_doctor.training.checkpoints import save_and_load
    from fsdp_doctor.training.megatron_job import build_megatron_job
    from fsdp_doctor.training.strategies.base import RankContext

    torch.set_num_threads(1)
    if fake_of:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=fake_of, store=FakeStore())
    else:
        dist.init_process_group("gloo")
    context = RankContext(
        rank=dist.get_rank(),
        local_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device("cpu"),
        fake=fake_of is not None,
    )
    spec = replace(make_spec(name), world_size=context.world_size)
    job = build_megatron_job(spec, context, _Silent())
    losses = [float(job.run_step(_Silent())) for _ in range(3)]
    if fake_of:
        return "3 steps"
    text = f"loss {losses[-1]:.5f} norm {job.gradient_norm:.5f}"
    if spec.checkpoint is not None:
        done = save_and_load(job, spec, context, _Silent(), folder)
        text += f" {done.format} {'restored' if done.restored else 'NOT RESTORED'}"
    return text


def child(name: str, fake_of: int | None, folder: Path) -> None:
    """Print the outcome of a case on rank 0; failures by their last line."""
    import os

    try:
        text = run_case(name, fake_of=fake_of, folder=folder)
    except Exception as error:  # noqa: BLE001 (what fails is the result)
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        text = f"fails: {type(error).__name__}: {first[:90]}"
    if os.environ.get("RANK", "0") == "0":
        print(f"RESULT {text}", flush=True)
    for writer in multiprocessing.active_children():  # of torch_dist; they would keep the pipe open
        writer.kill()
    os._exit(0)


def launch(name: str, fake_of: int | None) -> str:
    """Run a case in fresh processes and return its line."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-versions-"))
    own = [str(Path(__file__)), "--case", name, "--folder", str(folder)]
    command = [sys.executable, *own, "--fake", str(fake_of)]
    if fake_of is None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launcher, *own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return lines[0].removeprefix("RESULT ") if lines else "no answer"


def report() -> str:
    """Run every case and return the page."""
    from importlib import metadata

    core, torch = metadata.version("megatron-core"), metadata.version("torch")
    lines = [
        f"megatron-core {core}, torch {torch}, Python {platform.python_version()}, "
        "2 CPU processes with gloo",
        "3 steps, 2 micro batches; norm: gradient norm of the last step; x: times that of ddp",
        "",
    ]
    base = None
    for name in CASES:
        text = launch(name, None)
        if "norm " in text:
            norm = float(text.partition("norm ")[2].split()[0])
            base = base or norm
            text += f"  x {norm / base:.4f}"
        lines.append(f"{name:<52}{text}")
        print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", "one rank of 8, fake process group"]
    for name in ("ddp", "distributed optimizer", "fsdp optim", "fsdp optim_grads_params"):
        lines.append(f"{name:<52}{launch(name, 8)}")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run as a parent that reports, or as one process of a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case")
    parser.add_argument("--fake")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.case:
        child(options.case, int(options.fake) if options.fake else None, options.folder)
    text = report()
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
