"""Every wording of a memory failure: kind, form and numbers; decoys are not counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.logs.records import MEMORY_KINDS, Failure
from fsdp_doctor.logs.scan import scan_logs
from fsdp_doctor.logs.sizes import parse_size
from fsdp_doctor.logs.sources import find_logs

SHARED = Path(__file__).parents[3] / "shared" / "messages" / "oom_messages.jsonl"
GIB = 1 << 30
MIB = 1 << 20


def read(tmp_path: Path, text: str) -> list[Failure]:
    """Return the failures in a text."""
    path = tmp_path / "a.log"
    path.write_text(text, encoding="utf-8")
    return scan_logs(find_logs([path])[0]).failures


HINT = " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid frag."
NEW = "GPU {d} has a total capacity of 40.00 GiB of which 1.00 GiB is free. "
OWN = "Including non-PyTorch memory, this process has 38.00 GiB memory in use. "
PARTS = (
    "Of the allocated memory 30.00 GiB is allocated by PyTorch, and 6.00 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting X=Y"
)
ASKED = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. "

MESSAGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "oldest form, cached is the idle part",
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 2; 10.00 GiB total "
        "capacity; 8.00 GiB already allocated; 12.50 MiB free; 64.00 KiB cached)",
        {
            "kind": "device_oom",
            "form": "oldest",
            "device": 2,
            "requested_bytes": 20 * MIB,
            "reserved_unallocated_bytes": 64 << 10,
            "reserved_bytes": 8 * GIB + (64 << 10),
        },
    ),
    (
        "old form with a limit",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 40.00 GiB total "
        "capacity; 9.00 GiB already allocated; 20.00 GiB free; 10.00 GiB allowed; 9.50 GiB "
        "reserved in total by PyTorch)" + HINT,
        {
            "form": "old",
            "limit_bytes": 10 * GIB,
            "reserved_bytes": 9 * GIB + GIB // 2,
            "reserved_unallocated_bytes": GIB // 2,
            "free_bytes": 20 * GIB,
        },
    ),
    (
        "new form",
        ASKED + NEW.format(d=3) + OWN + PARTS,
        {
            "form": "new",
            "device": 3,
            "backend": "CUDA",
            "process_bytes": 38 * GIB,
            "other_processes_bytes": GIB,
            "reserved_bytes": 36 * GIB,
            "fragmentation": "yes",
        },
    ),
    (
        "misspelt capacity, limit with a semicolon",
        ASKED
        + NEW.format(d=0).replace("capacity", "capacty")
        + OWN
        + "36.00 GiB allowed; "
        + PARTS,
        {"total_bytes": 40 * GIB, "limit_bytes": 36 * GIB, "device": 0},
    ),
    (
        "no device index",
        ASKED + NEW.format(d="") + OWN + PARTS,
        {"device": None, "total_bytes": 40 * GIB},
    ),
    (
        "own process only by its number",
        ASKED + NEW.format(d=0) + "Process 77 has 38.00 GiB memory in use. " + PARTS,
        {"process_bytes": None, "processes": [(77, 38 * GIB)]},
    ),
    (
        "own process first, then others",
        ASKED + NEW.format(d=0) + OWN + "Process 5 has 600.00 MiB memory in use. " + PARTS,
        {"process_bytes": 38 * GIB, "processes": [(5, 600 * MIB)]},
    ),
    (
        "zero bytes in use is not known",
        ASKED + NEW.format(d=0) + OWN.replace("38.00 GiB", "0 bytes") + PARTS,
        {"process_bytes": None, "other_processes_bytes": None},
    ),
    (
        "an absurd size is not known",
        ASKED + NEW.format(d=0) + OWN.replace("38.00", "17179869184.00") + PARTS,
        {"process_bytes": None},
    ),
    (
        "private pools",
        ASKED
        + NEW.format(d=0)
        + OWN
        + PARTS.replace(", and 6", ", with 512.00 MiB allocated in private pools (e.g.), and 6"),
        {"private_pool_bytes": 512 * MIB, "allocated_bytes": 30 * GIB},
    ),
    (
        "HIP has no process clause",
        ASKED.replace("CUDA", "HIP") + NEW.format(d=5) + PARTS,
        {"backend": "HIP", "process_bytes": None, "device": 5},
    ),
    (
        "NPU",
        "RuntimeError: NPU out of memory. Tried to allocate 256.00 MiB (NPU 6; 29.00 GiB total "
        "capacity; 26.00 GiB already allocated; 26.00 GiB current active; 100.00 MiB free; "
        "27.00 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory",
        {"backend": "NPU", "device": 6, "reserved_bytes": 27 * GIB, "free_bytes": 100 * MIB},
    ),
    (
        "old XPU, two spaces",
        "RuntimeError: XPU out of memory. Tried to allocate 1.00 GiB (GPU  0; 15.00 GiB total "
        "capacity; 9.00 GiB already allocated; 10.00 GiB reserved in total by PyTorch)",
        {"backend": "XPU", "device": 0, "free_bytes": None},
    ),
    (
        "cudaMallocAsync",
        "torch.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of "
        "memory)\nCurrently allocated     : 30.00 GiB\nRequested               : 2.00 GiB\nDevice "
        "limit            : 40.00 GiB\nFree (according to CUDA): 1.00 GiB\nPyTorch limit (set by "
        "user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        {
            "form": "malloc-async",
            "device": 1,
            "requested_bytes": 2 * GIB,
            "total_bytes": 40 * GIB,
            "limit_bytes": None,
        },
    ),
    (
        "cut after the first words",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to al",
        {"kind": "device_oom", "form": "bare", "requested_bytes": None},
    ),
    (
        "rejected before it was tried",
        "torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected because "
        "it would exceed per_process_memory_fraction limit. Requested size: 3.00 GiB",
        {"form": "preempted", "requested_bytes": 3 * GIB},
    ),
    (
        "recovered retry",
        "[rank2]:[W812 10:00:00.000000000 CUDACachingAllocator.cpp:900] memory allocation failed "
        "with OOM on device 2 while trying to allocate 4096 bytes (free: 10, total: 1000).",
        {"fatal": False, "rank": 2, "requested_bytes": 4096, "free_bytes": 10},
    ),
    (
        "hidden in an assertion",
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/w/c10/cuda/CUDACaching'
        'Allocator.cpp":999, please report a bug to PyTorch.',
        {"kind": "device_oom", "form": "hidden-assert"},
    ),
    ("driver", "RuntimeError: CUDA driver error: out of memory", {"kind": "driver_oom"}),
    ("runtime", "torch.AcceleratorError: CUDA error: out of memory", {"kind": "driver_oom"}),
    (
        "XPU's unified runtime",
        "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
        {"kind": "driver_oom", "backend": "XPU"},
    ),
    (
        "cuBLAS",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        {"kind": "library_alloc"},
    ),
    (
        "cuDNN",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        {"kind": "library_alloc"},
    ),
    (
        "NCCL warns",
        "n1:4242:4301 [3] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'",
        {"kind": "nccl_alloc", "host": "n1", "pid": 4242, "local_rank": 3},
    ),
    (
        "NCCL calloc",
        "n1:42:43 [0] NCCL INFO x\nn1:42:43 [0] include/alloc.h:300 NCCL WARN Failed to CUDA "
        "calloc 10485760 bytes",
        {"kind": "nccl_alloc", "requested_bytes": 10485760, "line": 2},
    ),
    (
        "pinning, bare",
        '  File "/x/flat.py", line 9, in init\n    t.cpu().pin_memory(device=d)\n'
        "RuntimeError: CUDA error: invalid argument",
        {"kind": "pinned_alloc"},
    ),
    (
        "host allocator",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 1099511627776 bytes. Error code 12 (Cannot "
        "allocate memory)",
        {"kind": "host_alloc", "requested_bytes": 1 << 40},
    ),
    (
        "numpy",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 1.50 GiB for an array",
        {"kind": "host_alloc", "requested_bytes": 3 * GIB // 2},
    ),
    (
        "shared memory",
        "RuntimeError: DataLoader worker (pid 31) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory.",
        {"kind": "shared_memory", "pid": 31},
    ),
    (
        "elastic",
        "E0101 00:00:00.000000 12 torch/distributed/elastic/multiprocessing/api.py:833] failed "
        "(exitcode: -9) local_rank: 5 (pid: 917) of binary: /usr/bin/python",
        {"kind": "host_oom_kill", "local_rank": 5, "pid": 917, "exit_code": -9},
    ),
    (
        "kernel, cgroup",
        "[1234.5] Memory cgroup out of memory: Killed process 55 (python) total-vm:9kB, "
        "anon-rss:2048kB, file-rss:0kB",
        {"kind": "host_oom_kill", "form": "cgroup", "pid": 55, "process_bytes": 2 * MIB},
    ),
    (
        "SLURM, old words",
        "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=7.0 cgroup.",
        {"kind": "host_oom_kill", "form": "slurm", "count": 2},
    ),
    ("Kubernetes", "    Reason:       OOMKilled", {"kind": "host_oom_kill", "exit_code": 137}),
    (
        "Ray",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.1.1.1, ID: a) where the task (task ID: b, name=f, pid=12, "
        "memory used=1.00GB) was running was 95.00GB / 100.00GB (0.95), which exceeds the memory "
        "usage threshold of 0.95. Top 10 memory users:\nPID MEM(GB) COMMAND\n9 80.50 ray::W.save",
        {
            "kind": "host_oom_kill",
            "form": "ray",
            "pid": 12,
            "total_bytes": 100 * GIB,
            "processes": [(9, 161 * GIB // 2)],
        },
    ),
    (
        "Triton",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 9, "
        "Hardware limit: 8.",
        {"kind": "kernel_resource"},
    ),
    (
        "bogus size",
        "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        {"kind": "not_memory", "form": "bogus-size"},
    ),
)


@pytest.mark.parametrize(
    ("text", "expected"), [m[1:] for m in MESSAGES], ids=[m[0] for m in MESSAGES]
)
def test_a_wording_gives_kind_and_numbers(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    """A message alone in a log is one failure with these fields."""
    failures = read(tmp_path, text + "\n")
    assert len(failures) == 1
    assert {name: getattr(failures[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |",
        "    except torch.cuda.OutOfMemoryError:",
        "    raise OutOfMemoryError(message)",
        "INFO: set expandable_segments to avoid out of memory errors",
        "WARNING: a batch this long may cause OOM",
        "args.oom_score_adj=0 memory limit: none",
        "memory: 12.00GiB(10%) step: 3",
        "RuntimeError: CUDA error: invalid argument",
    ],
)
def test_decoys_are_no_failures(tmp_path: Path, text: str) -> None:
    """A line that only speaks of memory is not counted."""
    assert not [f for f in read(tmp_path, text + "\n") if f.kind in MEMORY_KINDS and f.fatal]


@pytest.mark.parametrize(
    ("text", "size"),
    [("12 bytes", 12), ("2.00 KiB", 2048), ("1,024.50 MiB", 1074266112), ("nonsense", None)],
)
def test_sizes_are_exact(text: str, size: int | None) -> None:
    """Sizes come out as integers without the error of floats."""
    assert parse_size(text) == size


KINDS = {
    "device": {"device_oom", "driver_oom"},
    "hidden-device": {"device_oom", "driver_oom"},
    "library": {"library_alloc"},
    "comm": {"nccl_alloc"},
    "host": {"host_alloc", "host_oom_kill"},
    "host?": {"host_oom_kill"},
    "bogus-size": {"not_memory"},
    "no-device-oom": {"kernel_resource"},
}


@pytest.mark.skipif(not SHARED.exists(), reason="the collected messages are not here")
@pytest.mark.parametrize("before", ["{exc}", "", "[rank3]: {exc}", "2: "])
def test_collected_messages(tmp_path: Path, before: str) -> None:
    """Kind, limit and decoys of every collected message are right, whatever stands before."""
    wrong = []
    for line in SHARED.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        prefix = before.format(exc=f"{case['exc']}: " if case["exc"] else "")
        found = [f for f in read(tmp_path, prefix + case["message"] + "\n") if f.fatal]
        if case["kind"] == "no-failure":
            good = not found
        else:
            good = len(found) == 1 and found[0].kind in KINDS[case["kind"]]
        if good and case["expect"].get("limited") and case["expect"]["fmt"] != "P":
            good = found[0].limit_bytes is not None
        if not good:
            wrong.append((case["id"], [(f.kind, f.form) for f in found]))
    assert not wrong
