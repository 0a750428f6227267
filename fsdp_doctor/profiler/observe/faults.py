"""Errors of code that runs inside the user's own calls (hooks, dispatch): kept, not raised."""

from __future__ import annotations


class Faults:
    """The first error of the hooks of one observer."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def keep(self, error: Exception) -> None:
        """Keep an error until ``raise_first``; later ones follow from the first."""
        self.first = self.first or error

    def raise_first(self) -> None:
        """Raise what was kept, if anything: call it where the user's code is not on the stack."""
        if self.first is not None:
            raise self.first
