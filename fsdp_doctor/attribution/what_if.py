"""Which field did it, by simulating the specs between A and B instead of running them.

The design's points are evaluated by the caller's simulator, as the rank, world size and device of
the runs; the simulated difference is held against the measured one in each category and phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from fsdp_doctor.attribution.atoms import Flips, find_flips
from fsdp_doctor.attribution.design import Design, Point, run_design
from fsdp_doctor.attribution.observations import fullest_rank
from fsdp_doctor.attribution.shares import Division, divide
from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.config import ConfigChange, ConfigDiff
from fsdp_doctor.model.estimate import RankEstimate, StepEstimate
from fsdp_doctor.model.run import Run
from fsdp_doctor.model.spec import ProfileSpec

SIMULATED = ("peak_allocated_bytes", "peak_reserved_bytes", "resident_bytes")
_SCREEN_FROM = 4
"""Presumed harmless fields are simulated as one group from so many fields on: equal bytes in every
category and phase leave no doubt."""
_DEFAULT_GPU = "h200"
_COMPILE = "compile.enabled"

Tell = Callable[[str], None]


class Simulate(Protocol):
    """What a rank of a spec allocates; text: why that cannot be told."""

    def __call__(
        self,
        spec: ProfileSpec,
        *,
        rank: int,
        device: Literal["cuda", "cpu"],
        workspace_bytes: int,
    ) -> RankEstimate | str:
        """Simulate one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulator, and when to use it."""

    simulate: Simulate
    always: bool = False
    """Whether to simulate even where other evidence settles the matter."""
    tell: Tell = lambda _text: None

    def is_worth_it(self, metrics: Sequence[Metric], diff: ConfigDiff, *, settled: bool) -> bool:
        """Return whether a memory number changed firmly and its cause is open.

        ``settled``: a re-run with one field flipped has the answer already. Without ``always`` it
        takes two changed fields, one of which may touch memory: known effects of a lone field say
        as much, and a simulation costs seconds.
        """
        firm = any(m.name in SIMULATED and m.verdict in ("worse", "better") for m in metrics)
        if not firm or settled:
            return False
        changed = [*diff.changed, *diff.unknown]
        return self.always or (len(changed) > 1 and any(map(_may_touch_memory, changed)))


def _may_touch_memory(change: ConfigChange) -> bool:
    if not change.effects:
        return change.step_time is None
    return any(e.direction != "none" and e.bytes != 0 for e in change.effects)


class Component(NamedTuple):
    """Which number of a point: a metric, its phase (None: the step) and category (None: all)."""

    metric: str
    phase: str | None
    category: str | None


Vector = Mapping[Component, int]


@dataclass(slots=True)
class Explored:
    """The evaluated points of a design, and what follows from them."""

    flips: Flips
    design: Design
    rank: int
    device: Literal["cuda", "cpu"]
    vectors: dict[Point, Vector | None] = field(default_factory=dict)
    """In the order of evaluation; None: the point could not run."""
    steps: dict[Point, StepEstimate] = field(default_factory=dict)
    failures: dict[Point, str] = field(default_factory=dict)
    _divisions: dict[Component, Division] = field(default_factory=dict)

    def moved(self, x: Point, y: Point) -> bool | None:
        """Return whether two points differ in any category of any phase."""
        first, second = self.vectors.get(x), self.vectors.get(y)
        return None if first is None or second is None else first != second

    def id_of(self, point: Point) -> str:
        """Return the name of an evaluated point."""
        return f"S{list(self.vectors).index(point)}"

    def divide(self, component: Component) -> Division:
        """Divide one number's difference among the atoms."""
        if component not in self._divisions:
            values = {p: v.get(component, 0) for p, v in self.vectors.items() if v is not None}
            inert = self.design.inert(self.vectors, self.moved)
            self._divisions[component] = divide(self.design.count, values, inert)
        return self._divisions[component]

    def rests_on(self, number: int, division: Division) -> tuple[str, ...]:
        """Return the points behind an atom's share: all of them, or both ends of it."""
        design = self.design
        wanted = {design.first_in([number]), design.last_out([number]), *design.ends}
        known = [p for p, vector in self.vectors.items() if vector is not None]
        return tuple(self.id_of(p) for p in known if division.exact or p in wanted)

    def partners(self, number: int, division: Division) -> tuple[str, ...]:
        """Return the fields whose effect depends on an atom."""
        fields = [i.fields for i in division.interactions if number in i.fields]
        others = sorted({n for found in fields for n in found} - {number})
        return tuple(key for n in others for key in self.flips.atoms[n].keys)

    def categories(self, metric: str, phase: str | None) -> set[str | None]:
        """Return the categories that any point holds."""
        return {
            c.category
            for vector in self.vectors.values()
            for c in vector or ()
            if (c.metric, c.phase) == (metric, phase) and c.category is not None
        }

    def covers(self, metric: Metric) -> bool:
        """Return whether a metric's number was simulated."""
        end = self.vectors[self.design.ends[1]]
        assert end is not None
        return any((c.metric, c.phase) == (metric.name, metric.phase) for c in end)


def explore(
    a: Sequence[Run],
    b: Sequence[Run],
    diff: ConfigDiff,
    simulate: Simulate,
    tell: Tell = lambda _text: None,
) -> Explored | str:
    """Simulate the design between the specs of two runs; text: why that cannot be done."""
    specs = _specs(a[0], b[0])
    if isinstance(specs, str):
        return specs
    device = a[0].manifest.device_type
    if device != b[0].manifest.device_type:
        return "the runs are of different devices"
    flips = _eager_flips(*specs, diff)
    if not flips.atoms:
        return "no changed field is one that is simulated"
    design = Design(count=len(flips.atoms), presumed_inert=flips.inert, screen_from=_SCREEN_FROM)
    rank = _rank(a[0], b[0])
    explored = Explored(flips=flips, design=design, rank=rank, device=device)
    workspace = _workspace_bytes(a[0])

    def evaluate(points: list[Point]) -> None:
        for point in points:
            tell(f"simulating {len(explored.vectors) + 1}: {_named(flips, point)}")
            found = _one(flips, point, simulate, (rank, device, workspace))
            if isinstance(found, str):
                explored.failures[point], explored.vectors[point] = found, None
            else:
                explored.steps[point] = found.steady
                explored.vectors[point] = _vector(found.steady, device)
            if point in design.ends and isinstance(found, str):
                raise _EndFailedError(found)

    try:
        run_design(design, explored.vectors, explored.moved, evaluate)
    except _EndFailedError as error:
        return str(error)
    return explored


class _EndFailedError(Exception):
    """A or B itself cannot be simulated."""


def _one(
    flips: Flips, point: Point, simulate: Simulate, where: tuple[int, Literal["cuda", "cpu"], int]
) -> RankEstimate | str:
    rank, device, workspace = where
    try:
        spec = flips.spec_at(point)
    except InputError as error:
        return str(error)
    if rank >= spec.world_size:
        rank = 0
    return simulate(spec, rank=rank, device=device, workspace_bytes=workspace)


def _named(flips: Flips, point: Point) -> str:
    if not point:
        return "A"
    return "B" if len(point) == len(flips.atoms) else f"A with {', '.join(flips.keys_of(point))}"


def _specs(a: Run, b: Run) -> tuple[ProfileSpec, ProfileSpec] | str:
    found = []
    for side, run in (("A", a), ("B", b)):
        manifest = run.manifest
        if manifest.spec is None:
            return f"{side} has no spec (a loop of the user's own)"
        try:
            raw = {**manifest.spec, "world_size": manifest.world_size}
            found.append(spec_from_mapping(raw, f"the spec of {side}"))
        except InputError as error:
            return str(error)
    return found[0], found[1]


def _eager_flips(a: ProfileSpec, b: ProfileSpec, diff: ConfigDiff) -> Flips:
    """Return the fields between the specs with blocks that are not compiled: only such ones can be
    simulated, so that what compilation does is left to its known effects.
    """
    compiled = a.config.compile or b.config.compile
    eager = [replace(spec, config=replace(spec.config, compile=False)) for spec in (a, b)]
    flips = find_flips(eager[0], eager[1], diff)
    if not compiled or _COMPILE in flips.not_in_spec:
        return flips
    return replace(flips, not_in_spec=(*flips.not_in_spec, _COMPILE))


def _rank(a: Run, b: Run) -> int:
    """Return the rank to play: the one that was, or B's fullest; 0 where A has none of it."""
    if b.manifest.source == "one_rank":
        rank = b.manifest.ranks[0]
    else:
        fullest = fullest_rank(b)
        rank = 0 if fullest is None else fullest.rank
    return rank if rank < min(a.manifest.world_size, b.manifest.world_size) else 0


def _workspace_bytes(run: Run) -> int:
    try:
        return find_gpu(run.manifest.device_name or "").cublas_workspace_bytes
    except InputError:
        return find_gpu(_DEFAULT_GPU).cublas_workspace_bytes


def _vector(step: StepEstimate, device: str) -> Vector:
    """Return every number of a step that is compared; ``None`` in place of a category: the sum."""
    found: dict[Component, int] = {}

    def put(metric: str, phase: str | None, categories: Mapping[str, int]) -> None:
        found[Component(metric, phase, None)] = sum(categories.values())
        for category, size in categories.items():
            found[Component(metric, phase, str(category))] = size

    put("peak_allocated_bytes", None, step.categories)
    put("resident_bytes", None, step.resident)
    for phase, part in step.phases.items():
        put("peak_allocated_bytes", str(phase), part.categories)
    if device == "cuda":
        slack = step.peak_reserved_bytes - step.peak_allocated_bytes
        put("peak_reserved_bytes", None, {**step.categories, "reserved_unallocated": slack})
    return found
