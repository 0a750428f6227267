"""Logs of jobs become runs: which numbers, which config, and what may be concluded from them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from test_cli_compare import write_run

from fsdp_doctor.cli import main
from fsdp_doctor.jobs import kind_of, read_job

MIB, GIB = 1 << 20, 1 << 30
SHARED = Path(__file__).parents[3] / "shared" / "configs" / "megatron-lm"
ARGUMENTS = {
    "bf16": True,
    "global_batch_size": 64,
    "hidden_size": 2048,
    "micro_batch_size": 2,
    "num_attention_heads": 16,
    "num_layers": 24,
    "params_dtype": "torch.bfloat16",
    "recompute_granularity": None,
    "save": "/checkpoints/one",
    "seq_length": 1024,
    "tensor_model_parallel_size": 1,
    "use_distributed_optimizer": True,
    "world_size": 4,
}


def megatron_log(
    *,
    times: list[float],
    peak_mib: float = 20_000.0,
    first: float = 20.0,
    ranks: int = 4,
    **arguments: object,
) -> str:
    """Return the log of a job: arguments, memory after iteration 1, iterations of ``times``."""
    told = {**ARGUMENTS, **arguments}
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (47 - len(name))} {value}" for name, value in told.items()]
    lines.append("-------------------- end of arguments ---------------------")
    for number, seconds in enumerate([first, *times], 1):
        lines.append(
            f" [2026-01-02 03:04:05] iteration {number:8}/ 1000 | consumed samples: 1 |"
            f" elapsed time per iteration (ms): {seconds * 1e3:.1f} | learning rate: 1E-4 |"
        )
        if number == 1:
            for rank in range(ranks):
                lines.append(
                    f"[Rank {rank}] (after 1 iterations) memory (MB) | allocated: 9000.5 |"
                    f" max allocated: {peak_mib + rank} | reserved: 24000.0 | max reserved: 24000.0"
                )
    return "\n".join(lines) + "\n"


def steps(seed: int, level: float, count: int = 40) -> list[float]:
    """Return autocorrelated iterations, as one launch has them."""
    rng = np.random.default_rng(seed)
    noise = np.zeros(count)
    for i in range(1, count):
        noise[i] = 0.7 * noise[i - 1] + rng.normal(0, 0.01)
    return list(level * np.exp(noise))


def write(path: Path, text: str) -> str:
    """Write a log, packed where its name says so, and return its path."""
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def compared(capsys, *arguments: str) -> dict:
    """Return the JSON of ``compare``."""
    assert main(["compare", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def metric(payload: dict, name: str, rank: int | None = None) -> dict:
    """Return one row over the whole step."""
    rows = [m for m in payload["metrics"] if m["name"] == name and m["rank"] == rank]
    return next(m for m in rows if m["phase"] is None)


@pytest.mark.parametrize("suffix", [".log", ".gz"])
def test_two_megatron_jobs_from_their_logs_alone(suffix, tmp_path, capsys):
    """Changed fields, exact memory, step time without a verdict, candidates that may have done it.

    The first iteration, forty times as long, moves nothing.
    """
    a = write(tmp_path / f"a{suffix}", megatron_log(times=steps(1, 0.5), save="/checkpoints/a"))
    b = write(
        tmp_path / f"b{suffix}",
        megatron_log(
            times=steps(2, 0.6),
            peak_mib=15_000.0,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            save="/checkpoints/b",
        ),
    )
    payload = compared(capsys, a, b)
    changed = {c["key"] for c in payload["changed"]}
    assert changed == {"recompute.mode", "recompute.method", "recompute.num_layers"}
    peak = metric(payload, "peak_allocated_bytes")
    assert (peak["a"], peak["b"], peak["verdict"]) == (20_003 * MIB, 15_003 * MIB, "better")
    assert metric(payload, "peak_allocated_bytes", rank=2)["delta"] == -5_000 * MIB
    assert metric(payload, "resident_bytes")["a"] == int(9000.5 * MIB)
    step = metric(payload, "step_time_s")
    assert step["a"] == pytest.approx(0.5, rel=0.05)
    assert step["relative"] == pytest.approx(0.2, abs=0.05)
    assert (step["verdict"], step["n_launches"]) == ("unclear", [1, 1])
    assert max(step["n_steps"]) <= 40
    tokens = metric(payload, "tokens_per_s")
    assert tokens["a"] == pytest.approx(64 * 1024 / step["a"])
    rows = payload["attribution"]
    assert rows
    assert all(row["level"] in (0, 1) for row in rows)
    assert {f["level"] for f in payload["findings"]} <= {0, 1, None}
    note = next(f for f in payload["findings"] if f["cause"] == "step-time")
    assert (note["severity"], note["level"]) == ("note", 0)
    assert "recompute.mode" in note["flags"]
    assert any("printed once, after iteration 1" in w for w in payload["warnings"])


def test_equal_jobs_give_no_finding(tmp_path, capsys):
    """Memory is the same, time is not called different."""
    a = write(tmp_path / "a.log", megatron_log(times=steps(1, 0.5)))
    b = write(tmp_path / "b.log", megatron_log(times=steps(2, 0.5)))
    payload = compared(capsys, a, b)
    assert payload["findings"] == []
    assert payload["changed"] == []
    assert metric(payload, "peak_allocated_bytes")["verdict"] == "same"


def test_the_first_iteration_after_a_restart_is_warm_up(tmp_path):
    """Numbers that fall back mean a new process, which starts cold."""
    log = megatron_log(times=[0.5] * 10) + megatron_log(times=[0.5] * 30)
    run = read_job(Path(write(tmp_path / "a.log", log))).run
    timed = [s.step_time_s for series in run.ranks for s in series.steps if s.kind == "timed"]
    assert set(timed) - {None} == {0.5}


def test_a_directory_of_one_file_a_rank_with_its_config_beside(tmp_path, capsys):
    """Ranks come from the files' names, the config from the file given with ``+``."""
    config = tmp_path / "job.toml"
    config.write_text(
        "[training]\nlocal_batch_size = 2\nseq_len = 2048\n"
        "[parallelism]\ndata_parallel_shard_degree = 2\n"
    )
    sides = []
    for name, size in (("a", 30.0), ("b", 33.5)):
        directory = tmp_path / name
        directory.mkdir()
        for rank in range(2):
            lines = [
                f"[titan] - root - INFO - step: {n:2}  loss:  9.1  memory: "
                f"{size + rank / 10:.2f}GiB(40.00%)  tps: 1,436"
                for n in range(1, 13)
            ]
            write(directory / f"rank_{rank}.log", "\n".join(lines) + "\n")
        sides.append(f"{directory}+{config}")
    payload = compared(capsys, *sides)
    assert payload["a"]["framework"] == "torchtitan"
    reserved = metric(payload, "peak_reserved_bytes")
    assert reserved["a"] == pytest.approx(30.1 * GIB, abs=1)
    assert reserved["verdict"] == "worse"
    assert metric(payload, "peak_reserved_bytes", rank=0)["b"] == pytest.approx(33.5 * GIB, abs=1)


@pytest.mark.parametrize(("gib", "verdict"), [("2.51", "same"), ("2.53", "worse")])
def test_numbers_are_no_sharper_than_they_are_printed(gib, verdict, tmp_path, capsys):
    """DeepSpeed prints two decimals of GiB; one step of the last digit may be rounding."""
    line = (
        "[timer.py:260:stop] epoch=0/micro_step=20/global_step={step}, RunningAvgSamplesPerSec=1.0,"
        " CurrSamplesPerSec=1.1, MemAllocated=1.25GB, MaxMemAllocated={peak}GB\n"
    )
    paths = []
    for name, peak in (("a", "2.50"), ("b", gib)):
        text = "".join(line.format(step=n, peak=peak) for n in range(10, 60, 10))
        paths.append(write(tmp_path / f"{name}.log", text))
    payload = compared(capsys, *paths)
    assert metric(payload, "peak_allocated_bytes")["verdict"] == verdict
    assert any("no config is known of A and B" in w for w in payload["warnings"])


def test_a_job_that_ran_out_of_memory_failed(tmp_path):
    """Its failure is the run's, and a gate on it cannot pass."""
    good = megatron_log(times=[0.5] * 20)
    oom = (
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has"
        " a total capacity of 79.15 GiB of which 1.00 GiB is free. Including non-PyTorch memory,"
        " this process has 78.15 GiB memory in use. Of the allocated memory 70.00 GiB is allocated"
        " by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    a, b = write(tmp_path / "a.log", good), write(tmp_path / "b.log", good + oom)
    manifest = read_job(Path(b)).run.manifest
    assert (manifest.status, manifest.failure.kind) == ("failed", "device_oom")
    assert (manifest.failure.rank, manifest.failure.requested_bytes) == (1, 2 * GIB)
    assert main(["compare", a, b, "--fail-on", "peak_allocated_bytes>50%"]) == 1


def test_a_log_beside_a_recorded_run(tmp_path, capsys):
    """They compare in what both have, with what differs said."""
    write_run(tmp_path / "run")
    log = write(tmp_path / "b.log", megatron_log(times=[0.5] * 20))
    payload = compared(capsys, str(tmp_path / "run"), log)
    assert metric(payload, "peak_allocated_bytes")["a"] == GIB
    assert any(w.startswith("source differs") for w in payload["warnings"])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.log", "Hello\nworld\n", "no iteration or memory lines"),
        ("a.log", "", "no iteration or memory lines"),
        ("a.txt", "--- \x00\x01\n" * 10, "no iteration or memory lines"),
        ("none.log", None, "no such file"),
    ],
)
def test_what_is_no_job_is_one_line(name, content, words, tmp_path, capsys):
    """Status 2, file and reason, no traceback."""
    good = write(tmp_path / "good.log", megatron_log(times=[0.5] * 5))
    bad = tmp_path / name
    if content is not None:
        bad.write_text(content)
    assert main(["compare", good, str(bad)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(bad) in line
    assert words in line


def test_kinds_are_told_by_content(tmp_path):
    """A log needs no known extension, a spec keeps its own."""
    log = tmp_path / "slurm-123"
    log.write_text(megatron_log(times=[0.5]))
    spec = tmp_path / "spec.yaml"
    spec.write_text("world_size: 2\n")
    other = tmp_path / "spec"
    other.write_text("world_size: 2\n")
    write_run(tmp_path / "runs" / "launch-000")
    kinds = [kind_of(p) for p in (log, spec, other, tmp_path / "runs", tmp_path / "gone")]
    assert kinds == ["log", "spec", "spec", "run", "run"]


def test_real_jobs_of_64_ranks(capsys):
    """Two public logs: DeepSpeed off and on. Needs ../shared."""
    logs = [str(SHARED / f"bigscience_n16_ds_{side}.log") for side in ("off", "on")]
    if not all(Path(path).is_file() for path in logs):
        pytest.skip(f"no logs of real jobs in {SHARED}")
    payload = compared(capsys, *logs)
    assert {"sharding.impl", "recompute.impl"} <= {c["key"] for c in payload["changed"]}
    peak = metric(payload, "peak_allocated_bytes")
    assert (peak["a"], peak["b"]) == (round(17_504.84619140625 * MIB), 19_961.072265625 * MIB)
    assert peak["verdict"] == "worse"
    first = payload["basis"][0]
    assert [first[k] for k in ("label", "used", "ranks", "timed_steps")] == ["A1", True, 64, 61]
    assert first["log_lines"]["megatron memory"] == 64
    assert first["log_lines"]["megatron iteration"] == 62
    assert first["memory_kind"] == "observed"
    step = metric(payload, "step_time_s")
    assert 0.05 < step["relative"] < 0.11
    assert step["interval"][0] > 0
    assert step["verdict"] == "unclear"
    ranks = {m["rank"] for m in payload["metrics"] if m["name"] == "peak_allocated_bytes"}
    assert ranks == {None, *range(64)}
    levels = {row["level"] for row in payload["attribution"]}
    assert levels <= {0, 1}
    assert levels | {f["level"] for f in payload["findings"]} <= {0, 1, None}
