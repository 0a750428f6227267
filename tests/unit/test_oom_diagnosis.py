"""Triage and causes: first failure against victims, when, one rank or all, ranked findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_doctor.postmortem import PostMortem, examine
from fsdp_doctor.postmortem.causes import CAUSES
from fsdp_doctor.postmortem.diagnose import compiled
from fsdp_doctor.postmortem.rules import RULES

FIXTURES = Path(__file__).parent.parent / "fixtures" / "logs"
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {ask} GiB. GPU {gpu} has a "
    "total capacity of 79.00 GiB of which {free} GiB is free. Including non-PyTorch memory, this "
    "process has {own} GiB memory in use. Of the allocated memory {live} GiB is allocated by "
    "PyTorch, and {idle} GiB is reserved by PyTorch but unallocated."
)


def message(
    *, ask: str = "2.00", gpu: int = 0, free: str = "0.50", own: str = "78.50", live: str = "76.90",
    idle: str = "0.50",
) -> str:  # fmt: skip
    """Return an allocator message of a full device, but for what is given."""
    return FULL.format(ask=ask, gpu=gpu, free=free, own=own, live=live, idle=idle)


def trace(*frames: str, prefix: str = "") -> str:
    """Return a traceback; each frame is ``file function: source``."""
    lines = ["Traceback (most recent call last):"]
    for number, frame in enumerate(frames, 10):
        place, _, source = frame.partition(": ")
        file, _, function = place.partition(" ")
        lines += [f'  File "/opt/{file}", line {number}, in {function}', f"    {source}"]
    return "\n".join(prefix + line for line in lines) + "\n"


def run(tmp_path: Path, text: str, config: str | None = None) -> PostMortem:
    """Examine a text, perhaps with a config."""
    path = tmp_path / "job.log"
    path.write_text(text + "\n", encoding="utf-8")
    settings = None
    if config is not None:
        settings = tmp_path / "settings.txt"
        settings.write_text(config)
    return examine([path], settings)


STEPS = "".join(
    f" [2026-01-01 00:{i:02d}:00] iteration {i}/ 99 | elapsed time per iteration (ms): 9.0 |\n"
    for i in range(1, 30)
)
LEAK = "".join(f"step {i} loss 1.0 allocated {20 + i * 0.9:.2f} GiB\n" for i in range(60))

SCENES = {
    "activations in a later forward": (
        STEPS + trace("a.py forward: x = self.attn(x)") + message(),
        "activations",
        ("forward", "steady"),
    ),
    "activations in a later backward": (
        STEPS + trace("a.py train: loss.backward()", "_tensor.py backward: run()") + message(),
        "activations",
        ("backward", "steady"),
    ),
    "loading": (
        trace("m.py from_pretrained: load()", "accelerate/m.py set_module_tensor_to_device: x.to()")
        + message(),
        "state-does-not-fit",
        ("load", "before_training"),
    ),
    "logits": (
        STEPS
        + trace("a.py forward: y()", "torch/nn/functional.py cross_entropy: return f(x)")
        + message(ask="9.00", free="5.00", live="70.00"),
        "logits",
        ("forward", "steady"),
    ),
    "fused optimizer missing": (
        STEPS
        + trace("t.py train: optimizer.step()", "torch/optim/adamw.py _multi_tensor_adamw: y()")
        + message(),
        "optimizer-temporaries",
        ("optimizer", "steady"),
    ),
    "optimizer state": (
        trace("torch/optim/adam.py _init_group: state['exp_avg'] = torch.zeros_like(p)")
        + message(),
        "state-does-not-fit",
        ("optimizer", "unknown"),
    ),
    "checkpoint": (
        STEPS + trace("ckpt.py save_checkpoint: sd = model.state_dict()") + message(),
        "checkpoint-copies",
        ("checkpoint_save", "checkpoint"),
    ),
    "evaluation": (
        STEPS
        + trace("transformers/t.py evaluation_loop: x()", "p.py nested_concat: torch.cat(x)")
        + message(),
        "evaluation-accumulation",
        ("evaluation", "evaluation"),
    ),
    "graph capture": (
        trace("te/graph.py make_graphed_callables: fwd_graph.capture_begin()") + message(),
        "cuda-graph-pools",
        ("graph_capture", "before_training"),
    ),
    "fragmentation": (
        STEPS + trace("a.py forward: x = f(x)") + message(ask="4.00", live="60.00", idle="16.00"),
        "fragmentation",
        ("forward", "steady"),
    ),
    "another process": (
        STEPS + trace("a.py forward: x = f(x)") + message(own="40.00", live="38.00", idle="0.40"),
        "foreign-process",
        ("forward", "steady"),
    ),
    "leak": (LEAK + trace("a.py forward: x = f(x)") + message(), "leak", ("forward", "steady")),
    "host": (
        "Loading checkpoint shards: 50%|# | 1/2 [00:16<00:14,  2.04s/it]\n"
        "Memory cgroup out of memory: Killed process 9 (python) total-vm:1kB, anon-rss:4kB",
        "host-memory",
        ("load", "before_training"),
    ),
    "NCCL": (
        "n:1:2 [0] include/alloc.h:9 NCCL WARN Cuda failure 2 'out of memory'",
        "library-allocation",
        ("unknown", "unknown"),
    ),
    "a limit, not other processes": (
        STEPS
        + trace("a.py forward: x = f(x)")
        + message(free="20.00", own="40.00", live="38.50", idle="0.40").replace(
            "Of the all", "40.00 GiB allowed; Of the all"
        ),
        "activations",
        ("forward", "steady"),
    ),
    "second model": (
        trace("ema.py build: self.ema_model = copy.deepcopy(model)") + message(),
        "unsharded-copy",
        ("unknown", "unknown"),
    ),
    "full state dict": (
        STEPS
        + trace(
            "t.py save: sd = model.state_dict()",
            "torch/fsdp/_flat_param.py unshard: self._all_gather_flat_param(x)",
        )
        + message(),
        "checkpoint-copies",
        ("checkpoint_save", "checkpoint"),
    ),
    "outputs kept in an evaluation": (
        STEPS + trace("t.py evaluate: outputs.append(model(x).logits)") + message(),
        "evaluation-accumulation",
        ("evaluation", "evaluation"),
    ),
    "gathering": (
        STEPS
        + trace("torch/fsdp/_flat_param.py all_gather: dist.all_gather_into_tensor(x)")
        + message(ask="9.00", free="5.00", idle="0.10"),
        "communication-buffers",
        ("unknown", "unknown"),
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_the_cause_comes_first(tmp_path: Path, name: str) -> None:
    """The injected cause of each scene is the first finding, with its phase and moment."""
    text, cause, (phase, moment) = SCENES[name]
    result = run(tmp_path, text)
    assert result.findings[0].cause == cause, [(f.cause, f.confidence) for f in result.findings]
    assert result.findings[0].evidence
    assert result.findings[0].advice
    failure = result.triage.primary
    assert failure is not None
    if name != "gathering":
        assert (failure.phase, failure.moment) == (phase, moment)


def test_first_failure_and_victims() -> None:
    """Time-outs and signals of other ranks point at the first failure; the exit code is its own."""
    result = examine([FIXTURES / "megatron_interleaved.log"])
    first = result.triage.first
    assert first is not None
    primary = result.triage.failures[first]
    assert (primary.rank, primary.host, primary.pid) == (3, "gpu-node-17.cluster.local", 104)
    others = [f for i, f in enumerate(result.triage.failures) if i != first]
    assert len(others) == 5
    assert all(f.kind == "not_memory" and f.victim_of == first for f in others)
    assert result.triage.scope == "one_rank"


def test_the_earlier_failure_is_first(tmp_path: Path) -> None:
    """Over several files time decides, not the order of reading."""
    for rank, minute in ((0, 5), (1, 2)):
        text = f"[2026-01-01 00:0{minute}:00] x\n{message(gpu=rank)}\n"
        (tmp_path / f"rank{rank}.log").write_text(text)
    result = examine([tmp_path])
    assert result.triage.primary is not None
    assert result.triage.primary.rank == 1
    assert result.triage.scope == "all_ranks"


def test_killed_after_a_device_failure_is_a_victim(tmp_path: Path) -> None:
    """SIGKILL by the launcher after a device failure is not another failure of memory."""
    text = (
        f"[rank1]: {message()}\n"
        "E torch/distributed/elastic/api.py] failed (exitcode: -9) local_rank: 0 (pid: 5) of binary"
    )
    result = run(tmp_path, text)
    assert [f.victim_of for f in result.triage.failures] == [None, 0]


def test_slurm_kill_is_about_the_host() -> None:
    """SLURM's words, srun's task and a nearly full host make host memory the cause."""
    result = examine([FIXTURES / "slurm_host_oom.log"])
    assert result.findings[0].cause == "host-memory"
    assert {f.form for f in result.triage.failures if f.victim_of is None} == {"slurm", "srun"}


def test_a_bare_message_is_not_enough(tmp_path: Path) -> None:
    """A message without numbers and frames is said to be too little."""
    result = run(tmp_path, "torch.cuda.OutOfMemoryError: CUDA out of memory")
    assert not result.verdict["enough"]
    assert "not enough evidence" in result.verdict["text"]
    assert "traceback" in result.verdict["decide"]


def test_recovered_retries_alone_are_no_cause_of_death(tmp_path: Path) -> None:
    """A retry that succeeded is listed as not fatal."""
    result = run(
        tmp_path,
        "[W1 CUDACachingAllocator.cpp:9] memory allocation failed with OOM on device 0 while "
        "trying to allocate 4096 bytes (free: 1, total: 2).",
    )
    assert [f.fatal for f in result.triage.failures] == [False]


def test_the_config_sharpens(tmp_path: Path) -> None:
    """FP8 in the config brings its copies up, and its flag is named first."""
    result = run(tmp_path, STEPS + message(), "fp8: hybrid\nmicro_batch_size: 4\n")
    assert result.findings[0].cause == "fp8-copies"
    assert result.findings[0].flags[0] == "fp8=hybrid"
    quiet = run(tmp_path, STEPS + message())
    assert "fp8-copies" not in [finding.cause for finding in quiet.findings]


def test_healthy_log(tmp_path: Path) -> None:
    """A log without failure has neither failures nor findings."""
    result = run(tmp_path, STEPS)
    assert result.triage.failures == []
    assert result.findings == []
    assert result.verdict["text"] == "no failure in the logs"


def test_rules_are_sound() -> None:
    """Every rule's condition parses, its cause is in the vocabulary, its weight is a share."""
    assert len(compiled()) == len(RULES)
    for rule in RULES:
        assert rule.cause in CAUSES
        assert -1 < rule.weight < 1
        assert rule.because


def test_what_the_config_switches_off_is_no_evidence(tmp_path: Path) -> None:
    """``fp8: none`` says nothing about FP8, ``fp8: hybrid`` does."""
    text = STEPS + trace("a.py forward: x = self.attn(x)") + message()
    causes = [f.cause for f in run(tmp_path, text, "fp8: none\ncpu_offload: False\n").findings]
    assert "fp8-copies" not in causes
    assert "fp8-copies" in [f.cause for f in run(tmp_path, text, "fp8: hybrid\n").findings]


@pytest.mark.parametrize(("steps", "moment"), [((0,), "first_step"), ((0, 1), "steady")])
def test_two_printed_steps_are_no_first_step(
    tmp_path: Path, steps: tuple[int, ...], moment: str
) -> None:
    """A job that counts its steps from 0 is past the first one when it has printed two."""
    lines = "".join(f"step {step} loss 1.0 memory allocated 2.00 GiB\n" for step in steps)
    found = run(tmp_path, lines + trace("a.py forward: x = self.attn(x)") + message())
    assert found.triage.primary is not None
    assert found.triage.primary.moment == moment


def test_another_error_is_no_cut_traceback(tmp_path: Path) -> None:
    """A traceback with its last line, which is not about memory, is no sign of a cause."""
    frames = trace("a.py forward: x = self.attn(x)")
    assert run(tmp_path, frames).findings
    assert not run(tmp_path, frames + "ValueError: shapes do not match").findings
