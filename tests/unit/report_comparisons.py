"""Comparisons that exercise every part of a report."""

from __future__ import annotations

from dataclasses import replace

from builders import GIB, MIB, make_change, make_diff, make_effect
from report_samples import PEAKS_A, PEAKS_B

from fsdp_doctor.model.comparison import Attribution, Comparison, Metric
from fsdp_doctor.model.config import InertField
from fsdp_doctor.model.finding import Advice, Evidence, Finding


def _bytes(name: str, a: int | None, b: int | None, **fields: object) -> Metric:
    delta = None if a is None or b is None else b - a
    values = {"rank": None, "phase": None, "category": None, "verdict": "same", **fields}
    return Metric(
        name=name,
        unit="bytes",
        better="lower",
        a=a,
        b=b,
        delta=delta,
        relative=delta / a if a and delta is not None else None,
        **values,  # type: ignore[arg-type]
    )


def sample_metrics() -> tuple[Metric, ...]:
    """Return metrics of every unit and verdict."""
    peak_a, peak_b = sum(PEAKS_A["backward"].values()), sum(PEAKS_B["backward"].values())
    step = Metric(
        name="step_time_s",
        unit="s",
        better="lower",
        rank=None,
        phase=None,
        category=None,
        a=0.1502,
        b=0.1592,
        delta=0.0090,
        relative=0.06,
        interval=(0.048, 0.071),
        n_launches=(3, 3),
        n_steps=(15, 15),
        p=0.0004,
        verdict="worse",
        warnings=("launch 2 of A was not steady",),
    )
    tokens = replace(
        step,
        name="tokens_per_s",
        unit="tokens/s",
        better="higher",
        a=27270.3,
        b=25728.6,
        delta=-1541.7,
        relative=-0.0565,
        interval=(-0.066, -0.046),
        warnings=(),
    )
    time_forward = replace(
        step, name="phase_time_s", phase="forward", a=0.0451, b=0.0455, delta=0.0004,
        relative=0.0089, interval=(-0.01, 0.03), p=0.4, verdict="unclear", warnings=(),
    )  # fmt: skip
    categories = sorted(PEAKS_A["backward"].keys() | PEAKS_B["backward"].keys())
    return (
        step,
        _bytes("peak_allocated_bytes", peak_a, peak_b, verdict="worse"),
        _bytes("peak_reserved_bytes", 7 * GIB, 11 * GIB, verdict="worse"),
        tokens,
        _bytes("resident_bytes", 3 * GIB, 3 * GIB),
        _bytes("outside_pytorch_bytes", None, GIB, verdict="unclear"),
        _bytes("peak_allocated_bytes", 5 * GIB, 9 * GIB, phase="forward", verdict="worse"),
        time_forward,
        *(
            _bytes(
                "category_bytes",
                PEAKS_A["backward"].get(name, 0),
                PEAKS_B["backward"].get(name, 0),
                category=name,
                verdict="worse" if name.startswith("unsharded") else "same",
            )
            for name in categories
        ),
        _bytes("peak_allocated_bytes", peak_a, peak_b, rank=1, verdict="worse"),
    )


def _part(category: str | None, keys: tuple[str, ...], value: int, **fields: object) -> Attribution:
    return Attribution(
        metric="peak_allocated_bytes",
        rank=None,
        phase=None,
        category=category,
        keys=keys,
        value=value,
        **fields,  # type: ignore[arg-type]
    )


def sample_comparison(name_b: str = "gpt-no-reshard") -> Comparison:
    """Return a comparison with single, joint and unexplained attribution."""
    diff = make_diff(
        make_change(
            "sharding.reshard_after_forward",
            True,
            False,
            make_effect("unsharded_parameters", "up", 3 * GIB, "backward"),
            step_time="down",
        ),
        make_change(
            "accumulation.sync", "every_microbatch", "last_microbatch",
            make_effect("unsharded_gradients", "up"),
        ),
        make_change("accumulation.steps", 1, 4),
    )  # fmt: skip
    diff = replace(
        diff,
        cosmetic=(make_change("run.name", "a", "b"),),
        inert=(InertField(key="ddp.bucket_cap_mb", side="b", reason="the strategy is fsdp2"),),
    )
    finding = Finding(
        cause="sharding.reshard_after_forward",
        claim="sharding.reshard_after_forward: true -> false raised the peak by 3.25 GiB, because "
        "whole parameters stay on the GPU from forward to backward",
        confidence=0.9,
        severity="error",
        level=1,
        evidence=(Evidence(text="unsharded parameters at the peak", rank=0, bytes=3328 * MIB),),
        flags=("sharding.reshard_after_forward",),
        advice=(
            Advice(
                change="set sharding.reshard_after_forward: true",
                saves_bytes=3328 * MIB,
                cost="one more all-gather per block in backward",
            ),
        ),
    )
    time = replace(
        finding, claim="steps take 6 % longer", severity="warning", level=None, flags=(), advice=(),
        evidence=(Evidence(text="median of 3 launches a side", file="run.json", line=3),),
    )  # fmt: skip
    return Comparison(
        name_a="gpt-fsdp2",
        name_b=name_b,
        diff=diff,
        metrics=sample_metrics(),
        attribution=(
            _part(
                "unsharded_parameters", ("sharding.reshard_after_forward",), 3328 * MIB,
                share=0.867, level=1, predicted=3 * GIB, evidence="predicted from the layer sizes",
            ),
            _part(
                "unsharded_gradients", ("accumulation.steps", "accumulation.sync"), 512 * MIB,
                share=0.133, level=0,
            ),
            _part(None, (), -4096, share=0.0, evidence="the observed steps differ by less"),
        ),
        findings=(finding, time),
        warnings=("A and B ran on different drivers",),
    )  # fmt: skip


def empty_comparison() -> Comparison:
    """Return a comparison that found nothing."""
    return Comparison(
        name_a="a", name_b="b", diff=make_diff(), metrics=(), attribution=(), findings=()
    )
