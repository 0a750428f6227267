"""The small GPT and the training loop that the tracker tests run on two gloo ranks.

(A test module so that it travels with them; its own test is that one rank can run it.)
"""

# ruff: noqa: D102, D103 - the names say it

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: E402
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (  # noqa: E402
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from fsdp_doctor.model.memory import Phase  # noqa: E402

VOCAB, WIDTH, TOKENS, BATCH, LAYERS = 512, 64, 32, 2, 3


@dataclass(frozen=True)
class Case:
    strategy: str
    name: str = ""
    accumulation: int = 1
    checkpointing: bool = False
    mixed_precision: bool = False
    autocast: bool = False
    bucket_view: bool = False
    original_parameters: bool = False

    def __str__(self) -> str:
        return f"{self.strategy}-{self.name or 'plain'}"


CASES = (
    Case("ddp"),
    Case("ddp", "view", bucket_view=True),
    Case("ddp", "autocast", autocast=True),
    Case("ddp", "accumulation", accumulation=2),
    Case("fsdp2"),
    Case("fsdp2", "mixed", mixed_precision=True),
    Case("fsdp2", "checkpointing", checkpointing=True),
    Case("fsdp2", "accumulation", accumulation=2),
    Case("fsdp1"),
    Case("fsdp1", "mixed", mixed_precision=True),
    Case("fsdp1", "original", original_parameters=True),
    Case("fsdp1", "checkpointing-accumulation", accumulation=2, checkpointing=True),
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, -1)
        q, k, v = (p.view(batch, length, 4, width // 4).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("rope", torch.zeros(TOKENS, WIDTH))

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrap(model: nn.Module, case: Case, device: torch.device) -> nn.Module:
    if case.checkpointing:
        for index in range(LAYERS):
            model.blocks[index] = checkpoint_wrapper(model.blocks[index])
    if case.strategy == "ddp":
        return DistributedDataParallel(
            model, gradient_as_bucket_view=case.bucket_view, bucket_cap_mb=0.1
        )
    half = torch.bfloat16
    if case.strategy == "fsdp2":
        options: dict[str, Any] = {}
        if case.mixed_precision:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=half, reduce_dtype=torch.float32
            )
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)
    if case.strategy == "fsdp1":
        mixed = MixedPrecision(param_dtype=half, reduce_dtype=torch.float32)
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=case.original_parameters,
            mixed_precision=mixed if case.mixed_precision else None,
            device_id=device if device.type == "cpu" else device.index,
        )
    return model


def train(case: Case, observer: Any, device: torch.device, steps: int = 3) -> tuple[Any, Any]:
    """Set-up and ``steps`` steps, phase by phase, as the profiler does it."""
    torch.manual_seed(0)
    observer.begin_phase(-1, Phase.INIT, 0)
    with device:
        model: nn.Module = SmallGPT()
    observer.end_phase()
    observer.begin_phase(-1, Phase.WRAP, 0)
    model = wrap(model, case, device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=device.type != "cpu")
    observer.end_phase()
    observer.watch(model, optimizer)
    for step in range(steps):
        for micro in range(case.accumulation):
            _micro_step(case, model, observer, device, step, micro)
        observer.begin_phase(step, Phase.OPTIMIZER, 0)
        optimizer.step()
        optimizer.zero_grad()
        observer.end_phase()
        if device.type == "cuda":
            _let_collectives_go()
    return model, optimizer


def _let_collectives_go() -> None:
    """Wait until NCCL's watchdog, which looks every 100 ms, has dropped what finished works hold.

    DDP's first buckets live on in such a work after they have been rebuilt.
    """
    torch.cuda.synchronize()
    time.sleep(0.4)


def _micro_step(  # noqa: PLR0917
    case: Case, model: Any, observer: Any, device: torch.device, step: int, micro: int
) -> None:
    last = micro == case.accumulation - 1
    observer.begin_phase(step, Phase.DATA, micro)
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS), device=device)
    observer.inputs(tokens)
    observer.end_phase()
    if case.strategy == "fsdp2":
        model.set_requires_gradient_sync(last)
    unsynchronised = not last and case.strategy in ("ddp", "fsdp1")
    with model.no_sync() if unsynchronised else nullcontext():
        observer.begin_phase(step, Phase.FORWARD, micro)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=case.autocast):
            logits = model(tokens).flatten(0, 1).float()
            loss = F.cross_entropy(logits, tokens.flatten())
        del logits
        observer.end_phase()
        observer.begin_phase(step, Phase.BACKWARD, micro)
        loss.backward()
        observer.end_phase()


def on_ranks(
    work: Callable[[int], Any], folder: Path, ranks: int = 2, backend: str = "gloo"
) -> list[Any]:
    """Run ``work(rank)`` in forked ranks; return what each returned.

    The parent must not have touched CUDA.
    """
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os._exit(_run_rank(work, rank, ranks, folder, backend))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * ranks, "\n".join(p.read_text() for p in folder.glob("*.err"))
    return [pickle.loads((folder / f"{rank}.out").read_bytes()) for rank in range(ranks)]


def _run_rank(work: Callable[[int], Any], rank: int, ranks: int, folder: Path, backend: str) -> int:
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), ranks)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        result = work(rank)
        (folder / f"{rank}.out").write_bytes(pickle.dumps(result))
    except BaseException:  # noqa: BLE001 - a forked child reports, whatever happened
        (folder / f"{rank}.err").write_text(traceback.format_exc())
        return 1
    return 0


class NoObserver:
    """Sees nothing."""

    def begin_phase(self, step: int, phase: Phase, microbatch: int) -> None: ...

    def end_phase(self) -> None: ...

    def watch(self, model: Any, optimizer: Any) -> None: ...

    def inputs(self, batch: Any) -> None: ...


def test_the_loop_trains() -> None:
    model, _ = train(Case("none"), NoObserver(), torch.device("cpu"), steps=1)
    assert sum(p.numel() for p in model.parameters()) == 263040
