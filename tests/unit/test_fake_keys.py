"""Short keys of fake mode's cache: what operators return stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from fsdp_doctor.simulator import fake_keys  # noqa: E402

OPERANDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.empty(4, 6),
    "transposed": lambda: torch.empty(6, 4).t(),
    "padded": lambda: torch.empty(4, 8)[:, :6],
    "offset": lambda: torch.empty(8, 6)[4:],
    "half": lambda: torch.empty(4, 6, dtype=torch.bfloat16),
    "whole": lambda: torch.empty(4, 6, dtype=torch.int64),
    "other device": lambda: torch.empty(4, 6, device="cpu:0"),
    "wants a gradient": lambda: torch.empty(4, 6, requires_grad=True),
    "expanded": lambda: torch.empty(4, 1).expand(4, 6),
}
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "add 1": lambda x: x + 1,
    "add 1.0": lambda x: x + 1.0,
    "add True": lambda x: x + True,
    "copy": torch.clone,
    "cast": lambda x: x.to(torch.float64),
    "view": lambda x: x[1:3],
    "views": lambda x: x.split([1, 3])[1],
    "join": lambda x: torch.cat([x, x]),
    "sum": lambda x: x.sum(dim=[0], keepdim=True),
    "multiply": lambda x: x @ x.t() if x.is_floating_point() else x,
}


def _seen(tensor: Any) -> tuple[Any, ...]:
    storage = tensor.untyped_storage().nbytes()
    place = (tensor.device, tensor.storage_offset(), storage)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), *place, tensor.requires_grad


def _answers() -> tuple[list[tuple[Any, ...]], int]:
    FakeTensorMode.cache_clear()
    with FakeTensorMode():
        found = [_seen(run(make())) for make, run in product(OPERANDS.values(), OPERATORS.values())]
        found += [
            _seen(run(make())) for make, run in product(OPERANDS.values(), OPERATORS.values())
        ]
    return found, FakeTensorMode.cache_info().hits


@pytest.fixture
def short_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Install the keys for one test."""
    monkeypatch.setattr(FakeTensorMode, "_prep_args_for_hash", FakeTensorMode._prep_args_for_hash)
    yield fake_keys.install
    FakeTensorMode.cache_clear()


def test_operators_return_the_same_and_are_remembered_as_often(
    short_keys: Callable[[], None],
) -> None:
    """For operands that differ in one thing each, torch's keys and ours find the same."""
    expected = _answers()
    short_keys()
    assert _answers() == expected
    assert expected[1] > len(OPERANDS) * len(OPERATORS) / 2


def test_a_second_install_changes_nothing(short_keys: Callable[[], None]) -> None:
    """Runs that share a process do not wrap the method again."""
    short_keys()
    method = FakeTensorMode._prep_args_for_hash
    short_keys()
    assert FakeTensorMode._prep_args_for_hash is method
