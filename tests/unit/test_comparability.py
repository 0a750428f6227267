"""Runs that differ in what must match: which metrics keep a verdict, and what gates do then."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from builders import GIB, make_diff, make_rank, make_run

from fsdp_doctor.attribution.compare import compare_with_diff, comparison_to_payload
from fsdp_doctor.attribution.gate_grammar import parse_gate
from fsdp_doctor.attribution.gates import hold_gates
from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.run import ModelSizes, Run
from fsdp_doctor.report import render_comparison
from fsdp_doctor.report.junit import render_junit

TIMES = {"step_time_s", "phase_time_s", "tokens_per_s"}


def launches(scale: float = 1.0, **options: object) -> list[Run]:
    """Return three launches of two ranks; ``scale``: of times and of the peak."""
    runs = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        steps = (0.1 * scale * np.exp(rng.normal(0, 0.002, 12))).tolist()
        ranks = [
            make_rank(
                rank,
                peaks={"forward": {"activations": int(4 * GIB * scale)}},
                times=steps,
                phase_times={"forward": steps},
                device_used=8 * GIB + int(scale * GIB),
                reserved=5 * GIB,
                retries=[int(scale)] * 12,
            )
            for rank in range(2)
        ]
        runs.append(make_run(ranks=ranks, **options))  # type: ignore[arg-type]
    return runs


def compared(a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """Compare two sides of one config."""
    return compare_with_diff(a, b, make_diff())


def refused(comparison: Comparison) -> set[str]:
    """Return the names of metrics over all ranks that cannot be compared."""
    found = {m.name for m in comparison.metrics if m.rank is None and not m.comparable}
    firm = {m.name for m in comparison.metrics if not m.comparable and m.verdict != "unclear"}
    assert firm == set()
    return found


def verdict(comparison: Comparison, name: str, rank: int | None = None) -> str:
    """Return the verdict on a metric of the whole step."""
    return next(
        m.verdict
        for m in comparison.metrics
        if (m.name, m.rank, m.phase, m.category) == (name, rank, None, None)
    )


def sizes(parameters: int) -> ModelSizes:
    """Return the sizes of a model."""
    return ModelSizes(parameters=parameters, parameter_bytes=4 * parameters)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({}, {}, set()),
        (
            {},
            {"device_name": "NVIDIA B200"},
            {*TIMES, "outside_pytorch_bytes", "allocation_retries"},
        ),
        ({}, {"source": "one_rank"}, TIMES),
        ({"tokens_per_step": 4096}, {"tokens_per_step": 8192}, {"step_time_s", "phase_time_s"}),
        ({}, {"world_size": 4}, set()),
        ({}, {"world_size": 4, "tokens_per_step": 8192}, {"tokens_per_s"}),
        ({}, {"world_size": 4, "tokens_per_step": 4097}, TIMES),
        ({"sizes": sizes(10)}, {"sizes": sizes(11)}, set()),
        ({}, {"environment": {"torch": "1.0"}}, set()),
    ],
)
def test_verdicts_are_refused_where_the_sides_differ_in_what_a_metric_needs(a, b, expected):
    """GPU, lone ranks, tokens of a step; not a version, a model, nor a world size by itself."""
    comparison = compared(launches(**a), launches(2.0, **b))
    assert refused(comparison) == expected
    assert verdict(comparison, "peak_allocated_bytes") == "worse"
    if "step_time_s" not in expected:
        assert verdict(comparison, "step_time_s") == "worse"


def test_a_cpu_and_a_gpu_have_nothing_to_compare():
    """Numbers stand, verdicts do not, and no byte is put down to anything."""
    comparison = compared(launches(), launches(2.0, device_type="cpu", device_name=None))
    assert {m.verdict for m in comparison.metrics} == {"unclear"}
    assert comparison.attribution == ()
    peak = next(m for m in comparison.metrics if m.name == "peak_allocated_bytes")
    assert (peak.a, peak.b) == (4 * GIB, 8 * GIB)


def test_ranks_of_other_worlds_hold_other_parts():
    """Bytes of single ranks are not compared; those over all ranks are."""
    comparison = compared(launches(), launches(2.0, world_size=4))
    assert verdict(comparison, "peak_allocated_bytes", 0) == "unclear"
    assert verdict(comparison, "peak_allocated_bytes") == "worse"
    assert verdict(comparison, "step_time_s", 0) == "worse"


@pytest.mark.parametrize("options", [{"tokens_per_step": None}, {"device_name": None}])
def test_what_one_side_does_not_know_makes_times_unclear(options):
    """They are not refused: the sides may be the same."""
    comparison = compared(launches(), launches(2.0, **options))
    assert refused(comparison) == set()
    assert verdict(comparison, "step_time_s") == "unclear"
    assert verdict(comparison, "peak_allocated_bytes") == "worse"


def test_a_gate_that_cannot_be_held_is_an_error():
    """It fails the command and is an error of JUnit; gates on bytes are held as ever."""
    a, b = launches(), launches(1.0, device_name="NVIDIA B200")
    comparison = compared(a, b)
    gates = [parse_gate(text) for text in ("step_time_s>50%", "peak_allocated_bytes>1%")]
    results = hold_gates(gates, comparison.metrics, a, b)
    outcomes = {result.metric: (result.outcome, result.fails) for result in results}
    assert outcomes["step_time_s"] == ("not_comparable", True)
    assert outcomes["peak_allocated_bytes"] == ("passed", False)
    held = type(comparison)(
        **{
            name: getattr(comparison, name)
            for name in type(comparison).__dataclass_fields__
            if name != "gates"
        },
        gates=results,
    )
    suite = ET.fromstring(render_junit(held))
    assert (suite.get("errors"), suite.get("failures")) == ("1", "0")
    (error,) = suite.iter("error")
    assert "no verdict: device_name differs (NVIDIA H200 -> NVIDIA B200)" in str(error.text)
    assert "1 not comparable" in render_comparison(held, a, b, "terminal")


def test_a_report_says_what_the_comparison_still_means():
    """Beside the sides, once; JSON has it as data."""
    a, b = launches(), launches(1.0, device_name="NVIDIA B200", tokens_per_step=None)
    comparison = compared(a, b)
    text = " ".join(render_comparison(comparison, a, b, "terminal", width=80).split())
    assert text.count("allocated and reserved bytes still compare") == 1
    assert "device name differs (NVIDIA H200 -> NVIDIA B200): no verdict on times" in text
    told = comparison_to_payload(comparison)["mismatches"]
    assert [(one["what"], one["known"]) for one in told] == [
        ("device_name", True),
        ("tokens_per_step", False),
    ]
    assert "step_time_s" in told[0]["refused"]
