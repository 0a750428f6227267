"""Times that logs tell in other ways than seconds of an iteration: timers, tokens per second."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_jobs import SHARED, compared, megatron_log, metric, write

from fsdp_doctor.jobs import read_job

OLD = (
    "time (ms) | forward-compute: {forward:.2f} | backward-compute: {backward:.2f} |"
    " backward-send-forward-recv: 15.50 | optimizer: 10.00 | batch-generator: 5.00"
)
NEW = """\
(min, max) time across ranks (ms):
    forward-backward ...............................: (1.10, 405.20)
    forward-compute ................................: (1.10, {forward:.2f})
    backward-compute ...............................: (1.10, {backward:.2f})
    batch-generator ................................: (0.10, 5.00)
    all-grads-sync .................................: (0.01, 30.50)
    optimizer ......................................: (9.30, 10.00)"""
PREFIXED = "\n".join(f"[rank3]: {line}" for line in NEW.splitlines()).replace("(min, max)", "max")
PREFIXED = PREFIXED.replace("(1.10, ", "").replace("(0.10, ", "").replace("(0.01, ", "")
PREFIXED = PREFIXED.replace("(9.30, ", "").replace(")\n", "\n").removesuffix(")")


def with_timers(text: str, timers: str, *, backward: float) -> str:
    """Return a log with these timers after every iteration."""
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if "elapsed time" in line:
            lines.append(timers.format(forward=105.0, backward=backward))
    return "\n".join(lines) + "\n"


def phase(payload: dict, name: str) -> dict:
    """Return the time of a phase over all ranks."""
    return next(
        m
        for m in payload["metrics"]
        if (m["name"], m["phase"], m["rank"]) == ("phase_time_s", name, None)
    )


@pytest.mark.parametrize("timers", [OLD, NEW, PREFIXED], ids=["old", "min and max", "prefixed"])
def test_megatrons_timers_are_phase_times(timers, tmp_path, capsys):
    """The batch generator runs within forward-compute; memory stays undivided."""
    sides = [
        write(
            tmp_path / f"{name}.log",
            with_timers(megatron_log(times=[0.5] * 12), timers, backward=backward),
        )
        for name, backward in (("a", 200.0), ("b", 240.0))
    ]
    payload = compared(capsys, *sides)
    times = {n: phase(payload, n)["a"] for n in ("data", "forward", "backward", "optimizer")}
    assert times == pytest.approx(
        {"data": 0.005, "forward": 0.1, "backward": 0.2, "optimizer": 0.01}
    )
    assert phase(payload, "backward")["relative"] == pytest.approx(0.2)
    assert metric(payload, "resident_bytes")["a"] == int(9000.5 * (1 << 20))
    divided = {m["phase"] for m in payload["metrics"] if m["unit"] == "bytes"}
    assert divided == {None}
    assert any("Megatron's timers" in warning for warning in payload["warnings"])


def test_real_timers_of_a_job_of_64_ranks():
    """Every timed iteration of a public log has its timers. Needs ../shared."""
    log = SHARED / "bigscience_n16_ds_off.log"
    if not log.is_file():
        pytest.skip(f"no log of a real job at {log}")
    (last,) = (s for s in read_job(log).run.ranks if s.rank == 63)
    told = [
        {record.phase.value: record.time_s for record in step.phases if record.time_s is not None}
        for step in last.steps
        if step.kind == "timed"
    ]
    assert [len(times) for times in told] == [4] * 61
    assert told[0]["forward"] == pytest.approx(28.37370 - 0.18053)
    assert told[0]["backward"] == pytest.approx(75.96321)


def titan(directory: Path, name: str, tps: str, unit: str = "tps", *, stamp: str = "") -> Path:
    """Write the log of a torchtitan job of one file; ``stamp``: with ``{n}``, the step."""
    lines = [
        f"[titan] {stamp.format(n=n)} - root - INFO - \x1b[31mstep: {n:2}  "
        f"\x1b[32mloss:  9.1  \x1b[33mmemory: 30.00GiB(40.00%)  \x1b[34m{unit}: {tps}  "
        "\x1b[36mtflops: 100.00  \x1b[35mmfu: 10.00%\x1b[39m"
        for n in range(10, 40, 2)
    ]
    path = directory / f"{name}.log"
    write(path, "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("unit", ["tps", "wps"])
def test_tokens_per_second_of_torchtitan_are_step_times(unit, tmp_path, capsys):
    """With the batch of the config: 2 x 2,048 tokens, shared by the two ranks of a tensor group."""
    config = tmp_path / "job.toml"
    config.write_text(
        "[metrics]\nlog_freq = 5\n"
        "[training]\nlocal_batch_size = 2\nseq_len = 2048\n"
        "[parallelism]\ntensor_parallel_degree = 2\n"
    )
    sides = [titan(tmp_path, "a", "1,024", unit), titan(tmp_path, "b", "512", unit)]
    payload = compared(capsys, *(f"{side}+{config}" for side in sides))
    step = metric(payload, "step_time_s")
    assert (step["a"], step["b"], step["verdict"]) == (2.0, 4.0, "unclear")
    assert any("mean of 5 iterations" in warning for warning in payload["warnings"])


def test_time_stamps_stand_in_for_a_config(tmp_path, capsys):
    """A line every second step, two seconds or two minutes after the one before."""
    sides = [
        str(titan(tmp_path, "a", "1,024", stamp="2025-01-01 00:00:{n},250")),
        str(titan(tmp_path, "b", "512", stamp="2025-01-01 00:{n}:00,250")),
    ]
    payload = compared(capsys, *sides)
    step = metric(payload, "step_time_s")
    assert (step["a"], step["b"]) == pytest.approx((1.0, 60.0))
    assert any("between the time stamps" in warning for warning in payload["warnings"])


@pytest.mark.parametrize("stamp", ["", "2025-01-01 00:00:{n}"])
def test_tokens_per_second_without_a_config_say_what_is_missing(stamp, tmp_path, capsys):
    """Memory is compared; stamps of whole seconds are too coarse; a note says what is missing."""
    sides = [str(titan(tmp_path, name, "1,024", stamp=stamp)) for name in ("a", "b")]
    payload = compared(capsys, *sides)
    assert metric(payload, "peak_reserved_bytes")["verdict"] == "same"
    assert not any(m["name"] == "step_time_s" for m in payload["metrics"])
    assert any("would turn into step times" in warning for warning in payload["warnings"])
