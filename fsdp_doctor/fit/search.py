"""Search combinations of moves for the cheap ones that fit.

Which combinations are tried, and in which order, follows from the spec alone; the limit of memory
only says which of them need not be simulated: those that add to a combination that fits something
that does not make it faster, and those whose moves, one by one, cost more than something that fits.
So a tighter limit is not answered by a cheaper combination than a roomier one. Tried are, until
``limit`` simulations are spent:

1. every move alone, and what a move makes possible, with that move;
2. chains that take one useful move after the other, cheapest first and largest saving first;
3. pairs of useful moves, by what they save for their cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from fsdp_doctor.fit.legal import Draft
from fsdp_doctor.fit.move import Move
from fsdp_doctor.model.fit import NUMERICS, Numerics

_USEFUL = 0.001
"""Part of peak reserved that a move must save to be combined with others."""
_BATCH = 2
"""Prefixes of a chain that are simulated together; fixed, so that the answer does not depend on
the machine."""
_PER_COST = 0.01
"""Cost that counts as none when savings are weighed against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulation said of a draft."""

    fits: bool | None
    """None: perhaps, or with nothing to spare."""
    reserved_bytes: int
    cost: float
    """Relative change of step time from the spec as written."""
    failure: str | None = None


Combination = tuple[Move, ...]
Apply = Callable[[Combination], Draft | str]
Evaluate = Callable[[Sequence[Draft]], Sequence[Outcome]]


@dataclass(slots=True)
class Found:
    """Everything that was tried."""

    outcomes: dict[frozenset[str], tuple[Draft, Outcome]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Move -> why it is not offered."""
    complete: bool = True

    def fitting(self) -> list[tuple[Draft, Outcome]]:
        """Return the drafts that fit, or, where none does, those that may."""
        for verdict in (True, None):
            chosen = [(d, o) for d, o in self.outcomes.values() if o.fits is verdict and d.moves]
            if chosen:
                return chosen
        return []


class Search:
    """One search. ``limit``: simulations it may ask for."""

    def __init__(
        self,
        moves: Sequence[Move],
        *,
        apply: Apply,
        evaluate: Evaluate,
        base: Outcome,
        limit: int,
        saves_nothing: Callable[[Draft], bool] = lambda _draft: False,
    ) -> None:
        self._moves, self._apply, self._evaluate = tuple(moves), apply, evaluate
        self._base, self._left, self._saves_nothing = base, limit, saves_nothing
        self._order = {move.name: place for place, move in enumerate(self._moves)}
        self.found = Found()

    def run(self) -> Found:
        """Search and return what was found."""
        singles = [self._alone(move) for move in self._moves]
        self._try([draft for draft in singles if draft is not None], prune=False)
        useful = [
            m for m in self._moves if self._saving((m,)) > _USEFUL * self._base.reserved_bytes
        ]
        self._try(list(self._made_possible(useful)), prune=False)
        for chain in self._chains(useful):
            for start in range(0, len(chain), _BATCH):
                self._try(chain[start : start + _BATCH])
        pairs = list(self._pairs(useful))
        for start in range(0, len(pairs), _BATCH):
            self._try(pairs[start : start + _BATCH])
        return self.found

    # -- what to try --------------------------------------------------------------------------

    def _alone(self, move: Move) -> Draft | None:
        draft = self._apply((move,))
        if isinstance(draft, Draft) and self._saves_nothing(draft):
            draft = "saves no memory here"
        if isinstance(draft, str):
            self.found.refused[move.name] = draft
            return None
        return draft

    def _made_possible(self, useful: Sequence[Move]) -> Iterator[Draft]:
        """Yield pairs whose second move applies only after the first."""
        for first in useful:
            for second in self._moves:
                if second.name in self.found.refused:
                    draft = self._joined((first,), second)
                    if draft is not None and not self._saves_nothing(draft):
                        yield draft

    def _chains(self, useful: Sequence[Move]) -> Iterator[list[Draft]]:
        def cheap(move: Move) -> tuple[float, ...]:
            return self._cost((move,)), -self._saving((move,)), self._order[move.name]

        def saving(move: Move) -> tuple[float, ...]:
            return -self._saving((move,)), self._cost((move,)), self._order[move.name]

        for allowed in range(1, len(NUMERICS) + 1):
            chosen = [m for m in useful if NUMERICS.index(m.numerics) < allowed]
            yield self._chain(sorted(chosen, key=cheap), replaces=True)
            yield self._chain(sorted(chosen, key=saving), replaces=False)

    def _chain(self, order: Sequence[Move], *, replaces: bool) -> list[Draft]:
        """Return drafts of a growing combination; ``replaces``: a later move of the same family
        takes the earlier one's place, instead of being left out.
        """
        current: Combination = ()
        drafts = []
        for move in order:
            rest = tuple(m for m in current if m.family != move.family) if replaces else current
            draft = self._joined(rest, move)
            if draft is None:
                continue
            current = draft.moves
            drafts.append(draft)
            for extra in self._moves:  # what only now applies
                more = self._joined(current, extra) if extra.name in self.found.refused else None
                if more is not None and extra.numerics == "same" and self._seen_useful(move, extra):
                    current = more.moves
                    drafts.append(more)
        return drafts

    def _seen_useful(self, first: Move, second: Move) -> bool:
        gained = self._saving((first, second)) - self._saving((first,))
        return gained > _USEFUL * self._base.reserved_bytes

    def _pairs(self, useful: Sequence[Move]) -> Iterator[Draft]:
        def worth(pair: Combination) -> tuple[float, ...]:
            saving = sum(self._saving((m,)) for m in pair)
            cost = sum(self._cost((m,)) for m in pair)
            return -saving / (max(cost, 0.0) + _PER_COST), *(self._order[m.name] for m in pair)

        for pair in sorted(combinations(useful, 2), key=worth):
            draft = self._joined(pair[:1], pair[1])
            if draft is not None:
                yield draft

    def _joined(self, moves: Combination, move: Move) -> Draft | None:
        """Return the legal draft of ``moves`` and ``move``, or None."""
        if any(m.family == move.family for m in moves):
            return None
        draft = self._apply(tuple(sorted((*moves, move), key=lambda m: self._order[m.name])))
        return draft if isinstance(draft, Draft) else None

    # -- trying -------------------------------------------------------------------------------

    def _try(self, drafts: Sequence[Draft], *, prune: bool = True) -> None:
        chosen: dict[frozenset[str], Draft] = {}
        for draft in drafts:
            if draft.names in self.found.outcomes or (prune and self._needless(draft)):
                continue
            chosen[draft.names] = draft
        wanted = list(chosen.values())
        if len(wanted) > self._left:
            self.found.complete = False
            wanted = wanted[: self._left]
        self._left -= len(wanted)
        for draft, outcome in zip(wanted, self._evaluate(wanted), strict=True):
            if outcome.failure is None:
                self.found.outcomes[draft.names] = (draft, outcome)
            elif len(draft.moves) == 1:
                self.found.refused[draft.moves[0].name] = outcome.failure

    def _needless(self, draft: Draft) -> bool:
        """Whether something fits that rounds as little and is no dearer: a part of it, or anything
        that costs no more than its moves do one by one.
        """
        place = NUMERICS.index(numerics_of(draft))
        cost = sum(self._cost((move,)) for move in draft.moves)
        for known, outcome in self.found.outcomes.values():
            if outcome.fits is not True or not known.moves:
                continue
            as_exact = NUMERICS.index(numerics_of(known)) <= place
            if as_exact and (outcome.cost <= cost or self._covers(draft, known)):
                return True
        return False

    def _covers(self, draft: Draft, part: Draft) -> bool:
        """Whether ``draft`` has every move of ``part`` or a stronger one, and no faster extras."""
        by_family = {move.family: move for move in draft.moves}
        for move in part.moves:
            held = by_family.pop(move.family, None)
            if held is None or held.strength < move.strength:
                return False
            if held != move and self._cost((held,)) < self._cost((move,)):
                return False
        return all(self._cost((extra,)) >= 0 for extra in by_family.values())

    def _cost(self, moves: Combination) -> float:
        known = self.found.outcomes.get(frozenset(m.name for m in moves))
        return 0.0 if known is None else known[1].cost

    def _saving(self, moves: Combination) -> int:
        known = self.found.outcomes.get(frozenset(m.name for m in moves))
        return 0 if known is None else self._base.reserved_bytes - known[1].reserved_bytes


def numerics_of(draft: Draft) -> Numerics:
    """Return the farthest that any of its moves goes."""
    return max((move.numerics for move in draft.moves), key=NUMERICS.index, default="same")


def pareto(
    fitting: Sequence[tuple[Draft, Outcome]], step_bytes: int, most: int
) -> list[tuple[Draft, Outcome]]:
    """Return at most ``most`` of the combinations that no other one beats, cheapest first.

    One that holds another which fits is left out unless it is faster. A dearer one, or one that
    rounds more, is kept only if it leaves ``step_bytes`` more free than every one before it.
    """

    def key(item: tuple[Draft, Outcome]) -> tuple[float, ...]:
        draft, outcome = item
        places = NUMERICS.index(numerics_of(draft))
        return places, outcome.cost, outcome.reserved_bytes, len(draft.moves)

    def needless(draft: Draft, outcome: Outcome) -> bool:
        return any(d.names < draft.names and o.cost <= outcome.cost for d, o in fitting)

    kept: list[tuple[Draft, Outcome]] = []
    minimal = [item for item in fitting if not needless(*item)]
    for item in sorted(minimal, key=lambda i: (*key(i), *sorted(i[0].names))):
        least = min((o.reserved_bytes for _, o in kept), default=None)
        if least is None or item[1].reserved_bytes <= least - step_bytes:
            kept.append(item)
    return kept[:most]
