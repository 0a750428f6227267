"""Whatever a log holds, the command answers: cut, mutated and invented logs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_doctor.errors import InputError
from fsdp_doctor.logs.triggers import _COARSE, line_shapes, trigger_lines
from fsdp_doctor.postmortem import examine, postmortem_payload
from fsdp_doctor.report.json_format import encode_envelope
from fsdp_doctor.report.oom_document import render_postmortem

FIXTURES = Path(__file__).parent.parent / "fixtures" / "logs"
PARTS = (
    "CUDA out of memory. Tried to allocate ",
    "999999999999999999999999999999 bytes",
    "2.00 GiB",
    "GPU ",
    "(GPU 0; ",
    " total capacity; ",
    " has a total capacity of ",
    "Process 123456789012345678901234567890 has 1.00 GiB memory in use. ",
    "torch.OutOfMemoryError: ",
    "\n",
    "\r",
    "\x00",
    "\x1b[31m",
    "[rank99999999999]: ",
    "[rank3]: ",
    "srun: error: n1: task 3: Out Of Memory",
    "exitcode  : -9 (pid: 1)",
    "failed (exitcode: -999999999) local_rank: 0 (pid: 1) of binary",
    "Traceback (most recent call last):\n",
    '  File "a", line 1, in b\n',
    "iteration 5/ 10 | elapsed time per iteration (ms): 1.0 |",
    "iteration 99999999999999999999/ 1 | elapsed time per iteration (ms): 1.2.3 |",
    "[Rank 1] (after 2 iterations) memory (MB) | allocated: 1.2.3 | max allocated: . | reserved: 1",
    "step: 1 loss: 2 memory: 3GiB(4%)",
    " 1%|#| 1/2 [00:01<?, ?it/s]",
    "MA 0 GB Max_MA 0 GB CA 0 GB Max_CA 0 GB",
    "node running low on memory was ...GB / .GB (1) PID\n1 ... x\n",
    "CPU Virtual Memory: used = . GB, percent = ..%",
    "2026-13-45 99:99:99",
    "12:34:56",
    "é漢字",
)


def answer(path: Path) -> None:
    """Examine a log and write every format; one without a byte to read is refused."""
    try:
        result = examine([path])
    except InputError as error:
        if "the logs are empty" not in str(error):
            raise
        return
    encode_envelope("oom", postmortem_payload(result), result.warnings)
    render_postmortem(result, "terminal")
    render_postmortem(result, "markdown")


@pytest.mark.parametrize("name", ["megatron_interleaved.log", "slurm_host_oom.log"])
def test_cut_anywhere(name: str, tmp_path: Path) -> None:
    """A log cut at 200 random places gives an answer each time."""
    data = (FIXTURES / name).read_bytes()
    draw = random.Random(1)
    path = tmp_path / "cut.log"
    for _ in range(100):
        start, end = sorted(draw.randrange(len(data)) for _ in range(2))
        path.write_bytes(data[start:end])
        answer(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=12)), max_size=30))
def test_invented_logs(tmp_path: Path, parts: list[str]) -> None:
    """Pieces of messages in any order never raise."""
    path = tmp_path / "a.log"
    path.write_bytes("".join(parts).encode("utf-8", "surrogatepass"))
    answer(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_mutated_logs(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of a real form replaced at random never raise."""
    content = bytearray((FIXTURES / "megatron_interleaved.log").read_bytes()[-6000:])
    for _ in range(data.draw(st.integers(1, 30))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.log"
    path.write_bytes(bytes(content))
    answer(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=400))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    """Any bytes, also damaged gzip, give an answer."""
    path = tmp_path / "a.log"
    path.write_bytes(b"\x1f\x8b" + content if len(content) % 3 == 0 else b"log\n" + content)
    answer(path)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_shapes_hide_no_line(data: st.DataObject) -> None:
    """Looking at the shapes of lines first finds the same lines as looking at all of them."""
    needles = sorted({*_COARSE, *(fine for known in _COARSE.values() for fine in known)})
    words = [*needles, b"memory: 12  ", b"memory:3  x", b" 7 ", b"got 0 bytes", b"rror", b"step "]
    line = st.lists(st.one_of(st.sampled_from(words), st.binary(max_size=3)), max_size=5)
    lines = data.draw(st.lists(line.map(b"".join), max_size=8))
    text = b"\n".join([*lines, b"step 1 loss 2.0\n" * 40])
    assert trigger_lines(text, line_shapes(text)) == trigger_lines(text)
