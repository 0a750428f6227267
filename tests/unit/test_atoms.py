"""Fields that can be flipped, and the specs between two specs."""

from __future__ import annotations

import itertools

import pytest

from fsdp_doctor.attribution.atoms import find_flips
from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.spec import apply_overrides, spec_from_mapping
from fsdp_doctor.errors import InputError

POLICY = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def spec_of(config, *, world_size=4, **workload):
    """Return a spec."""
    raw = {"name": "x", "world_size": world_size, "workload": workload, "config": config}
    return spec_from_mapping(raw, "test")


def flips_of(a, b):
    """Return the fields between two specs."""
    return find_flips(a, b, diff_configs(resolve_spec(a), resolve_spec(b)))


PAIRS = {
    "values": (
        spec_of({"strategy": "fsdp2"}),
        spec_of({"strategy": "fsdp2", "optimizer": {"max_grad_norm": 1.0}}, micro_batch=4),
    ),
    "policy-added": (
        spec_of({"strategy": "fsdp2"}),
        spec_of({"strategy": "fsdp2", "fsdp2": {"mp_policy": POLICY}}, micro_batch=2),
    ),
    "policy-removed": (
        spec_of({"strategy": "fsdp1", "fsdp1": {"mixed_precision": POLICY}}),
        spec_of({"strategy": "fsdp1"}, sequence_length=64),
    ),
    "strategies": (
        spec_of({"strategy": "ddp", "ddp": {"gradient_as_bucket_view": True}}),
        spec_of({"strategy": "fsdp2", "fsdp2": {"reshard_after_forward": False}}),
    ),
    "hybrid": (
        spec_of({"strategy": "fsdp2"}),
        spec_of({"strategy": "fsdp2", "fsdp2": {"mesh": {"replicate": 2, "shard": 2}}}),
    ),
    "hybrid-removed": (
        spec_of(
            {
                "strategy": "fsdp1",
                "fsdp1": {
                    "sharding_strategy": "HYBRID_SHARD",
                    "mesh": {"replicate": 2, "shard": 2},
                },
            }
        ),
        spec_of({"strategy": "fsdp1"}, micro_batch=2),
    ),
}


def valid_points(flips):
    """Yield every point between the ends whose spec is valid, with the spec."""
    fields = range(len(flips.atoms))
    for size in fields[1:]:
        for chosen in itertools.combinations(fields, size):
            try:
                yield frozenset(chosen), flips.spec_at(frozenset(chosen))
            except InputError:
                continue


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_the_ends_are_a_and_b(pair):
    """No field flipped is A, all flipped is B, and no key is flipped twice."""
    flips = flips_of(*pair)
    assert flips.spec_at(frozenset()) is pair[0]
    assert flips.spec_at(frozenset(range(len(flips.atoms)))) is pair[1]
    paths = [path for atom in flips.atoms for path in atom.paths]
    assert len(paths) == len(set(paths))
    assert flips.not_in_spec == ()


@pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
def test_overrides_repeat_a_point(pair):
    """What a report says to set upon A gives the very spec that was evaluated, B included."""
    flips = flips_of(*pair)
    everything = frozenset(range(len(flips.atoms)))
    for point, spec in [*valid_points(flips), (everything, flips.b)]:
        told = apply_overrides(flips.a, flips.overrides_at(point))
        assert resolve_spec(told).fields.keys() == resolve_spec(spec).fields.keys()
        values = [
            {key: field.value for key, field in resolve_spec(one).fields.items() if field.effective}
            for one in (told, spec)
        ]
        assert values[0] == values[1]


def test_keys_that_are_valid_only_together_are_one():
    """The two sizes of a mesh are flipped together: each alone does not fit the world."""
    flips = flips_of(*PAIRS["hybrid"])
    (atom,) = flips.atoms
    assert set(atom.paths) >= {"config.fsdp2.mesh.replicate", "config.fsdp2.mesh.shard"}


def test_what_has_no_effect_is_not_flipped():
    """Names, seeds and inert keys are no fields of a search, and stay as in A."""
    a = spec_of({"strategy": "fsdp2"})
    b = spec_of({"strategy": "fsdp2", "ddp": {"bucket_cap_mb": 50.0}}, micro_batch=2, seed=3)
    flips = flips_of(a, b)
    assert [atom.keys for atom in flips.atoms] == [("batch.micro",)]
    assert set(flips.beside) == {"workload.seed", "config.ddp.bucket_cap_mb"}


def test_fields_without_known_effect_on_memory_are_presumed_inert():
    """Another limit of the gradient norm is screened as a group; a batch is not."""
    a = spec_of({"strategy": "fsdp2", "optimizer": {"max_grad_norm": 1.0}})
    b = spec_of({"strategy": "fsdp2", "optimizer": {"max_grad_norm": 0.5}}, micro_batch=2)
    flips = flips_of(a, b)
    assert [flips.atoms[n].keys for n in flips.inert] == [("optimizer.grad_clip",)]
