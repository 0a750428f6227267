"""Resolved configs against the libraries themselves, where they are installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.library


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the benchmark importable."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in list(sys.modules):
        if name == "library_agreement" or name.split(".")[0] == "agreement":
            del sys.modules[name]


NAMES = ["accelerate", "transformers", "lightning", "deepspeed", "megatron-core"]


@pytest.mark.parametrize("name", NAMES)
def test_our_values_are_the_library_s(name: str) -> None:
    """Each compared field is equal, for at least 20 configs."""
    import library_agreement

    if not library_agreement.installed(name):
        pytest.skip(f"{name} is not installed; benchmarks/library_agreement.py says how")
    summary = library_agreement.run(name)
    assert len(summary.outcomes) >= 20
    assert [o for o in summary.outcomes if o.differing] == []
    assert summary.fields > 200
    if name == "megatron-core":
        assert [o.name for o in summary.outcomes if o.refused] == []


def test_a_wrong_value_would_be_found() -> None:
    """The comparison tells a difference, and a config that the library refuses."""
    from agreement.base import Case, compare

    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    theirs = {"sharding.impl": "fsdp1", "offload.params": "none"}
    case = Case(name="x", config=config, fmt="accelerate", theirs=lambda: theirs)
    assert compare(case).differing == (("sharding.impl", "fsdp2", "fsdp1"),)

    def refuse() -> dict[str, str]:
        raise ValueError

    assert compare(Case(name="x", config=config, fmt="accelerate", theirs=refuse)).refused
