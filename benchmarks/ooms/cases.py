"""The failures to be recorded: what is trained, what is done wrong, which cause that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCase:
    """One failure that is provoked on purpose."""

    name: str
    cause: str
    """As the diagnosis calls it; it must come first."""
    config: dict[str, Any]
    """``config`` of a spec."""
    fault: str = "plain"
    """Function of ``job.FAULTS`` that is run."""
    between: tuple[str, str] = ("wrap", "forward")
    """The memory limit lies between what these phases reserve, so that the second one fails."""
    phase: str = "forward"
    """Phase in which it has to fail; ``any``: wherever it comes to be full."""
    micro_batch: int = 4
    vocab: int = 32000
    hidden: int = 2048
    layers: int = 4
    allocator: str = ""
    """``PYTORCH_CUDA_ALLOC_CONF``."""
    holder: bool = False
    """Whether another process holds the rest of the device, in place of a limit."""
    extra: dict[str, float] = field(default_factory=dict)
    """Arguments of the fault."""

    def spec(self, *, tiny: bool = False) -> dict[str, Any]:
        """Return the job as a spec; ``tiny``: the same code on a CPU."""
        hidden, vocab, sequence = (64, 256, 16) if tiny else (self.hidden, self.vocab, 2048)
        return {
            "name": self.name,
            "world_size": 8,
            "workload": {
                "model": {
                    "layers": 2 if tiny else self.layers,
                    "hidden": hidden,
                    "heads": 4 if tiny else 16,
                    "ffn": hidden * 3,
                    "vocab": vocab,
                },
                "micro_batch": 1 if tiny else self.micro_batch,
                "sequence_length": sequence,
            },
            "config": self.config,
        }


ANY = "any"
EXPANDABLE = "expandable_segments:True"
DDP: dict[str, Any] = {"strategy": "ddp", "precision": {"autocast": "bfloat16"}}
FSDP1: dict[str, Any] = {
    "strategy": "fsdp1",
    "fsdp1": {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
}
_FSDP2: dict[str, Any] = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
FSDP2: dict[str, Any] = {"strategy": "fsdp2", "fsdp2": _FSDP2}
MEGATRON_FSDP: dict[str, Any] = {
    "strategy": "megatron",
    "megatron": {
        "ddp": {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "use_distributed_optimizer": True,
        }
    },
}
_STATE = ("backward", "optimizer")
_LATER = ("step", "fault")

CASES: tuple[OomCase, ...] = (
    OomCase(name="ddp-forward", cause="activations", config=DDP, micro_batch=16),
    OomCase(name="fsdp1-forward", cause="activations", config=FSDP1, micro_batch=16),
    OomCase(name="fsdp2-forward-expandable", cause="activations", config=FSDP2, micro_batch=16,
            allocator=EXPANDABLE),
    OomCase(name="fsdp2-backward", cause="activations", config=FSDP2, micro_batch=16, vocab=4000,
            between=("forward", "backward"), phase="backward"),
    OomCase(name="ddp-optimizer-state", cause="state-does-not-fit", config=DDP, micro_batch=1,
            layers=8, between=_STATE, phase="optimizer"),
    OomCase(name="fsdp1-foreach", cause="optimizer-temporaries", fault="later_optimizer",
            config={**FSDP1, "optimizer": {"name": "adamw", "implementation": "foreach"}},
            micro_batch=1, layers=8, between=_LATER, phase="optimizer"),
    OomCase(name="ddp-checkpoint", cause="checkpoint-copies", fault="checkpoint", config=DDP,
            micro_batch=1, layers=8, between=_LATER, phase="fault"),
    OomCase(name="fsdp2-checkpoint", cause="checkpoint-copies", fault="checkpoint", config=FSDP2,
            micro_batch=1, layers=8, between=_LATER, phase="fault"),
    OomCase(name="ddp-evaluation", cause="evaluation-accumulation", fault="evaluation", config=DDP,
            between=_LATER, phase="fault"),
    OomCase(name="fsdp2-evaluation-expandable", cause="evaluation-accumulation",
            fault="evaluation", config=FSDP2, between=_LATER, phase="fault",
            allocator=EXPANDABLE),
    OomCase(name="ddp-leak", cause="leak", fault="leak", config=DDP, micro_batch=1,
            between=_LATER, phase=ANY, extra={"mib": 96}),
    OomCase(name="fsdp2-leak-expandable", cause="leak", fault="leak", config=FSDP2, micro_batch=1,
            between=_LATER, phase=ANY, allocator=EXPANDABLE, extra={"mib": 96}),
    OomCase(name="ddp-fragmentation", cause="fragmentation", fault="fragmentation", config=DDP,
            micro_batch=1, between=("pinned", "fault"), phase="fault"),
    OomCase(name="fsdp2-logits", cause="logits", config=FSDP2, micro_batch=8, vocab=256_000,
            hidden=1024, layers=2),
    OomCase(name="fsdp2-one-unit", cause="wrap-granularity", micro_batch=1, layers=12,
            config={**FSDP2, "fsdp2": {**_FSDP2, "wrap": "none"}}),
    OomCase(name="ddp-second-process", cause="foreign-process", config=DDP, holder=True),
    OomCase(name="megatron-fsdp-forward", cause="activations", config=MEGATRON_FSDP,
            micro_batch=16),
    OomCase(name="megatron-fsdp-state", cause="state-does-not-fit", config=MEGATRON_FSDP,
            micro_batch=1, layers=12, between=_STATE, phase="optimizer"),
    OomCase(name="cublas-handle", cause="library-allocation", fault="cublas", config=DDP,
            phase="fault"),
    OomCase(name="driver-module", cause="library-allocation", fault="driver", config=DDP,
            phase="fault"),
)  # fmt: skip


def case_named(name: str) -> OomCase:
    """Return a case. Raises KeyError."""
    return {case.name: case for case in CASES}[name]
