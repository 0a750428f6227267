"""The first guess of a step's time, from counts alone."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from test_estimate import sample

from fsdp_doctor.gpus_table import GPUS, find_gpu
from fsdp_doctor.model.work import Collective, Copies, Kernel, StepWork
from fsdp_doctor.report.estimate_text import estimate_payload, render_estimate
from fsdp_doctor.simulator.collectives import collective_time
from fsdp_doctor.simulator.roofline import faster, guess_step_time, middle_s

H100 = find_gpu("h100").speed
MATMUL = Kernel(
    phase="forward",
    operator="mm",
    kind="matmul",
    dtype="bfloat16",
    flops=10**12,
    read_bytes=10**8,
    written_bytes=10**8,
    count=3,
)
ADD = Kernel(
    phase="optimizer",
    operator="add",
    kind="memory",
    dtype="float32",
    flops=0,
    read_bytes=2 * 10**9,
    written_bytes=10**9,
)
GATHER = Collective(
    phase="forward", kind="all_gather", payload_bytes=10**9, group_size=8, stride=1, count=2
)
WORK = StepWork(kernels=(MATMUL, ADD), collectives=(GATHER,))


def test_the_low_end_is_the_roofline_at_peak_rates() -> None:
    """Matmuls by FLOP/s, elementwise kernels by bandwidth; communication hides behind compute."""
    guess = guess_step_time(WORK, H100)
    matmul, add = 3 * 10**12 / 989.4e12, 3 * 10**9 / 3.35e12
    gather = 2 * (10**9 * 7 / 8 / 450e9 + 6.6e-6 + 3 * 0.6e-6)
    assert gather > matmul
    assert guess.phases["forward"].low_s == pytest.approx(gather)
    assert guess.total.low_s == pytest.approx(gather + add)
    assert guess.compute.low_s == pytest.approx(matmul + add)


def test_the_high_end_hides_nothing() -> None:
    """Compute at the stated part of the peak, and communication after it."""
    guess = guess_step_time(WORK, H100)
    total = guess.compute.high_s + guess.communication.high_s
    assert guess.total.high_s == pytest.approx(total)
    assert guess.compute.high_s > 2 * guess.compute.low_s


def test_a_run_without_communication_is_guessed_without() -> None:
    """Collectives are left out, and nothing is said to be sent."""
    guess = guess_step_time(WORK, H100, communicates=False)
    assert guess.communication.high_s == 0
    assert guess.communicated_bytes == 0
    assert guess.total.low_s < guess_step_time(WORK, H100).total.low_s


@pytest.mark.parametrize("name", sorted(GPUS))
def test_every_gpu_gives_an_ordered_range_with_its_source(name: str) -> None:
    """Low is below high in every phase, and the table's source is among the assumptions."""
    speed = GPUS[name].speed
    guess = guess_step_time(WORK, speed)
    assert all(0 < times.low_s < times.high_s for times in guess.phases.values())
    assert any(speed.source in text for text in guess.assumptions)


def test_more_work_is_never_faster() -> None:
    """Both ends rise with every count, and the direction says so."""
    base = guess_step_time(WORK, H100)
    larger = [
        replace(WORK, kernels=(replace(MATMUL, flops=2 * 10**12), ADD)),
        replace(WORK, kernels=(MATMUL, replace(ADD, read_bytes=4 * 10**9))),
        replace(WORK, collectives=(replace(GATHER, count=9),)),
        replace(
            WORK, copies=(Copies(phase="backward", place="to_gpu", total_bytes=10**9, count=1),)
        ),
    ]
    for work in larger:
        guess = guess_step_time(work, H100)
        assert guess.total.low_s >= base.total.low_s
        assert guess.total.high_s > base.total.high_s
        assert faster(base, guess) > 0
    assert faster(base, base) == 0
    assert base.total.low_s < middle_s(base.total) < base.total.high_s


def test_a_group_on_one_host_is_faster_than_over_hosts() -> None:
    """Over hosts a lone rank of each has one network link; whole hosts have one a rank."""
    local = collective_time(GATHER, H100, 8)
    lone = collective_time(replace(GATHER, stride=8), H100, 8)
    whole = collective_time(replace(GATHER, group_size=64), H100, 8)
    assert lone.low_s == pytest.approx(10**9 * 7 / 8 / 50e9, rel=0.01)
    assert local.low_s < whole.low_s < lone.low_s
    assert local.high_s < whole.high_s < lone.high_s


def test_an_all_reduce_moves_twice_and_one_rank_moves_nothing() -> None:
    """Ring all-reduce: a reduce-scatter and an all-gather; a group of one does nothing."""
    once = collective_time(GATHER, H100, 8).low_s
    twice = collective_time(replace(GATHER, kind="all_reduce"), H100, 8).low_s
    assert twice == pytest.approx(2 * once, rel=0.01)
    assert collective_time(replace(GATHER, group_size=1), H100, 8).high_s == 0


def test_bfloat16_without_matrix_units_runs_as_float32() -> None:
    """A V100 multiplies float16 fast, bfloat16 not."""
    speed = find_gpu("v100").speed
    bfloat = guess_step_time(StepWork(kernels=(MATMUL,)), speed)
    half = guess_step_time(StepWork(kernels=(replace(MATMUL, dtype="float16"),)), speed)
    assert bfloat.total.low_s == pytest.approx(half.total.low_s * 125 / 15.7)


def test_an_estimate_shows_the_guess_and_says_that_nothing_rests_on_it() -> None:
    """In the text, beside the answer and among the assumptions; whole in the JSON."""
    guess = guess_step_time(WORK, H100)
    estimate = replace(sample(True), step_time=guess)
    stream = StringIO()
    render_estimate(estimate, "spec", stream, width=200)
    assert "guess: 4." in stream.getvalue()
    assert "nothing is decided by it" in stream.getvalue()
    assert estimate_payload(estimate)["step_time"] == guess
    assert estimate_payload(sample(True))["step_time"] is None
