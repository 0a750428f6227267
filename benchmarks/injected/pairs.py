"""A pair of specs, the fields in which its sides differ, and how pairs are drawn."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fsdp_doctor.config.megatron_support import refuse
from fsdp_doctor.config.spec import written_spec_from_mapping
from fsdp_doctor.errors import InputError
from injected.fields import Field, base, culprits, decoys, put


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

    def spec(self, flipped: Sequence[Field], name: str) -> dict[str, Any]:
        """Return A with some fields as in B."""
        raw = {**base(self.strategy, self.device, self.ranks), "name": name}
        for one in (*self.culprits, *self.decoys):
            if (one in flipped) != self.reversed:
                put(raw, one[0], one[2])
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
        chosen = chance.sample(culprits(strategy, device), count)
        taken = {one[0] for one in chosen}
        pool = [d for d in decoys(strategy) if d[0] not in taken and not _acts(d, taken)]
        beside = chance.sample(pool, chance.randint(0, 6 - count))
        yield Pair(
            number=number,
            strategy=strategy,
            device=device,
            ranks=ranks,
            culprits=tuple(chosen),
            decoys=tuple(beside),
            reversed=chance.random() < 0.5,
        )


def _acts(decoy: Field, culprits: set[str]) -> bool:
    """Return whether a decoy is none beside these culprits."""
    return decoy[0].startswith("config.optimizer.") and "config.optimizer.name" in culprits
