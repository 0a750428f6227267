"""The search of ``fit`` over made-up moves, and the moves themselves over real specs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.rules import Job
from fsdp_doctor.config.schema import leaf_values
from fsdp_doctor.config.spec import apply_overrides, load_spec, load_written_spec
from fsdp_doctor.errors import InputError
from fsdp_doctor.fit.legal import Draft, Rulebook
from fsdp_doctor.fit.move import Move
from fsdp_doctor.fit.moves import MOVES
from fsdp_doctor.fit.search import Found, Outcome, Search, numerics_of, pareto
from fsdp_doctor.model.fit import NUMERICS
from fsdp_doctor.model.spec import ProfileSpec, TrainingConfig

PROFILES = Path(__file__).parent.parent.parent / "profiles"
SPECS = sorted(PROFILES.glob("h200*/specs/*.yaml"))
SPEC = ProfileSpec(name="made up", config=TrainingConfig(strategy="fsdp2"))
BY_NAME = {move.name: move for move in MOVES}
BASE_BYTES = 1000


@dataclass
class World:
    """Made-up moves with what they save and cost; some pairs save more, or less, together."""

    moves: tuple[Move, ...]
    saves: dict[str, int]
    costs: dict[str, float]
    together: dict[frozenset[str], int]
    asked: int = 0
    """Simulations of the last search."""

    def outcome(self, draft: Draft, memory: int) -> Outcome:
        """What a simulation would say."""
        names = draft.names
        saved = sum(self.saves[name] for name in names)
        saved += sum(more for pair, more in self.together.items() if pair <= names)
        reserved = max(BASE_BYTES - saved, 0)
        cost = sum(self.costs[name] for name in names)
        return Outcome(fits=reserved <= memory, reserved_bytes=reserved, cost=cost)

    def search(self, memory: int, limit: int = 200) -> Found:
        """Search under a limit of memory."""
        self.asked = 0

        def evaluate(drafts: Sequence[Draft]) -> list[Outcome]:
            self.asked += len(drafts)
            return [self.outcome(draft, memory) for draft in drafts]

        return Search(
            self.moves,
            apply=lambda moves: Draft(spec=SPEC, moves=tuple(moves)),
            evaluate=evaluate,
            base=self.outcome(Draft(spec=SPEC), memory),
            limit=limit,
        ).run()


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to seven moves in up to five families."""
    count = draw(st.integers(1, 7))
    moves = []
    for number in range(count):
        family = draw(st.integers(0, 4))
        moves.append(
            Move(
                name=f"move{number}",
                title=f"move {number}",
                family=f"family{family}",
                strength=number,
                when={},
                sets={},
                saves="",
                costs="",
                numerics=draw(st.sampled_from(("same", "same", "rounding"))),
            )
        )
    names = [move.name for move in moves]
    return World(
        moves=tuple(moves),
        saves={name: draw(st.integers(0, 400)) for name in names},
        costs={name: draw(st.integers(-5, 60)) / 100 for name in names},
        together={
            frozenset(draw(st.tuples(st.sampled_from(names), st.sampled_from(names)))): draw(
                st.integers(-150, 150)
            )
            for _ in range(draw(st.integers(0, 3)))
        },
    )


def cheapest(found: Found, numerics: str) -> float:
    """Cost of the cheapest combination that fits and rounds no more than ``numerics``."""
    allowed = NUMERICS.index(numerics)
    costs = [
        outcome.cost
        for draft, outcome in found.outcomes.values()
        if outcome.fits and NUMERICS.index(numerics_of(draft)) <= allowed
    ]
    return min(costs, default=float("inf"))


@settings(max_examples=100, deadline=None)
@given(world=worlds(), memory=st.integers(300, 999), less=st.integers(1, 400))
def test_tighter_memory_never_gives_a_cheaper_answer(world: World, memory: int, less: int) -> None:
    """Whatever fits into less would have been found, or beaten, with more."""
    for numerics in NUMERICS:
        roomy, tight = world.search(memory), world.search(max(memory - less, 0))
        assert cheapest(roomy, numerics) <= cheapest(tight, numerics) + 1e-12


@settings(max_examples=80, deadline=None)
@given(world=worlds(), memory=st.integers(0, 999), limit=st.integers(0, 12))
def test_the_search_is_bounded_and_deterministic(world: World, memory: int, limit: int) -> None:
    """It asks for no more simulations than allowed, and finds the same again."""
    first = world.search(memory, limit)
    asked = world.asked
    assert asked <= limit
    assert list(first.outcomes) == list(world.search(memory, limit).outcomes)
    if not first.complete:
        assert asked == limit


def made(name: str, family: str = "", strength: int = 1) -> Move:
    """A move that changes nothing."""
    return Move(
        name=name,
        title=name,
        family=family or name,
        strength=strength,
        when={},
        saves="",
        costs="",
    )


def test_several_moves_are_combined_when_none_is_enough() -> None:
    """Three moves of 200 each fit where two do not; the stronger of a family takes part alone."""
    moves = (made("a"), made("b"), made("c", "f", 1), made("d", "f", 2))
    world = World(moves, dict.fromkeys("abcd", 200) | {"d": 250}, dict.fromkeys("abcd", 0.1), {})
    found = world.search(BASE_BYTES - 600)
    fitting = {draft.names for draft, outcome in found.outcomes.values() if outcome.fits}
    assert frozenset("abd") in fitting
    assert not any({"c", "d"} <= names for names in found.outcomes)


def test_nothing_is_added_to_what_fits_already() -> None:
    """Unless it makes it faster."""
    moves = (made("enough"), made("needless"), made("faster"))
    saves = {"enough": 500, "needless": 10, "faster": 10}
    world = World(moves, saves, {"enough": 0.2, "needless": 0.1, "faster": -0.1}, {})
    found = world.search(BASE_BYTES - 500)
    assert frozenset({"enough", "needless"}) not in found.outcomes
    assert frozenset({"enough", "faster"}) in found.outcomes
    (best, *_) = pareto(found.fitting(), 1, 5)
    assert best[0].names == {"enough", "faster"}


def test_the_answer_leaves_out_what_is_dearer_and_saves_no_more() -> None:
    """Of three that fit the dearest with the least room is dropped; rounding comes last."""
    drafts = [Draft(spec=SPEC, moves=(made(name),)) for name in ("cheap", "dear", "roomy")]
    outcomes = [(0.1, 500), (0.2, 510), (0.3, 300)]
    items = [
        (draft, Outcome(fits=True, reserved_bytes=reserved, cost=cost))
        for draft, (cost, reserved) in zip(drafts, outcomes, strict=True)
    ]
    assert [d.moves[0].name for d, _ in pareto(items, 20, 5)] == ["cheap", "roomy"]


def test_the_answer_holds_no_change_more_than_needed() -> None:
    """What leaves more free by a further change that costs nothing is not proposed."""
    few = Draft(spec=SPEC, moves=(made("a"),))
    more = Draft(spec=SPEC, moves=(made("a"), made("b")))
    items = [
        (few, Outcome(fits=True, reserved_bytes=500, cost=0.1)),
        (more, Outcome(fits=True, reserved_bytes=400, cost=0.1)),
    ]
    assert [draft for draft, _ in pareto(items, 20, 5)] == [few]


# -- real moves on real specs ------------------------------------------------------------------


def rulebook(spec: ProfileSpec, *keep: str) -> Rulebook:
    """The rules for a spec on an H200."""
    return Rulebook(spec, Job(gpu_arch=9.0, world_size=spec.world_size), keep)


@settings(max_examples=80, deadline=None)
@given(
    path=st.sampled_from(SPECS),
    names=st.lists(st.sampled_from(sorted(BY_NAME)), max_size=4, unique=True),
    micro_batch=st.sampled_from([1, 2, 4, 6, 8]),
    accumulation=st.integers(1, 3),
)
def test_moves_never_break_a_rule_and_keep_the_global_batch(
    path: Path, names: list[str], micro_batch: int, accumulation: int
) -> None:
    """A combination is refused, or it is a valid spec of the same global batch and model, which
    ``--set`` with the same texts gives too.
    """
    texts = [
        f"workload.micro_batch={micro_batch}",
        f"config.gradient_accumulation.steps={accumulation}",
    ]
    try:
        spec = load_written_spec(path, texts).spec
    except InputError:
        return
    order = [move for move in MOVES if move.name in names]
    draft = rulebook(spec).apply(order)
    if isinstance(draft, str):
        assert draft
        return
    assert apply_overrides(spec, draft.overrides) == draft.spec
    before, after = (resolve_spec(s).fields["batch.global"].value for s in (spec, draft.spec))
    assert before == after
    assert draft.spec.workload.model == spec.workload.model
    assert draft.spec.config.optimizer.learning_rate == spec.config.optimizer.learning_rate


def test_every_move_applies_to_some_spec() -> None:
    """No entry of the table is dead: each is legal for a recorded spec or a variant of one."""
    variants = [
        [],
        ["workload.micro_batch=8"],
        ["config.fsdp2.wrap=none", "config.fsdp1.wrap=none"],
        ["config.fsdp2.blocks_per_unit=2"],
        ["config.fsdp1.limit_all_gathers=false", "config.fsdp1.forward_prefetch=true"],
        ["config.precision.autocast=null"],
        ["config.fsdp2.mp_policy=null", "config.fsdp1.mixed_precision=null"],
        ["config.fsdp1.sharding_strategy=_HYBRID_SHARD_ZERO2"],
        ["config.megatron.ddp.overlap_grad_reduce=false"],
    ]
    alive: set[str] = set()
    for path, texts in itertools.product(SPECS, variants):
        if alive == set(BY_NAME):
            break
        try:
            spec = load_written_spec(path, texts).spec
        except InputError:
            continue
        fields = dict(leaf_values(spec))
        missing = [m for m in MOVES if m.name not in alive and m.applies(fields)]
        if missing:
            rules = rulebook(spec)
            alive |= {m.name for m in missing if isinstance(rules.apply((m,)), Draft)}
    assert alive == set(BY_NAME)


def test_a_kept_section_is_never_touched() -> None:
    """Neither a section's fields nor an environment variable."""
    spec = load_spec(next(path for path in SPECS if path.stem == "fsdp2-no-reshard"))
    rules = rulebook(spec, "config.fsdp2", "PYTORCH_CUDA_ALLOC_CONF")
    for name in ("fsdp2-reshard", "fsdp2-offload", "expandable-segments"):
        assert "--keep" in str(rules.apply((BY_NAME[name],)))
    assert isinstance(rules.apply((BY_NAME["checkpoint-full"],)), Draft)


def test_a_kept_field_that_does_not_exist_is_refused() -> None:
    """A misspelt field would keep nothing."""
    with pytest.raises(InputError, match="no field"):
        rulebook(SPEC, "config.fsdp3")


def test_rules_decide_which_combinations_are_legal() -> None:
    """FSDP1 with offload may not accumulate outside no_sync (PT006), so halving the batch is
    refused there, and Megatron-FSDP's optim where it computes wrong gradients (MG058); a batch
    that cannot be halved is no candidate.
    """
    path = next(path for path in SPECS if path.stem == "fsdp1-cpu-offload")
    rules = rulebook(load_spec(path))
    assert "no_sync" in str(rules.apply((BY_NAME["micro-batch-2"],)))
    wrong = rulebook(load_spec(PROFILES / "h200-megatron" / "specs" / "fsdp-none.yaml"))
    assert "MG058" in str(wrong.apply((BY_NAME["mfsdp-optim"],)))
    odd = rulebook(load_written_spec(path, ["workload.micro_batch=1"]).spec)
    assert odd.apply((BY_NAME["micro-batch-2"],)) == "does not apply here"
