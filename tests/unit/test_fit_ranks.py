"""How many ranks a spec needs when no change makes it fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_estimate import sample

from fsdp_doctor.fit.legal import Draft
from fsdp_doctor.fit.prescribe import needed_ranks
from fsdp_doctor.model.estimate import Estimate
from fsdp_doctor.model.spec import FSDP2Config, MeshConfig, ProfileSpec, TrainingConfig


class Simulated:
    """Says that a spec fits from ``enough`` ranks on."""

    def __init__(self, enough: int) -> None:
        self.enough = enough

    def estimate(self, draft: Draft) -> Estimate:
        """Return an estimate whose verdict follows the number of ranks."""
        return replace(sample(None), fits=draft.spec.world_size >= self.enough)


def draft(config: TrainingConfig, world_size: int = 8) -> Draft:
    """A draft without changes."""
    return Draft(spec=ProfileSpec(name="spec", config=config, world_size=world_size))


@pytest.mark.parametrize(("enough", "expected"), [(9, 16), (64, 64), (1000, 1024), (16384, 16384)])
def test_the_smallest_doubling_that_fits_is_found(enough: int, expected: int) -> None:
    """By halving the span of powers, in few simulations."""
    found = needed_ranks(draft(TrainingConfig(strategy="fsdp2")), Simulated(enough))
    assert found is not None
    assert found.world_size == expected
    assert len(found.tried) <= 5


def test_what_is_not_sharded_never_fits() -> None:
    """The largest world is tried alone."""
    found = needed_ranks(draft(TrainingConfig(strategy="fsdp1")), Simulated(10**9))
    assert found is not None
    assert found.world_size is None
    assert found.tried == (16384,)


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig(strategy="ddp"),
        TrainingConfig(strategy="fsdp2", fsdp2=FSDP2Config(mesh=MeshConfig(replicate=2, shard=4))),
        TrainingConfig(strategy="megatron"),
    ],
)
def test_engines_whose_shards_do_not_shrink_are_not_asked(config: TrainingConfig) -> None:
    """DDP, a fixed mesh, Megatron's own DDP."""
    assert needed_ranks(draft(config), Simulated(9)) is None
