"""Other frameworks' wordings, other launchers' prefixes, other ways to print memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_oom_diagnosis import STEPS, message, run, trace

OOM = message()
TE = "RuntimeError: /te/common/"
WORDINGS = {
    "XLA": (
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to "
        "allocate 17179869184 bytes.",
        ("device_oom", "xla", 17179869184),
    ),
    "NCCL's last error": (
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Failed to CUDA calloc async 608 bytes",
        ("nccl_alloc", "nccl-error", 608),
    ),
    "Transformer Engine, driver": (
        f"{TE}util/cuda_driver.cpp:42 in function f: CUDA Error: out of memory",
        ("driver_oom", "runtime", None),
    ),
    "Transformer Engine, cuBLAS": (
        f"{TE}gemm/x.cu:300 in function g: cuBLAS Error: the resource allocation failed",
        ("library_alloc", "alloc-failed", None),
    ),
    "cuFFT": (
        "RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR",
        ("library_alloc", "internal-error", None),
    ),
    "cuSOLVER": (
        "RuntimeError: cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling "
        "`cusolverDnCreate(handle)`",
        ("library_alloc", "internal-error", None),
    ),
    "cuDNN": (
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        ("library_alloc", "not-initialized", None),
    ),
    "bitsandbytes": (
        "Error out of memory at line 380 in file /b/csrc/pythonInterface.c",
        ("driver_oom", "runtime", None),
    ),
    "AcceleratorError": (
        "torch.AcceleratorError: CUDA error: out of memory\nSearch for "
        "`cudaErrorMemoryAllocation' in https://docs.nvidia.com",
        ("driver_oom", "runtime", None),
    ),
}
PREFIXES = {
    "Docker's JSON": '{"log":"[rank3]: %s\\n","stream":"stderr","time":"2026-01-01T00:00:05.1Z"}',
    "stern": "train-job-worker-3 pytorch [rank3]: %s",
    "torchrun and torch": "[default3]:[rank3]: %s",
    "syslog": "May  1 10:00:00 gpu07 train[4242]: [rank3]: %s",
    "journal": "2024-05-01T10:00:00+0000 gpu07 python[4242]: [rank3]: %s",
    "loguru": "2024-05-01 10:00:00.123 | ERROR    | __main__:train:55 - [rank3]: %s",
    "srun -l": "3: %s",
    "mpirun": "[1,3]<stderr>: %s",
    "CRI": "2026-01-01T00:00:05.123456789Z stderr F [rank3]: %s",
}
MEMORY_LINES = {
    "Composer": "[batch={i}/99]:\n\t Train memory/current_allocated_mem: {x:.4f}\n\t Train loss: 2",
    "axolotl": "{{'loss': 1.0, 'memory/max_active (GiB)': 1.0, 'memory/max_allocated (GiB)': "
    "{x:.2f}, 'epoch': 0.1}}",
    "own key": "INFO iter {i} gpu_mem_alloc={x:.2f}GB lr 1e-5",
    "own words": "epoch 0 step {i}: loss=1.0, mem={m}MiB",
    "torchtitan": "[rank0]:[titan] - INFO - step: {i}  loss:  8.0  memory: {x:.2f}GiB(50%)  tps: 1",
}


@pytest.mark.parametrize("name", WORDINGS)
def test_wordings(name: str, tmp_path: Path) -> None:
    """Kind, form and bytes of a failure in other words."""
    text, expected = WORDINGS[name]
    failure = run(tmp_path, text).triage.primary
    assert failure is not None
    assert (failure.kind, failure.form, failure.requested_bytes) == expected


@pytest.mark.parametrize("name", PREFIXES)
def test_prefixes(name: str, tmp_path: Path) -> None:
    """The rank and the numbers are found behind every launcher's prefix."""
    failure = run(tmp_path, PREFIXES[name] % OOM).triage.primary
    assert failure is not None
    assert (failure.rank, failure.requested_bytes) == (3, 2 << 30)


@pytest.mark.parametrize("name", MEMORY_LINES)
def test_growing_memory(name: str, tmp_path: Path) -> None:
    """Memory that grows in the lines of any trainer is a leak."""
    lines = [
        MEMORY_LINES[name].format(i=i, x=30 + 0.6 * i, m=30_000 + 600 * i) for i in range(1, 60)
    ]
    result = run(tmp_path, "\n".join([*lines, f"[rank0]: {OOM}"]))
    assert result.logs.history.lines == 59
    assert result.findings[0].cause == "leak"


def test_interleaved_ranks(tmp_path: Path) -> None:
    """Two ranks' tracebacks, line by line in turn: each failure has its own frames."""
    ranks = [
        [*trace(f"model{rank}.py forward: x = f(x)", prefix=head).splitlines(), head + OOM]
        for rank, head in enumerate(("[rank0]: ", "[rank1]: "))
    ]
    text = "\n".join(line for pair in zip(*ranks, strict=True) for line in pair)
    result = run(tmp_path, STEPS + text)
    assert [failure.rank for failure in result.triage.failures] == [0, 1]
    for failure in result.triage.failures:
        assert all(f"model{failure.rank}.py" in frame for frame in failure.frames)


def test_ray_worker(tmp_path: Path) -> None:
    """Ray's prefix gives process and host; the frames behind it the phase."""
    prefix = "(WorkerDict pid=12, ip=10.0.0.5) "
    frames = trace("a.py update_policy: loss.backward()", "_tensor.py backward: x()", prefix=prefix)
    failure = run(tmp_path, frames + prefix + OOM).triage.primary
    assert failure is not None
    assert (failure.pid, failure.host, failure.phase) == (12, "10.0.0.5", "backward")


def test_optimizer_of_a_later_step(tmp_path: Path) -> None:
    """In a later step the state exists: what is new are the step's own copies."""
    frames = trace("train.py main: optimizer.step()", "muon.py step: g = newtonschulz5(g)")
    assert run(tmp_path, STEPS + frames + OOM).findings[0].cause == "optimizer-temporaries"
