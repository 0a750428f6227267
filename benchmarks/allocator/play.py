"""Play traces on one CUDA device. torch is all that it needs.

python benchmarks/allocator/play.py TRACE.json.gz NUMBER    # one case, in this process
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from traces import UNIT, Event, Outcome, moments, name_of, read

CASE_TIMEOUT_S = 150


def play_on_gpu(events: Sequence[Event], limit: int | None) -> dict[str, Any]:
    """Play a trace in this process, which has used no GPU before; return what torch counted."""
    import torch

    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    streams = {0: torch.cuda.current_stream()}
    blocks: list[int] = []
    outcome, at = Outcome(), moments(events)
    begin = time.monotonic()
    for index, event in enumerate(events):
        if isinstance(event, int):
            torch.cuda.caching_allocator_delete(blocks[event])
        else:
            size, number = event
            if number not in streams:
                streams[number] = torch.cuda.Stream()
            try:
                block = torch.cuda.caching_allocator_alloc(size, 0, streams[number])
            except torch.cuda.OutOfMemoryError:
                outcome.failed_at = index
                break
            blocks.append(block)
        if index in at:
            outcome.over_time.append(torch.cuda.memory_reserved() // UNIT)
    seconds = time.monotonic() - begin
    stats = torch.cuda.memory_stats()
    outcome.peak = stats["reserved_bytes.all.peak"]
    outcome.last = stats["reserved_bytes.all.current"]
    outcome.allocated_peak = stats["allocated_bytes.all.peak"]
    outcome.device_allocations = stats.get("num_device_alloc", -1)
    outcome.retries = stats["num_alloc_retries"]
    found = {name: getattr(outcome, name) for name in Outcome.__slots__}
    return found | {
        "segments": stats.get("segment.all.allocated", -1),
        "seconds": round(seconds, 2),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "total": total,
        "settings": settings_in_use(),
    }


def settings_in_use() -> dict[str, str] | None:
    """Return what the allocator says that it read; None where this torch cannot tell."""
    import torch

    try:
        found = torch.cuda.memory._snapshot()["allocator_settings"]  # noqa: SLF001
    except Exception:  # noqa: BLE001 (a private interface; the case counts without it)
        return None
    return {key: str(value) for key, value in found.items()}


def play_case(path: Path, number: int) -> dict[str, Any]:
    """Play one case in a process of its own; an error is an answer too."""
    case = read(path)["cases"][number]
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    if case["conf"]:  # torch 2.9 renamed it and still takes the old name
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": case["conf"], "PYTORCH_ALLOC_CONF": case["conf"]}
    command = [sys.executable, str(Path(__file__).resolve()), str(path), str(number)]
    found: dict[str, Any] = {"trace": name_of(path), **case}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=CASE_TIMEOUT_S,
        )
        if done.returncode:
            return found | {"error": done.stderr[-1500:]}
        return found | json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        return found | {"error": repr(error)[:1500]}


def play(paths: Sequence[Path], output: Path, jobs: int, max_seconds: float) -> int:
    """Play every case of every trace, ``jobs`` at a time; write all answers after each."""
    until = time.monotonic() + max_seconds
    answers: dict[int, dict[str, Any]] = {}
    cases = [(path, number) for path in paths for number in range(len(read(path)["cases"]))]

    def one(index: int) -> int:
        path, number = cases[index]
        if time.monotonic() > until:
            case = read(path)["cases"][number]
            answers[index] = {"trace": name_of(path), **case, "error": "no time was left"}
        else:
            answers[index] = play_case(path, number)
        return index

    output.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        for number, future in enumerate(
            as_completed(pool.submit(one, i) for i in range(len(cases)))
        ):
            answer = answers[future.result()]
            text = (
                "[\n" + ",\n".join(json.dumps(answers[i]) for i in sorted(answers.copy())) + "\n]\n"
            )
            part = output.with_suffix(".part")
            part.write_text(text)
            part.replace(output)
            said = answer.get("error") or f"peak {answer['peak']:,}, retries {answer['retries']}"
            name = f"{answer['trace']} {answer.get('conf')!r} {answer.get('limit')}"
            print(f"{number + 1}/{len(cases)} {name}: {said}", flush=True)
    return int(any("error" in answer for answer in answers.values()))


if __name__ == "__main__":
    chosen = read(Path(sys.argv[1]))
    print(json.dumps(play_on_gpu(chosen["events"], chosen["cases"][int(sys.argv[2])]["limit"])))
