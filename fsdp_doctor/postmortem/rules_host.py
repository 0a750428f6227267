"""Rules about everything but PyTorch's own pool: host, libraries, other processes."""

from __future__ import annotations

from fsdp_doctor.postmortem.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "not-device-memory",
        "kind == 'shared_memory'",
        0.9,
        "the message is about shared memory (/dev/shm)",
    ),
    Rule(
        "not-device-memory",
        "kind == 'kernel_resource'",
        0.92,
        "a kernel asked for more shared memory or registers than a multiprocessor has",
    ),
    Rule(
        "not-device-memory",
        "form == 'bogus-size'",
        0.9,
        "more than 1 EB was asked for: a corrupted size",
    ),
    Rule(
        "not-device-memory",
        "kind == 'not_memory' and victim and not host_percent",
        0.5,
        "only time-outs and ends caused by another process are in the logs",
    ),
    Rule(
        "host-memory",
        "kind == 'host_oom_kill' and strong_kill",
        0.85,
        "the out-of-memory killer says so",
    ),
    Rule(
        "host-memory",
        "kind == 'host_oom_kill' and not strong_kill",
        0.65,
        "a process was ended with SIGKILL, as the out-of-memory killer does",
    ),
    Rule(
        "host-memory",
        "kind == 'host_oom_kill' and phase in ['load', 'init', 'wrap']",
        0.4,
        "it came while the model was loaded",
    ),
    Rule("host-memory", "kind == 'host_alloc'", 0.85, "host memory could not be allocated"),
    Rule(
        "host-memory",
        "host_percent >= 75 and kind in ['not_memory', 'host_oom_kill']",
        0.75,
        "{host_percent:.1f} % of the host's memory was in use just before",
    ),
    Rule(
        "host-memory",
        "kind == 'host_oom_kill' and phase in ['checkpoint_save', 'checkpoint_load']",
        -0.45,
        "but a checkpoint was being written or read",
    ),
    Rule("pinned-memory", "kind == 'pinned_alloc'", 0.9, "pinning is in the failing call"),
    Rule(
        "pinned-memory",
        "kind == 'driver_oom' and offloads",
        0.55,
        "a bare driver error, and offload is on",
    ),
    Rule(
        "pinned-memory",
        "kind == 'driver_oom' and not offloads",
        0.3,
        "a bare driver error without the allocator's numbers: it did not come from PyTorch's pool",
    ),
    Rule(
        "pinned-memory",
        "kind == 'driver_oom' and early",
        0.12,
        "in the first step, when buffers are pinned",
    ),
    Rule(
        "pinned-memory",
        "kind == 'host_alloc' and mentions(frames, 'pin')",
        0.5,
        "pinning is in the failing call",
    ),
    Rule("library-allocation", "kind == 'nccl_alloc'", 0.85, "NCCL itself reports the failure"),
    Rule(
        "library-allocation",
        "kind == 'library_alloc' and form == 'alloc-failed'",
        0.85,
        "the library reports ALLOC_FAILED creating its handle or workspace",
    ),
    Rule(
        "library-allocation",
        "kind == 'library_alloc' and form in ['not-initialized', 'no-algorithm']",
        0.6,
        "the library could not be initialised, mostly for lack of memory",
    ),
    Rule(
        "library-allocation",
        "kind == 'library_alloc' and form == 'internal-error'",
        0.38,
        "a handle or plan could not be made, as happens without memory and not only then",
    ),
    Rule(
        "library-allocation",
        "kind == 'driver_oom'",
        0.33,
        "the driver refused memory outside PyTorch's pool",
    ),
    Rule(
        "library-allocation",
        "kind == 'driver_oom' and form == 'driver' and not mentions(config, "
        "'expandable_segments:true')",
        0.3,
        "a call of the driver's own interface, which loads kernels",
    ),
    Rule(
        "library-allocation",
        "outside_share >= 0.1 and outside >= 2000000000",
        0.45,
        "{outside} of this process are outside PyTorch's pool",
        "outside",
    ),
    Rule(
        "foreign-process",
        "foreign >= 2 and others_share >= 0.03 and not limited",
        0.85,
        "{foreign} other processes are on the device",
        "others",
    ),
    Rule(
        "foreign-process",
        "foreign == 1 and others_share >= 0.05 and not limited",
        0.75,
        "another process is on the device",
        "others",
    ),
    Rule(
        "foreign-process",
        "foreign == 0 and others_share >= 0.08 and not limited",
        0.7,
        "total minus free minus this process",
        "others",
    ),
    Rule(
        "foreign-process",
        "others_share >= 0.02 and others >= requested and not foreign and not limited",
        0.4,
        "total minus free minus this process would have been enough",
        "others",
    ),
    Rule(
        "foreign-process",
        "unseen_share >= 0.3 and backend == 'CUDA'",
        0.6,
        "memory in use that is not in this process's pool",
        "unseen",
    ),
    Rule(
        "foreign-process",
        "unseen_share >= 0.15 and unseen_share < 0.3 and unseen >= 2000000000 and backend"
        " == 'CUDA'",
        0.4,
        "memory in use that is not in this process's pool",
        "unseen",
    ),
    Rule(
        "foreign-process",
        "same_device >= 2",
        0.7,
        "{same_device} ranks of one host failed on the same device index",
    ),
    Rule(
        "foreign-process",
        "free < requested and (allocated_share + idle_share) < 0.5 and not limit",
        0.4,
        "PyTorch holds less than half of a full device",
    ),
    Rule(
        "foreign-process",
        "form == 'bare' and not has_frames and phase == 'unknown'",
        0.2,
        "the message carries no numbers: check first whether the device was free",
    ),
    Rule(
        "foreign-process",
        "mentions(config, 'shared with') or mentions(config, 'exclusive=false') or "
        "mentions(config, 'oversubscribe')",
        0.6,
        "the config says that the node is shared",
    ),
)
