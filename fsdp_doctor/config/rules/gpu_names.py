"""GPUs by the names people use, as CUDA compute capabilities: what rules ask for."""

from __future__ import annotations

from fsdp_doctor.errors import InputError

_ARCHITECTURES: dict[str, tuple[float, tuple[str, ...]]] = {
    "volta": (7.0, ("v100",)),
    "turing": (7.5, ("t4",)),
    "ampere": (8.0, ("a100", "a800", "a10", "a30", "a40", "a6000", "3090")),
    "ada": (8.9, ("l4", "l40", "l40s", "4090")),
    "hopper": (9.0, ("h100", "h200", "h800", "h20", "gh200")),
    "blackwell": (10.0, ("b100", "b200", "b300", "gb200", "gb300", "5090")),
}
"""Architecture -> compute capability (its first one) and the GPUs that have it."""


def architecture_of(name: str) -> float:
    """Return the compute capability of a GPU or an architecture.

    Raises InputError, which lists the names, for any other.
    """
    wanted = name.strip().lower().replace("nvidia", "").replace("-", " ").split()
    for architecture, (capability, gpus) in _ARCHITECTURES.items():
        if wanted and (wanted[0] == architecture or wanted[0] in gpus):
            return capability
    known = ", ".join(_ARCHITECTURES)
    raise InputError(
        f"unknown GPU {name!r}", where="option --gpu", hint=f"one of: {known}, or h100"
    )
