"""Errors that end a command with one clear line.

- DoctorError                 base; exit status 2
  - InputError                a file, value or option that cannot be used; exit status 2
  - ProfileError             training ran and failed; exit status 1
  - MissingDependencyError         an optional package is needed; exit status 2
"""

from __future__ import annotations


class DoctorError(Exception):
    """Base of all errors this tool reports itself; ``str()`` is what the user reads."""

    exit_code = 2


class InputError(DoctorError):
    """Something the user gave cannot be used.

    ``where`` names file and place (``spec.yaml:12: config.fsdp2``); ``hint`` says what to do.
    """

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        text = f"{where}: {message}" if where else message
        super().__init__(f"{text} ({hint})" if hint else text)


class ProfileError(DoctorError):
    """A profiled job did not complete; what it recorded is kept."""

    exit_code = 1


class MissingDependencyError(DoctorError):
    """A package that this command needs is not installed."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(
            f"{package} is needed to {purpose}; install it with: pip install 'fsdp-doctor[{extra}]'"
        )
