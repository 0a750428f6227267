"""Read gates: ``METRIC[SELECTOR]>THRESHOLD``.

::

    gate       = metric [ "[" selector { "," selector } "]" ] comparison number unit
    metric     = a name of METRIC_KINDS, or "retries"
    selector   = ("rank" | "phase" | "category") "=" (value | "*")
    comparison = ">" where less is better, "<" where more is better (then the number is negative)
    unit       = "%" | bytes: B KiB MiB GiB TiB kB MB GB TB | seconds: us ms s | count: none
                 | tokens/s: tokens/s

The threshold is that of the change B - A: ``%`` of A, or an amount.
"""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from typing import Literal

from fsdp_doctor.attribution.metric_kinds import METRIC_KINDS, MetricKind
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.gate import ANY, Gate
from fsdp_doctor.model.memory import Category, Phase

SHORT_NAMES = {"retries": "allocation_retries"}
UNITS: dict[str, dict[str, float]] = {
    "bytes": {
        "B": 1,
        **{f"{prefix}iB": float(1 << (10 * i)) for i, prefix in enumerate("KMGT", 1)},
        **{f"{prefix}B": 1000.0**i for i, prefix in enumerate("kMGT", 1)},
    },
    "s": {"us": 1e-6, "ms": 1e-3, "s": 1.0},
    "count": {"": 1},
    "tokens/s": {"tokens/s": 1},
}
"""Unit of a metric -> units a threshold may have, and what they stand for."""
_GATE = re.compile(
    r"\s*(?P<metric>[A-Za-z_]\w*)\s*(?:\[(?P<selectors>[^\[\]]*)\])?\s*(?P<comparison>>|<)\s*"
    r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>[A-Za-z%][A-Za-z/%]*)?\s*"
)
_PARTS = ("kernel", "exposed_communication", "communication", "copy", "idle")
"""What ``category`` may be in a gate on ``phase_time_s``, as ``Metric.category`` has them."""


def parse_gate(text: str) -> Gate:
    """Read one gate. Raises InputError that says what is wrong and what would be right."""
    where = f"--fail-on {text!r}"
    found = _GATE.fullmatch(text)
    if found is None:
        raise InputError(
            "not a gate", where=where, hint="METRIC>THRESHOLD, e.g. peak_allocated_bytes>2%"
        )
    name, kind = _metric(found["metric"], where)
    _check_direction(found["comparison"], name, kind, where)
    threshold, relative = _threshold(found["number"], found["unit"] or "", name, kind, where)
    selectors = _selectors(found["selectors"], where)
    rank = selectors.get("rank")
    if rank is not None and rank != ANY and not rank.isdecimal():
        raise InputError(f"no rank {rank!r}", where=where, hint="a number, or * for each")
    phase, category = selectors.get("phase"), selectors.get("category")
    _check_word(phase, [str(p) for p in Phase], "phase", where)
    categories = list(_PARTS) if kind.noisy else [str(c) for c in Category]
    _check_word(category, categories, "category", where)
    chosen: int | Literal["*"] | None = None
    if rank is not None:
        chosen = "*" if rank == ANY else int(rank)
    return Gate(
        text=text.strip(),
        metric=name,
        threshold=threshold,
        relative=relative,
        rank=chosen,
        phase=ANY if phase is None and kind.by == "phase" else phase,
        category=ANY if category is None and kind.by == "category" else category,
    )


def _metric(word: str, where: str) -> tuple[str, MetricKind]:
    name = SHORT_NAMES.get(word, word)
    kind = METRIC_KINDS.get(name)
    if kind is None:
        raise InputError(
            f"no metric {word!r}", where=where, hint=_nearest(word, [*METRIC_KINDS, *SHORT_NAMES])
        )
    return name, kind


def _nearest(word: str, known: list[str]) -> str:
    near = get_close_matches(word, known, 1, 0.4)
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"


def _check_direction(comparison: str, name: str, kind: MetricKind, where: str) -> None:
    wanted = "<" if kind.better == "higher" else ">"
    if comparison == wanted:
        return
    example = f"{name}<-3%" if kind.better == "higher" else f"{name}>3%"
    more = "more" if kind.better == "higher" else "less"
    raise InputError(f"{more} of {name} is better", where=where, hint=f"e.g. {example}")


def _threshold(
    number: str, unit: str, name: str, kind: MetricKind, where: str
) -> tuple[float, bool]:
    value = float(number)
    factors = {"%": 0.01, **UNITS[kind.unit]}
    if unit not in factors:
        units = ", ".join(u or "no unit" for u in factors)
        said = f"unit {unit!r}" if unit else "no unit"
        raise InputError(f"{said} for {name}", where=where, hint=f"one of {units}")
    if kind.better == "higher" and value > 0:
        raise InputError(
            "the change of a loss is negative", where=where, hint=f"e.g. {name}<-{number}{unit}"
        )
    if kind.better == "lower" and value < 0:
        raise InputError("a threshold below 0 asks for an improvement", where=where)
    if not math.isfinite(value):
        raise InputError(f"no finite number: {number}", where=where)
    return value * factors[unit], unit == "%"


def _selectors(text: str | None, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if text is None:
        return found
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in ("rank", "phase", "category") or not equals or not value or key in found:
            raise InputError(
                f"not a selector: {part.strip()!r}",
                where=where,
                hint="rank=N, phase=NAME or category=NAME, each once; * for each",
            )
        found[key] = value
    return found


def _check_word(word: str | None, known: list[str], what: str, where: str) -> None:
    if word is not None and word != ANY and word not in known:
        raise InputError(f"no {what} {word!r}", where=where, hint=_nearest(word, known))
