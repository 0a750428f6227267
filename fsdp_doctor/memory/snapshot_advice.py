"""What to do about a cause that a snapshot shows: changes with their cost."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_doctor.model.finding import Advice


@dataclass(frozen=True, slots=True)
class Remedy:
    """Fields concerned and what to try, the cheapest first."""

    flags: tuple[str, ...]
    advice: tuple[Advice, ...]


def _do(change: str, saves: str | None = None, cost: str | None = None) -> Advice:
    return Advice(change=change, saves_text=saves, cost=cost)


_EXPANDABLE = _do(
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "free pieces of different segments can serve one request",
    "none known in steady state",
)

ADVICE: dict[str, Remedy] = {
    "leak": Remedy(
        (),
        (
            _do("do not keep tensors with their graph from step to step: loss.item(), .detach()"),
            _do("look at the kept blocks' stacks: they name the code that still holds them"),
        ),
    ),
    "fragmentation": Remedy(("PYTORCH_CUDA_ALLOC_CONF",), (_EXPANDABLE,)),
    "stream-reuse": Remedy(
        ("limit_all_gathers",),
        (
            _do("FSDP1: limit_all_gathers=True", "bounds how many units are gathered ahead"),
            _do(
                "TORCH_NCCL_AVOID_RECORD_STREAMS=1 (before torch 2.8)",
                "memory comes back when the work is done, not when a later event is seen",
            ),
        ),
    ),
    "cuda-graph-pools": Remedy(
        (),
        (
            _do(
                "capture fewer or smaller CUDA graphs, or let them share a pool",
                cost="more launch time",
            ),
        ),
    ),
    "optimizer-temporaries": Remedy(
        ("optimizer.foreach", "optimizer.fused"),
        (_do("fused=True (or foreach=False)", "saves the copies of the foreach step"),),
    ),
    "state-does-not-fit": Remedy(
        ("sharding",),
        (
            _do("shard over more ranks (FULL_SHARD, ZeRO-3)", cost="an all-gather per unit"),
            _do("offload the optimizer state to the host", cost="step time of the optimizer"),
        ),
    ),
    "activations": Remedy(
        ("activation_checkpointing", "micro_batch_size"),
        (
            _do(
                "activation checkpointing",
                "saves all but the inputs of each layer",
                "one more forward",
            ),
            _do(
                "halve the micro batch, double the accumulation",
                "saves half of them",
                "lower speed",
            ),
        ),
    ),
    "logits": Remedy(
        ("loss",),
        (_do("compute the loss in chunks or fused with the projection", "saves most of them"),),
    ),
    "communication-buffers": Remedy(
        ("wrap_policy", "reshard_after_forward", "bucket_cap_mb"),
        (
            _do("wrap smaller units, so that fewer parameters are gathered at a time"),
            _do(
                "reshard_after_forward=True",
                "frees them between forward and backward",
                "a second all-gather",
            ),
        ),
    ),
    "memory-limit": Remedy(
        ("memory_fraction",),
        (_do("raise or drop torch.cuda.set_per_process_memory_fraction"),),
    ),
}
