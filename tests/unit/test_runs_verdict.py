"""Who failed first, and who only followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_doctor.runs.verdict import first_failure
from fsdp_doctor.runs.writer import RankWriter


def write(directory: Path, rank: int, record: str, **fields: object) -> None:
    """Append one record to a rank's file."""
    writer = RankWriter(directory, rank)
    writer.write(record, fields)
    writer.close()


def failed(directory: Path, rank: int, message: str, time: float) -> None:
    """Write a failure record."""
    write(
        directory, rank, "failure",
        kind="exception", message=message, step=3, phase="backward", time=time,
    )  # fmt: skip


def test_a_rank_that_lost_its_peer_is_a_victim(tmp_path: Path) -> None:
    """The killed rank is the cause, though its peer's exception was written first."""
    failed(tmp_path, 0, "RuntimeError: [gloo] Connection closed by peer", 1.0)
    write(tmp_path, 1, "exit", exit_code=None, signal=9, stopped=False, time=1.1)
    failure = first_failure(tmp_path, (0, 1))
    assert failure is not None
    assert (failure.kind, failure.rank, failure.victims) == ("signal", 1, (0,))


@pytest.mark.parametrize(
    "message",
    [
        "DistBackendError: NCCL error: unhandled cuda error, ncclUnhandledCudaError: out of memory",
        "ValueError: no data",
    ],
)
def test_a_rank_that_was_stopped_is_never_the_cause(tmp_path: Path, message: str) -> None:
    """NCCL's own failure and a plain exception come before a rank this tool killed."""
    failed(tmp_path, 0, message, 1.0)
    write(tmp_path, 1, "exit", exit_code=None, signal=9, stopped=True, time=0.5)
    failure = first_failure(tmp_path, (0, 1))
    assert failure is not None
    assert (failure.rank, failure.victims) == (0, (1,))


def test_the_earliest_of_several_causes_counts(tmp_path: Path) -> None:
    """Of two ranks that failed by themselves the first in time is named."""
    failed(tmp_path, 0, "ValueError: late", 2.0)
    failed(tmp_path, 1, "ValueError: early", 1.0)
    failure = first_failure(tmp_path, (0, 1))
    assert failure is not None
    assert failure.rank == 1


def test_clean_ranks_have_no_failure(tmp_path: Path) -> None:
    """Ranks that ended with 0, or wrote nothing, are no failure."""
    write(tmp_path, 0, "exit", exit_code=0, signal=None, stopped=False, time=1.0)
    assert first_failure(tmp_path, (0, 1)) is None
