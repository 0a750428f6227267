"""``oom`` with memory snapshots: the cause that was put in comes first, with and without a log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import snapshot_maker as maker
from snapshot_maker import Maker, MiB
from test_oom_diagnosis import STEPS, message, trace

from fsdp_doctor.cli import main
from fsdp_doctor.postmortem import PostMortem, examine

GiB = 1 << 30
LINEAR = maker.LINEAR
STACKS = {
    "build": "torch/nn/modules/linear.py:109 __init__|train.py:10 build",
    "forward": f"{LINEAR}|model.py:20 forward|train.py:40 step",
    "loss": "torch/nn/functional.py:3500 cross_entropy|train.py:41 step",
    "gather": "torch/distributed/fsdp/_fully_shard/_fsdp_param.py:500 alloc_all_gather_outputs"
    "|torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:150 foreach_all_gather_copy_out"
    "|torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:300 wait_for_unshard"
    "|torch/nn/modules/module.py:1790 _call_impl|train.py:40 step",
    "state": "torch/optim/adam.py:180 _init_group|torch/optim/adam.py:230 step|train.py:43 step",
    "foreach": "torch/optim/adam.py:600 _multi_tensor_adam|torch/optim/adam.py:240 step"
    "|train.py:43 step",
    "keep": f"{LINEAR}|metrics.py:7 remember|train.py:45 step",
    "evaluate": "torch/nn/functional.py:134 linear|model.py:30 forward|train.py:80 evaluate",
    "save": "train.py:90 <dictcomp>|train.py:90 save_checkpoint|train.py:120 main",
    "ema": "copy.py:153 deepcopy|ema.py:20 __init__|train.py:12 build",
    "capture": "torch/cuda/graphs.py:100 capture_begin|train.py:9 capture",
}


class Job:
    """A GPT-like job of 8 layers in the wording of ``snapshot_maker``; sizes in MiB."""

    def __init__(self, *, state: int = 20, old: str = "") -> None:
        self.maker = Maker()
        self.layers = 8
        self.weights = [self.alloc(state, "build") for _ in range(self.layers)]
        self.moments: list[int] = []
        self.state = state
        self.kept: list[int] = []
        self.old = old

    def alloc(self, size: float, stack: str = "forward", **more: Any) -> int:
        """Allocate MiB."""
        return self.maker.alloc(int(size * MiB), STACKS.get(stack, stack), **more)

    def refuse(self, size: float, stack: str = "forward", free: float = 1) -> Maker:
        """End with a refused request, for which empty segments were given back."""
        for segment in [s for s in self.maker.segments if not s.blocks]:
            self.maker.segments.remove(segment)
            self.maker.event("segment_free", segment.address, segment.size, stream=segment.stream)
        self.maker.oom(int(size * MiB), int(free * MiB), STACKS.get(stack, stack))
        return self.maker

    def forward(self, activation: float = 10, logits: float = 4) -> None:
        """One forward and its loss."""
        self.maker.note("DistributedDataParallel.forward")
        self.kept = [self.alloc(activation) for _ in range(self.layers)]
        self.maker.note("DistributedDataParallel.forward", start=False)
        self.kept.append(self.alloc(logits, "loss"))

    def backward(self, *, gradients: float | None = None) -> list[int]:
        """One backward: a gradient for each layer, activations go."""
        one = self.alloc(0.01, "torch/autograd/__init__.py:231 _make_grads|train.py:42 step")
        made = []
        for block in reversed(self.kept):
            if len(made) < self.layers:
                made.append(self.alloc(gradients or self.state, ""))
            self.maker.free(block)
        self.maker.free(one)
        self.kept = []
        return made

    def optimize(self, gradients: list[int]) -> None:
        """One optimizer step; the first makes its state."""
        self.maker.note("Optimizer.step#AdamW.step")
        if not self.moments:
            self.moments = [self.alloc(self.state, "state") for _ in range(2 * self.layers)]
        self.maker.free(self.alloc(self.state, "foreach"))
        self.maker.note("Optimizer.step#AdamW.step", start=False)
        self.maker.free(*gradients)

    def steps(self, count: int = 2, **sizes: float) -> Job:
        """Whole steps."""
        for _ in range(count):
            self.forward(**sizes)
            self.optimize(self.backward())
        return self


def forward() -> Maker:
    """A batch whose activations do not fit."""
    job = Job(state=5).steps()
    job.forward(activation=60)
    return job.refuse(60)


def backward() -> Maker:
    """The same, refused in backward."""
    job = Job(state=5).steps(activation=60)
    job.forward(activation=60)
    job.alloc(0.01, "torch/autograd/__init__.py:231 _make_grads|train.py:42 step")
    job.alloc(5, "")
    return job.refuse(60, "")


def state() -> Maker:
    """The first optimizer step makes more state than there is room for."""
    job = Job(state=80)
    job.forward(activation=4)
    job.backward()
    job.maker.note("Optimizer.step#AdamW.step")
    for _ in range(9):
        job.alloc(80, "state")
    return job.refuse(80, "state")


def before_training() -> Maker:
    """The parameters do not fit."""
    return Job(state=200).refuse(200, "build")


def optimizer_copies() -> Maker:
    """Foreach copies in a later optimizer step."""
    job = Job(state=40).steps()
    job.forward()
    job.backward()
    job.maker.note("Optimizer.step#AdamW.step")
    for _ in range(6):
        job.alloc(40, "foreach")
    return job.refuse(40, "foreach")


def checkpoint() -> Maker:
    """Clones of the state while a checkpoint is saved."""
    job = Job(state=60).steps()
    for _ in range(12):
        job.alloc(60, "save")
    return job.refuse(60, "save")


def evaluation() -> Maker:
    """Outputs of every batch are kept."""
    job = Job(state=10).steps()
    job.maker.note("DistributedDataParallel.forward")
    for _ in range(12):
        job.alloc(50, "evaluate")
    return job.refuse(50, "evaluate")


def leak() -> Maker:
    """Every step leaves a tensor behind."""
    job = Job(state=8)
    for _ in range(8):
        job.steps(1)
        job.alloc(16, "keep")
    job.forward()
    return job.refuse(16)


def kept_graph() -> Maker:
    """A loss kept with its graph: the third step has no room any more."""
    job = Job(state=5)
    for _ in range(2):
        job.forward(activation=60)
        job.kept = [job.kept[-1]]  # the other blocks are never freed
        job.optimize(job.backward())
    job.forward(activation=60)
    return job.refuse(60)


def fragmentation() -> Maker:
    """Small blocks pin nearly empty segments."""
    job = Job(state=10)
    fillers = []
    for _ in range(12):
        job.maker.free(job.alloc(64))
        job.alloc(2, "keep")
        fillers.append(job.alloc(62))
    job.maker.free(*fillers)
    job.steps()
    job.maker.note("DistributedDataParallel.forward")
    return job.refuse(200, free=60)


def logits() -> Maker:
    """Copies of the logits in the loss."""
    job = Job(state=8).steps()
    job.forward(activation=10, logits=100)
    job.alloc(100, "loss")
    job.alloc(100, "loss")
    return job.refuse(100, "loss")


def gathered() -> Maker:
    """Units that stay gathered."""
    job = Job(state=5)
    job.maker.note("FSDP::root_pre_forward")
    for unit in range(8):
        job.maker.note(f"FSDP::all_gather (layers.{unit})")
        job.alloc(70, "gather")
        job.maker.note(f"FSDP::all_gather (layers.{unit})", start=False)
        job.alloc(6)
    job.maker.note("FSDP::all_gather (layers.8)")
    return job.refuse(70, "gather")


def one_unit() -> Maker:
    """The whole model is one unit."""
    job = Job(state=5)
    job.maker.note("FSDP::root_pre_forward")
    job.maker.note("FSDP::all_gather")
    job.alloc(300, "gather")
    return job.refuse(300, "gather")


def copy_of_the_model() -> Maker:
    """An averaged copy beside the model."""
    job = Job(state=60)
    for _ in range(8):
        job.alloc(60, "ema")
    return job.refuse(60, "ema")


def other_stream() -> Maker:
    """A free piece that belongs to another stream."""
    job = Job(state=10).steps()
    job.maker.free(job.alloc(300, "gather", stream=77))
    job.alloc(4, "gather", stream=77)
    job.maker.note("DistributedDataParallel.forward")
    return job.refuse(200)


def late_frees() -> Maker:
    """Blocks freed while another stream still uses them."""
    job = Job(state=10).steps()
    job.maker.note("DistributedDataParallel.forward")
    for _ in range(6):
        job.maker.free(job.alloc(80, "gather"), complete=False)
    return job.refuse(80)


def graphs() -> Maker:
    """Private pools of CUDA graphs."""
    job = Job(state=10).steps()
    for number in range(4):
        job.alloc(200, "capture", pool=(0, number + 1))
    return job.refuse(200, "capture")


SCENES: dict[str, tuple[Callable[[], Maker], str]] = {
    "forward": (forward, "activations"),
    "backward": (backward, "activations"),
    "optimizer state": (state, "state-does-not-fit"),
    "before training": (before_training, "state-does-not-fit"),
    "optimizer copies": (optimizer_copies, "optimizer-temporaries"),
    "checkpoint": (checkpoint, "checkpoint-copies"),
    "evaluation": (evaluation, "evaluation-accumulation"),
    "leak": (leak, "leak"),
    "kept graph": (kept_graph, "leak"),
    "fragmentation": (fragmentation, "fragmentation"),
    "logits": (logits, "logits"),
    "gathered units": (gathered, "communication-buffers"),
    "one unit": (one_unit, "wrap-granularity"),
    "copy of the model": (copy_of_the_model, "unsharded-copy"),
    "other stream": (other_stream, "stream-reuse"),
    "late frees": (late_frees, "stream-reuse"),
    "graphs": (graphs, "cuda-graph-pools"),
}


def causes(result: PostMortem) -> list[str]:
    """The causes in order."""
    return [finding.cause for finding in result.findings]


@pytest.fixture(name="snapshot")
def snapshot_fixture(tmp_path: Path) -> Callable[[Maker], Path]:
    """A function that writes a snapshot."""
    return lambda job: maker.write(job.snapshot(), tmp_path / "rank0.pickle")


@pytest.mark.parametrize("name", SCENES)
def test_snapshot_alone_tells_the_cause(name: str, snapshot: Callable[[Maker], Path]) -> None:
    """The cause comes first, is sure enough, and rests on lines of the snapshot."""
    make, cause = SCENES[name]
    result = examine([snapshot(make())])
    assert causes(result)[0] == cause, [(f.cause, f.confidence) for f in result.findings]
    assert result.verdict["enough"]
    assert result.triage.primary is not None
    assert result.triage.primary.form == "snapshot"


@pytest.mark.parametrize("name", SCENES)
def test_log_and_snapshot_tell_the_cause(
    name: str, snapshot: Callable[[Maker], Path], tmp_path: Path
) -> None:
    """A full device's message beside the snapshot of the same failure: one failure, same cause."""
    make, cause = SCENES[name]
    job = make()
    asked = int(job.trace[-1]["size"]) / MiB
    text = message(ask=f"{asked / 1024:.2f}", free="0.00", own="78.50")
    log = tmp_path / "rank0.log"
    log.write_text(f"[rank0]: {text}\n")
    result = examine([log], snapshots=[snapshot(job)])
    assert causes(result)[0] == cause, [(f.cause, f.confidence) for f in result.findings]
    assert len(result.triage.failures) == 1
    assert result.triage.primary is not None
    assert result.triage.primary.form == "new"


def test_another_process_is_told_by_the_log(
    snapshot: Callable[[Maker], Path], tmp_path: Path
) -> None:
    """What this process does not hold of a full device is another's, whatever fills its pool."""
    log = tmp_path / "rank0.log"
    text = message(ask="0.06", free="0.01", own="30.00", live="28.00", idle="0.50")
    log.write_text(STEPS + trace("m.py forward: x = self.mlp(x)") + text + "\n")
    assert causes(examine([log], snapshots=[snapshot(forward())]))[0] == "foreign-process"


def test_library_failure_keeps_its_cause(snapshot: Callable[[Maker], Path], tmp_path: Path) -> None:
    """A snapshot without a refused request does not outvote a library's own words."""
    log = tmp_path / "rank0.log"
    log.write_text("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `f(h)`\n")
    job = Job(state=5).steps(activation=60).maker
    assert causes(examine([log], snapshots=[snapshot(job)]))[0] == "library-allocation"


def test_directory_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a directory of ranks the failed one is explained, beside logs in the same folder too."""
    for rank, make in enumerate((lambda: Job().steps().maker, forward)):
        maker.write(make().snapshot(), tmp_path / f"rank{rank}_memory_snapshot.pickle")
    for arguments in ([str(tmp_path)], ["--snapshot", str(tmp_path)]):
        assert main(["oom", *arguments, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["findings"][0]["cause"] == "activations"
        assert [one["rank"] for one in answer["snapshots"]] == [0, 1]
        assert answer["snapshot"]["rank"] == 1
        first = answer["failures"][answer["first_failure"]]
        assert (first["rank"], first["source"]["line"]) == (1, None)
    (tmp_path / "rank1.log").write_text(f"[rank1]: {message(ask='0.06')}\n")
    assert main(["oom", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["failures"]) == 1
    assert answer["failures"][0]["form"] == "new"
    assert answer["findings"][0]["cause"] == "activations"


def test_snapshot_of_the_failed_rank_is_taken(tmp_path: Path) -> None:
    """Where the log names the rank that failed first, its snapshot is the one that counts."""
    for rank, make in enumerate((forward, logits)):
        maker.write(make().snapshot(), tmp_path / f"snapshot_{rank}.pickle")
    log = tmp_path / "all.log"
    log.write_text(f"[rank1]: {message(ask='0.10')}\n[rank0]: {message(ask='0.06')}\n")
    result = examine([log], snapshots=[tmp_path])
    assert result.snapshot is not None
    assert result.snapshot.rank == 1
    assert causes(result)[0] == "logits"


@pytest.mark.parametrize("name", ["missing.pickle", "broken.pickle", "."])
def test_unusable_snapshot(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A snapshot that cannot be read ends in one line and status 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.log").write_text(message() + "\n")
    if name == "broken.pickle":
        (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    assert main(["oom", "a.log", "--snapshot", name]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) <= 2


def test_a_folder_full_of_other_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside pictures, weights, broken pickles and empty files the log still gives its answer."""
    (tmp_path / "job.log").write_bytes("Ошибка 错误 \xe9\n".encode() + message().encode() + b"\n")
    (tmp_path / "model.pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    (tmp_path / "weights.pkl").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "loss.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "empty.log").write_bytes(b"")
    (tmp_path / "latin.out").write_bytes("Speicher erschöpft".encode("latin-1"))
    (tmp_path / "utf16.log").write_bytes("step 1 memory allocated 1 GiB\n".encode("utf-16"))
    (tmp_path / "dir.log").mkdir()
    (tmp_path / "dangling.log").symlink_to(tmp_path / "nowhere")
    assert main(["oom", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["failures"][answer["first_failure"]]["kind"] == "device_oom"
    assert answer["snapshot"] is None


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"\x00" * 40, b"\xff\xfe", b"{", b"\r\r\r"])
def test_next_to_nothing(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Almost empty input: an answer or one clear line."""
    (tmp_path / "a.log").write_bytes(content)
    status = main(["oom", str(tmp_path / "a.log")])
    shown = capsys.readouterr()
    assert status in (0, 2)
    assert "Traceback" not in shown.out + shown.err


def test_snapshots_in_folders_beside_logs(tmp_path: Path) -> None:
    """An output folder as trainers leave it: logs above, the snapshots of steps below."""
    for step in (10, 20):
        folder = tmp_path / "outputs" / "memory_snapshot" / f"iteration_{step}_exit"
        folder.mkdir(parents=True)
        job = forward() if step == 20 else Job().steps().maker
        maker.write(job.snapshot(), folder / "rank0_memory_snapshot.pickle")
    (tmp_path / "rank0.log").write_text(f"[rank0]: {message(ask='0.06')}\n")
    result = examine([tmp_path])
    assert result.snapshot is not None
    assert "iteration_20_exit" in result.snapshot.path
    assert len(result.triage.failures) == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (fragmentation, "replayed with expandable_segments:True the request is served"),
        (forward, "no allocator setting that was tried serves the request"),
    ],
)
def test_first_screen_tells_the_replay(
    make: Callable[[], Maker],
    said: str,
    snapshot: Callable[[Maker], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether another allocator setting would have saved the run is said on the first screen."""
    assert main(["oom", str(snapshot(make()))]) == 0
    assert said in " ".join(capsys.readouterr().out.split("\n")[:16])
