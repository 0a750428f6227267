"""Answer one request: ``python -m fsdp_doctor.simulator.child < request.json > answer.json``."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

_RARELY = (100_000, 50, 50)
"""Importing makes many objects and hardly any garbage: collecting costs a tenth of it."""


def import_dry_run() -> ModuleType:
    """Import torch and the dry run with few collections, which then look at newer objects only."""
    usual = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    import torch._dynamo  # noqa: F401 (fake tensors import it)

    from fsdp_doctor.simulator import dry_run

    gc.freeze()
    gc.set_threshold(*usual)
    return dry_run


if __name__ == "__main__":
    sys.exit(import_dry_run().main())
