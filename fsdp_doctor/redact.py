"""Remove secrets from what is written down: environments, configs, paths, messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?i)(^|[_\-.])(api|access|auth|private|secret|encryption)?[_\-]?"
    r"(key|token|secret|password|passwd|pwd|credential|credentials|cookie|dsn)s?$"
)
_SECRET_TEXT = re.compile(
    r"(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|A[KS]IA[A-Z0-9]{12,}"
    r"|github_pat_\w{20,}|glpat-[\w\-]{16,}|nvapi-[\w\-]{16,}|pypi-[\w\-]{16,}|npm_[A-Za-z0-9]{16,}"
    r"|dckr_pat_[\w\-]{16,}|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*"
    r"|xox[abpr]-[A-Za-z0-9\-]{10,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@))"
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable or key of this name is likely to hold a secret."""
    return _SECRET_NAME.search(name) is not None


def redact_text(text: str) -> str:
    """Return ``text`` with tokens, URL credentials and the home folder replaced."""
    home = str(Path.home())
    if len(home) > 1:
        text = text.replace(home, "~")
    return _SECRET_TEXT.sub(REDACTED, text)


def redact(value: Any, name: str = "") -> Any:
    """Return a copy of a plain structure (dict, list, scalar) without secrets."""
    if isinstance(value, dict):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if is_secret_name(name) and isinstance(value, str) and value:
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def short_path(path: str) -> str:
    """A source path as it reads on every machine: from the package on, where that can be told."""
    for start in ("site-packages/", "dist-packages/"):
        if start in path:
            return path.rpartition(start)[2]
    _, own, rest = path.rpartition("/fsdp_doctor/")
    return f"fsdp_doctor/{rest}" if own else path
