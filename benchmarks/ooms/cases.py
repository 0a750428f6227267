"""The failures to be recorded: what is trained, what is done wrong, which cause that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ANY = "any"
"""A phase: wherever the device comes to be full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCase:
    """One failure that is provoked on purpose."""

    name: str
    cause: str
    """As the diagnosis calls it; it must come first."""
    config: dict[str, Any]
    """``config`` of a spec."""
    fault: str = "plain"
    """Function of ``faults.FAULTS`` that is run."""
    phase: str = "forward"
    """Phase in which it has to fail."""
    step: int | None = None
    """Step in which it has to fail; None: the one that leaves the most room for a limit."""
    aim: float = 0.5
    """Where the limit lies between all that was needed before that phase (0) and its peak (1)."""
    micro_batch: int = 1
    sequence: int = 2048
    vocab: int = 4000
    hidden: int = 2048
    layers: int = 4
    world_size: int = 8
    allocator: str = ""
    """``PYTORCH_CUDA_ALLOC_CONF``."""
    holder: bool = False
    """Whether another process holds the rest of the device, in place of a limit."""
    whole_device: bool = False
    """Whether the job itself takes the rest of the device by the driver, in place of a limit."""
    torchrun: bool = False
    """Whether torchrun starts the job, so that its report is in the log."""
    extra: dict[str, int] = field(default_factory=dict)
    """Arguments of the fault."""

    @property
    def alone(self) -> bool:
        """Whether nobody else may be on the device when it fails."""
        return self.holder or self.whole_device

    def spec(self, *, tiny: bool = False) -> dict[str, Any]:
        """Return the job as a spec; ``tiny``: the same code on a CPU."""
        hidden = 64 if tiny else self.hidden
        return {
            "name": "job",
            "world_size": self.world_size,
            "workload": {
                "model": {
                    "layers": 2 if tiny else self.layers,
                    "hidden": hidden,
                    "heads": 4 if tiny else 16,
                    "ffn": hidden * 3,
                    "vocab": 256 if tiny else self.vocab,
                },
                "micro_batch": 1 if tiny else self.micro_batch,
                "sequence_length": 16 if tiny else self.sequence,
            },
            "config": self.config,
        }


EXPANDABLE = "expandable_segments:True"
FUSED: dict[str, Any] = {"optimizer": {"name": "adamw", "implementation": "fused"}}
DDP: dict[str, Any] = {"strategy": "ddp", "precision": {"autocast": "bfloat16"}, **FUSED}
FSDP1: dict[str, Any] = {
    "strategy": "fsdp1",
    "fsdp1": {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
    **FUSED,
}
_FSDP2: dict[str, Any] = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
FSDP2: dict[str, Any] = {"strategy": "fsdp2", "fsdp2": _FSDP2, **FUSED}
FOREACH: dict[str, Any] = {"optimizer": {"name": "adamw", "implementation": "foreach"}}


def megatron_fsdp(strategy: str) -> dict[str, Any]:
    """Megatron-FSDP with this ``data_parallel_sharding_strategy``."""
    return {
        "strategy": "megatron",
        "megatron": {
            "dist": {"use_megatron_fsdp": True},
            "ddp": {
                "data_parallel_sharding_strategy": strategy,
                "megatron_fsdp_main_grads_dtype": "float32",
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
            "model": {"bf16": True, "normalization": "RMSNorm", "add_bias_linear": False},
            "optimizer": {"lr": 1e-4},
        },
    }


LONG = {"micro_batch": 8}

CASES: tuple[OomCase, ...] = (
    OomCase(name="ddp-forward", cause="activations", config=DDP, micro_batch=8, layers=6,
            torchrun=True),
    OomCase(name="fsdp1-forward", cause="activations", config=FSDP1, micro_batch=2, layers=6,
            fault="longer_batch", extra=LONG),
    OomCase(name="fsdp2-forward-expandable", cause="activations", config=FSDP2, micro_batch=2,
            layers=6, fault="longer_batch", extra=LONG, allocator=EXPANDABLE, torchrun=True),
    OomCase(name="fsdp2-backward-expandable", cause="activations", micro_batch=16, layers=4,
            config={**FSDP2, "activation_checkpointing": {"mode": "full"}}, phase="backward",
            allocator=EXPANDABLE),
    OomCase(name="megatron-fsdp-forward", cause="activations", micro_batch=1, layers=6,
            config=megatron_fsdp("optim_grads_params"), fault="longer_batch",
            extra={"micro_batch": 4}),
    OomCase(name="fsdp2-logits", cause="logits", config=FSDP2, micro_batch=2, vocab=256_000,
            hidden=1024, layers=2, aim=0.7),
    OomCase(name="ddp-logits", cause="logits", config=DDP, micro_batch=1, vocab=200_000,
            hidden=512, layers=2, aim=0.7, fault="longer_batch", extra={"micro_batch": 4},
            torchrun=True),
    OomCase(name="fsdp2-one-unit", cause="wrap-granularity", layers=16, sequence=256, aim=0.3,
            config={**FSDP2, "fsdp2": {**_FSDP2, "wrap": "none"}}),
    OomCase(name="ddp-optimizer-state", cause="state-does-not-fit", config=DDP, sequence=512,
            layers=8, phase="optimizer", torchrun=True),
    OomCase(name="fsdp1-optimizer-state", cause="state-does-not-fit", config=FSDP1, sequence=256,
            layers=16, world_size=2, phase="optimizer"),
    OomCase(name="megatron-fsdp-state", cause="state-does-not-fit", sequence=256, layers=12,
            config=megatron_fsdp("no_shard"), phase="optimizer"),
    OomCase(name="ddp-foreach", cause="optimizer-temporaries", fault="later_foreach",
            config={**DDP, **FOREACH}, sequence=256, layers=8, phase="optimizer", step=2),
    OomCase(name="fsdp2-foreach-expandable", cause="optimizer-temporaries", fault="later_foreach",
            config={**FSDP2, **FOREACH}, sequence=256, layers=16, world_size=2, phase="optimizer",
            step=2, allocator=EXPANDABLE),
    OomCase(name="ddp-checkpoint", cause="checkpoint-copies", fault="checkpoint", config=DDP,
            sequence=512, layers=6, phase="fault"),
    OomCase(name="fsdp2-checkpoint", cause="checkpoint-copies", fault="checkpoint", config=FSDP2,
            sequence=512, layers=8, phase="fault", torchrun=True),
    OomCase(name="ddp-evaluation", cause="evaluation-accumulation", fault="evaluation", config=DDP,
            micro_batch=4, vocab=32000, phase="fault", aim=0.6),
    OomCase(name="fsdp2-evaluation-expandable", cause="evaluation-accumulation",
            fault="evaluation", config=FSDP2, micro_batch=4, vocab=32000, phase="fault",
            allocator=EXPANDABLE, aim=0.6),
    OomCase(name="ddp-leak", cause="leak", fault="leak", config=DDP, layers=3, phase=ANY,
            extra={"mib": 160}),
    OomCase(name="fsdp2-leak-expandable", cause="leak", fault="leak", config=FSDP2, layers=3,
            phase=ANY, allocator=EXPANDABLE, extra={"mib": 128}),
    OomCase(name="ddp-fragmentation", cause="fragmentation", fault="fragmentation", config=DDP,
            sequence=512, phase="fault", extra={"mib": 64, "pieces": 64}),
    OomCase(name="fsdp2-fragmentation", cause="fragmentation", fault="fragmentation", config=FSDP2,
            sequence=512, phase="fault", extra={"mib": 48, "pieces": 60}, torchrun=True),
    OomCase(name="ddp-second-process", cause="foreign-process", config=DDP, micro_batch=8,
            layers=6, holder=True),
    OomCase(name="cublas-handle", cause="library-allocation", fault="cublas", config=DDP,
            phase=ANY, whole_device=True),
    OomCase(name="driver-module", cause="library-allocation", fault="driver", config=FSDP2,
            phase=ANY, whole_device=True),
    OomCase(name="cufft-plan", cause="library-allocation", fault="cufft", config=DDP,
            phase=ANY, whole_device=True),
    OomCase(name="nccl-communicator", cause="library-allocation", fault="nccl", config=DDP,
            phase=ANY, whole_device=True, world_size=1),
)  # fmt: skip


def case_named(name: str) -> OomCase:
    """Return a case. Raises KeyError."""
    return {case.name: case for case in CASES}[name]
