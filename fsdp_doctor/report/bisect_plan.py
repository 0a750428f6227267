"""What a search by re-runs would launch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fsdp_doctor.report.base import DocumentRenderer, renderer_for
from fsdp_doctor.report.document import Cell, Column, Document, Prose, Section, Table
from fsdp_doctor.report.words import words
from fsdp_doctor.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    """A combination that would be launched."""

    flipped: tuple[str, ...]
    overrides: tuple[str, ...]
    launches: int
    known: int
    """Launches that are recorded already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that would be launched."""

    design: str
    metric: str
    points: tuple[PlannedPoint, ...]
    most: int | None
    """Most launches of a search whose points follow from its outcomes; None: these points."""
    seconds_per_launch: float
    measured: bool
    """Whether that was measured on recorded launches; else it is a guess."""

    @property
    def launches(self) -> int:
        """Launches that these points still need, at least."""
        return sum(max(0, point.launches - point.known) for point in self.points)


def plan_payload(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON has it."""
    told = {item.name: getattr(plan, item.name) for item in fields(plan)}
    return told | {"launches": plan.launches}


def render_plan(plan: Plan, fmt: str, **options: Any) -> str:
    """Return the plan in a format of documents."""
    renderer = renderer_for(fmt, **options)
    assert isinstance(renderer, DocumentRenderer)
    return renderer.render_document(_document(plan))


def _document(plan: Plan) -> Document:
    seconds = plan.launches * plan.seconds_per_launch
    basis = "as recorded launches took" if plan.measured else "a guess, none is recorded yet"
    text = (
        f"{plan.launches} launches, about {format_seconds(seconds)} "
        f"({format_seconds(plan.seconds_per_launch)} each, {basis})."
    )
    if plan.most is not None:
        text += f" Others follow from the outcomes, at most {plan.most} in all."
    elif plan.metric == "step_time_s":
        text += " Rounds go on until the interval is tight or the budget is spent."
    table = Table(
        columns=(
            Column("fields of B", "code"),
            Column("upon the spec of A", "code"),
            Column("launches", "number"),
            Column("recorded", "number"),
        ),
        rows=tuple(
            (
                Cell("\n".join(point.flipped) or "(none: A)"),
                Cell("\n".join(point.overrides)),
                Cell(str(point.launches)),
                Cell(str(point.known)),
            )
            for point in plan.points
        ),
    )
    title = f"Plan: {plan.design}, {words(plan.metric)}"
    return Document(
        title=title, sections=(Section(title="Launches", blocks=(Prose(text=text), table)),)
    )
