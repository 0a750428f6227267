"""Version ranges such as ``>=0.16,<0.19 | >=0.20`` of the packages that configs are written for.

Only the release numbers count: ``0.19.0rc1`` and ``0.19.2+cu130`` belong to ``>=0.19``, because the
code of a pre-release is the new code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdp_doctor.config.versions import key_of

_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d{1,6}(?:\.\d{1,6}){0,5})")

Release = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Alternatives, each a set of bounds that all must hold; no alternative at all: any version."""

    text: str
    alternatives: tuple[tuple[tuple[str, Release], ...], ...]

    def __contains__(self, version: str) -> bool:
        """Return whether ``version`` is in the range; one without numbers is in every range."""
        release = key_of(version)
        if not release or not self.alternatives:
            return True
        return any(all(_holds(release, *bound) for bound in bounds) for bounds in self.alternatives)

    def __str__(self) -> str:
        return self.text or "all"


def parse_range(text: str) -> VersionRange:
    """Return the range that ``text`` writes down; empty means every version.

    A bound speaks of as many numbers as it has: 0.19.2 is in ``==0.19`` and in ``<=0.19``. Raises
    ValueError for anything else than bounds joined by ``,`` (and) and ``|`` (or).
    """
    if not text.strip():
        return VersionRange(text="", alternatives=())
    return VersionRange(
        text=" ".join(text.split()),
        alternatives=tuple(_bounds(part, text) for part in text.split("|")),
    )


def _bounds(part: str, text: str) -> tuple[tuple[str, Release], ...]:
    found = []
    for clause in part.split(","):
        match = _CLAUSE.fullmatch(clause.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a version range: {clause.strip()!r}")
        found.append((match[1], tuple(int(number) for number in match[2].split("."))))
    return tuple(found)


def _holds(release: Release, operator: str, bound: Release) -> bool:
    padded = release + (0,) * (len(bound) - len(release))
    seen = padded[: len(bound)]
    return {
        ">=": seen >= bound,
        "<=": seen <= bound,
        "==": seen == bound,
        "!=": seen != bound,
        ">": seen > bound,
        "<": seen < bound,
    }[operator]
