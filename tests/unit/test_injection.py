"""The injection benchmark: the pairs it draws, and how it tells truth from noise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.config.spec import written_spec_from_mapping

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
from injected.fields import STRATEGIES, base, culprits, decoys, flip  # noqa: E402
from injected.judge import NoGood, Row, Truth, find_truth  # noqa: E402
from injected.measure import FILE, Measurements  # noqa: E402
from injected.pairs import DrawnPairs, Pair, digest, draw_pairs, keys_of  # noqa: E402

sys.path.remove(str(BENCHMARKS))

MIB = 1 << 20


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_field_of_a_strategy_changes_its_spec(strategy: str, device: str) -> None:
    """Neither culprits nor decoys are misspelt, and each has a value the base has not."""
    plain = {**base(strategy, device, 8), "name": "x"}
    start = written_spec_from_mapping(plain, "base").spec
    for field in (*culprits(strategy, device), *decoys(strategy)):
        raw = {**base(strategy, device, 8), "name": "x"}
        flip(raw, field, 8)
        assert written_spec_from_mapping(raw, field[0]).spec != start


def test_a_seed_draws_the_same_pairs_again() -> None:
    """So what was recorded on one machine can be judged on another."""
    first, again = ([p.b for p in islice(draw_pairs(5, STRATEGIES, "cuda", 8), 14)] for _ in "12")
    other = [p.b for p in islice(draw_pairs(6, STRATEGIES, "cuda", 8), 14)]
    assert first == again
    assert first != other


def test_pairs_of_a_folder_outlive_the_fields_they_were_drawn_from(tmp_path: Path) -> None:
    """What was recorded is judged as it was drawn, and drawing goes on behind it."""
    drawn = list(islice(draw_pairs(5, STRATEGIES, "cuda", 8), 4))
    assert list(DrawnPairs(tmp_path, 5).kept(iter(drawn[:2]))) == drawn[:2]
    other = [replace(pair, culprits=(), decoys=()) for pair in drawn]
    assert list(DrawnPairs(tmp_path, 5).kept(iter(other))) == [*drawn[:2], *other[2:]]
    assert list(DrawnPairs(tmp_path, 5).recorded()) == [*drawn[:2], *other[2:]]
    assert list(DrawnPairs(tmp_path, 6).recorded()) == []


def test_no_key_is_written_twice_in_a_pair() -> None:
    """A mesh that comes with a sharding strategy belongs to that field alone."""
    for pair in islice(draw_pairs(5, STRATEGIES, "cuda", 8), 100):
        fields = (*pair.culprits, *pair.decoys, *pair.shared)
        keys = [key for one in fields for key in keys_of(one, 8)]
        assert len(keys) == len(set(keys))


def _pair() -> Pair:
    return Pair(
        number=1,
        strategy="fsdp2",
        device="cpu",
        ranks=2,
        culprits=(("workload.micro_batch", 2, 4), ("workload.model.layers", 2, 3)),
        decoys=(("workload.seed", 0, 7),),
        reversed=False,
    )


def _measured(folder: Path, pair: Pair, peak: Callable[[dict[str, Any]], int]) -> Measurements:
    """Return measurements in which each spec of a pair has the peak that ``peak`` says."""
    peaks = {digest(raw): peak(raw) for raw in pair.every_spec()}
    lines = [json.dumps({"spec": k, "peak_allocated_bytes": v}) for k, v in peaks.items()]
    (folder / FILE).write_text("\n".join(lines))
    return Measurements(folder, device="cpu", ranks=2, jobs=0)


def _peak(raw: dict[str, Any]) -> int:
    """A batch adds 30 MiB, a layer 10, and both together 4 more."""
    batch = raw["workload"]["micro_batch"] == 4
    layer = raw["workload"]["model"]["layers"] == 3
    return (100 + 30 * int(batch) + 10 * int(layer) + 4 * int(batch and layer)) * MIB


def test_true_shares_split_an_interaction(tmp_path: Path) -> None:
    """Shapley values: each of two fields has its own effect and half of what both do."""
    truth = find_truth(_pair(), _measured(tmp_path, _pair(), _peak))
    assert isinstance(truth, Truth)
    assert truth.delta == 44 * MIB
    assert truth.shares == {
        "workload.micro_batch": pytest.approx(32 / 44),
        "workload.model.layers": pytest.approx(12 / 44),
    }


def test_a_decoy_that_moves_memory_spoils_its_pair(tmp_path: Path) -> None:
    """A pair with a field that was thought harmless is drawn anew."""
    measured = _measured(
        tmp_path, _pair(), lambda raw: _peak(raw) + MIB * (raw["workload"].get("seed") == 7)
    )
    assert find_truth(_pair(), measured) == NoGood("decoys are not harmless", judged=True)


def test_a_failed_launch_is_told_with_its_reason(tmp_path: Path) -> None:
    """The pair is not judged; which combination failed, and why, is said."""
    pair = _pair()
    measured = _measured(tmp_path, pair, _peak)
    failed = {"spec": digest(pair.b), "failure": "oom: no memory"}
    with (tmp_path / FILE).open("a") as file:
        file.write("\n" + json.dumps(failed))
    measured = Measurements(tmp_path, device="cpu", ranks=2, jobs=0)
    assert find_truth(pair, measured) == NoGood("B: oom: no memory", judged=False)


@pytest.mark.parametrize(
    ("said", "problems"),
    [
        ({"workload.micro_batch": 0.72, "workload.model.layers": 0.28}, []),
        ({"workload.micro_batch": 0.28, "workload.model.layers": 0.72}, ["top cause", "shares"]),
        ({"workload.micro_batch": 0.72}, ["a culprit is missing", "shares"]),
        (
            {
                "workload.micro_batch": 0.69,
                "workload.model.layers": 0.28,
                "workload.seed": 0.03,
            },
            ["a decoy is blamed"],
        ),
    ],
)
def test_an_answer_is_scored_by_what_it_misses(said: dict[str, float], problems: list[str]) -> None:
    """Top cause, all culprits, decoys and shares each count for themselves."""
    true = {"workload.micro_batch": 0.73, "workload.model.layers": 0.27}
    row = Row(pair=_pair(), delta=44 * MIB, true=true, said=said)
    assert list(row.problems()) == problems
