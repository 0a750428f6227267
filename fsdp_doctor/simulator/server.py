"""Answers many dry runs without paying torch's import each time.

``python -m fsdp_doctor.simulator.server`` imports torch once, then reads questions from standard
input, one JSON object a line, and forks a process for each, since a dry run patches torch and is
good for one spec only. Answers go to standard output, one a line, in order.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import IO

import msgspec

from fsdp_doctor.profiler.ranks import die_with_parent
from fsdp_doctor.simulator.request import DryRunAnswer, Question


def _answer(question: Question) -> DryRunAnswer:
    if question.device == "cpu":
        from fsdp_doctor.simulator.on_cpu import answer_on_cpu

        return answer_on_cpu(question.request)
    from fsdp_doctor.simulator.dry_run import answer

    return answer(question.request)


def _serve(question: Question, output: int) -> None:
    """Answer in this process and end it."""
    status = 1
    try:
        die_with_parent()
        data = msgspec.json.encode(_answer(question))
        with os.fdopen(output, "wb") as pipe:
            pipe.write(data)
        status = 0
    except BaseException as error:  # noqa: BLE001 (the parent reports it in the answer's place)
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _fork(question: Question) -> bytes:
    """Return the answer of a process of its own, as JSON."""
    reader, writer = os.pipe()
    errors_in, errors_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.close(errors_in)
        os.dup2(errors_out, 1)  # what the user's model prints is not the answer
        os.dup2(errors_out, 2)
        os.close(errors_out)
        _serve(question, writer)
    os.close(writer)
    os.close(errors_out)
    data, errors = _read_both(reader, errors_in)
    _, status = os.waitpid(pid, 0)
    if status == 0 and data:
        return data
    lines = errors.decode(errors="replace").strip().splitlines()
    code = os.waitstatus_to_exitcode(status)
    said = lines[-1] if lines else "no message"
    return msgspec.json.encode(DryRunAnswer(failure=f"the dry run failed (exit {code}): {said}"))


def _read_both(*pipes: int) -> list[bytes]:
    """Read pipes until all are closed, keeping the end of what they say."""
    import select

    found = dict.fromkeys(pipes, b"")
    waiting = list(pipes)
    while waiting:
        for pipe in select.select(waiting, [], [])[0]:
            part = os.read(pipe, 1 << 16)
            found[pipe] += part
            if not part:
                waiting.remove(pipe)
                os.close(pipe)
    return [found[pipe] for pipe in pipes]


def _import_all() -> None:
    """Import what every dry run needs, so that forks share it."""
    import torch._dynamo
    import torch._functorch.deprecated  # noqa: F401

    import fsdp_doctor.simulator.dry_run
    import fsdp_doctor.simulator.on_cpu
    import fsdp_doctor.training.strategies.ddp
    import fsdp_doctor.training.strategies.fsdp1
    import fsdp_doctor.training.strategies.fsdp2  # noqa: F401

    gc.collect()
    gc.freeze()  # collections of a fork look at its own objects only


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer every line until there are no more."""
    for line in questions:
        answers.write(_fork(msgspec.json.decode(line, type=Question)) + b"\n")
        answers.flush()


def main() -> int:
    """Serve until standard input closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command that asked ends it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _import_all()
    serve(sys.stdin.buffer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
