"""A pair of specs, the fields in which its sides differ, and how pairs are drawn."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from fsdp_doctor.config.megatron_support import refuse
from fsdp_doctor.config.spec import written_spec_from_mapping
from fsdp_doctor.errors import InputError
from injected.field import MOVING, Field
from injected.fields import base, companions, culprits, decoys, flip

_MOSTLY = 0.8


@dataclass(frozen=True)
class Pair:
    """A spec and the fields in which another one differs from it."""

    number: int
    strategy: str
    device: str
    ranks: int
    culprits: tuple[Field, ...]
    decoys: tuple[Field, ...]
    reversed: bool
    """Whether A has the other values and B the plain ones."""
    shared: tuple[Field, ...] = ()
    """Fields that have their other value on both sides."""

    def spec(self, flipped: Sequence[Field], name: str) -> dict[str, Any]:
        """Return A with some fields as in B."""
        raw = {**base(self.strategy, self.device, self.ranks), "name": name}
        for one in self.shared:
            flip(raw, one, self.ranks)
        for one in (*self.culprits, *self.decoys):
            if (one in flipped) != self.reversed:
                flip(raw, one, self.ranks)
        return raw

    @property
    def a(self) -> dict[str, Any]:
        """Return one side."""
        return self.spec([], "a")

    @property
    def b(self) -> dict[str, Any]:
        """Return the other side."""
        return self.spec([*self.culprits, *self.decoys], "b")

    @property
    def with_decoys(self) -> dict[str, Any]:
        """Return A with all decoys of B."""
        return self.spec(self.decoys, "decoys")

    def combinations(self) -> dict[frozenset[int], dict[str, Any]]:
        """Return A with every set of culprits, by their places."""
        places = range(len(self.culprits))
        return {
            frozenset(chosen): self.spec([self.culprits[n] for n in chosen], "point")
            for size in range(len(places) + 1)
            for chosen in combinations(places, size)
        }

    def every_spec(self) -> list[dict[str, Any]]:
        """Return all specs that are to be run."""
        return [self.a, self.b, *self.combinations().values(), self.with_decoys]

    def broken_rule(self) -> str | None:
        """Return why one of the specs cannot be run by the installed versions, if so."""
        try:
            for raw in self.every_spec():
                spec = written_spec_from_mapping(raw, "the benchmark").spec
                refuse(spec, fake=True, on_cpu=self.device == "cpu")
        except InputError as error:
            return str(error)
        return None


def digest(raw: dict[str, Any]) -> str:
    """Return what tells a spec from others; names do not count."""
    told = {key: value for key, value in raw.items() if key != "name"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def draw_pairs(seed: int, strategies: Sequence[str], device: str, ranks: int) -> Iterator[Pair]:
    """Yield pairs without end, the same for the same arguments."""
    chance = random.Random(seed)  # noqa: S311 (pairs for a benchmark)
    number = 0
    while True:
        strategy = strategies[number % len(strategies)]
        number += 1
        count = chance.choice((1, 1, 2, 2, 3))
        pool = culprits(strategy, device)
        likely = [f for f in pool if f[0] in MOVING] if chance.random() < _MOSTLY else pool
        first = _sample(chance, likely, 1, ranks, taken=())
        chosen = (*first, *_sample(chance, pool, count - 1, ranks, taken=first))
        shared = _sample(chance, pool, chance.choice((0, 0, 1, 1, 2)), ranks, taken=chosen)
        taken = (*chosen, *shared)
        harmless = [d for d in decoys(strategy) if not _acts(d, taken)]
        beside = _sample(chance, harmless, chance.randint(0, 6 - count), ranks, taken=taken)
        yield Pair(
            number=number,
            strategy=strategy,
            device=device,
            ranks=ranks,
            culprits=chosen,
            decoys=beside,
            reversed=chance.random() < 0.5,
            shared=shared,
        )


def _sample(
    chance: random.Random,
    pool: Sequence[Field],
    count: int,
    ranks: int,
    *,
    taken: Collection[Field],
) -> tuple[Field, ...]:
    """Draw fields of different keys, every key as likely, none that is taken."""
    known = {key for one in taken for key in keys_of(one, ranks)}
    free = [one for one in pool if not known & keys_of(one, ranks)]
    chosen: list[Field] = []
    while free and len(chosen) < count:
        key = chance.choice(sorted({one[0] for one in free}))
        one = chance.choice([one for one in free if one[0] == key])
        chosen.append(one)
        free = [other for other in free if not keys_of(one, ranks) & keys_of(other, ranks)]
    return tuple(chosen)


def keys_of(one: Field, ranks: int) -> set[str]:
    """Return the keys that a field's other value writes."""
    return {one[0], *companions(one, ranks)}


def _acts(decoy: Field, beside: Collection[Field]) -> bool:
    """Return whether a decoy is none beside these fields."""
    keys = {one[0] for one in beside}
    return any(
        decoy[0].startswith(prefix) and key in keys
        for prefix, key in (
            ("config.optimizer.", "config.optimizer.name"),
            ("config.gradient_accumulation.sync", "config.gradient_accumulation.steps"),
            ("config.activation_checkpointing.", "config.activation_checkpointing.mode"),
        )
    )


class DrawnPairs:
    """Pairs as they were drawn when a folder was made, and drawn anew where it ends.

    What is recorded stays judgeable when other fields are drawn from.
    """

    def __init__(self, work: Path, seed: int) -> None:
        """``seed``: of which a folder has one file."""
        self._path = work / f"pairs-{seed}.jsonl"
        self._known = {pair.number: pair for pair in _read(self._path)}

    def recorded(self) -> Iterator[Pair]:
        """Yield what the folder has."""
        yield from self._known.values()

    def kept(self, drawn: Iterator[Pair]) -> Iterator[Pair]:
        """Yield each drawn pair, or the one that the folder has in its place."""
        for pair in drawn:
            if pair.number not in self._known:
                self._known[pair.number] = pair
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(pair)) + "\n")
            yield self._known[pair.number]


def _read(path: Path) -> Iterator[Pair]:
    for line in path.read_text().splitlines() if path.exists() else ():
        pair = Pair(**json.loads(line))
        fields = {
            name: tuple((key, plain, other) for key, plain, other in getattr(pair, name))
            for name in ("culprits", "decoys", "shared")
        }
        yield replace(pair, **fields)
