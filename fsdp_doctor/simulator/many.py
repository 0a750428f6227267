"""Ask for many dry runs: one process imports torch once and forks one for each. No torch here."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from dataclasses import replace
from typing import Literal, Self

import msgspec

from fsdp_doctor.errors import DoctorError, InputError, MissingDependencyError
from fsdp_doctor.model.estimate import RankEstimate
from fsdp_doctor.model.spec import OptimizerConfig, ProfileSpec, StepPlan, TrainingConfig
from fsdp_doctor.simulator.estimate import STEADY_STEPS
from fsdp_doctor.simulator.request import DryRunAnswer, DryRunRequest, Question

_STOP_WAIT_S = 10.0


class Simulations:
    """Dry runs of many specs. Use as a context manager; torch is imported with the first one.

    Specs that differ in nothing a dry run reads are run once: name, steps, seed, checkpoint,
    learning rate, and the sections of other strategies.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[bytes, RankEstimate | str] = {}
        self.ran = 0
        """Dry runs so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.terminate()
        try:
            process.wait(_STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ask(
        self,
        spec: ProfileSpec,
        *,
        rank: int,
        device: Literal["cuda", "cpu"],
        workspace_bytes: int,
    ) -> RankEstimate | str:
        """Return what a rank of ``spec`` allocates, or in one line why that cannot be told.

        ``device``: on which the job runs. ``workspace_bytes``: cuBLAS's on that GPU. Raises
        MissingDependencyError without torch, DoctorError when the server cannot be reached.
        """
        told = _as_read(spec)
        question = Question(
            device=device,
            request=DryRunRequest(
                spec=msgspec.to_builtins(told),
                rank=rank,
                steps=STEADY_STEPS.get(spec.config.strategy, 1),
                workspace_bytes=workspace_bytes if device == "cuda" else 0,
            ),
        )
        line = msgspec.json.encode(question)
        if line not in self._known:
            self._known[line] = self._run(line)
        return self._known[line]

    def simulate(self, request: DryRunRequest) -> RankEstimate:
        """Run one rank on a GPU's terms, as ``estimate.simulate`` does, in a fork.

        Raises InputError with what keeps the spec from being simulated, whoever's making it is.
        """
        found = self._run(msgspec.json.encode(Question(device="cuda", request=request)))
        if isinstance(found, str):
            raise InputError(found)
        return found

    def _run(self, line: bytes) -> RankEstimate | str:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        self.ran += 1
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except OSError:
            reply = b""
        if not reply:
            raise DoctorError(f"the process of the dry runs ended (exit {process.wait()})")
        answer = msgspec.json.decode(reply, type=DryRunAnswer)
        return answer.estimate or answer.input_error or answer.failure or "no answer"

    def _start(self) -> subprocess.Popen[bytes]:
        if importlib.util.find_spec("torch") is None:
            raise MissingDependencyError(
                "torch", "run the training step on fake tensors", "profile"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fsdp_doctor.simulator.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._process


def _as_read(spec: ProfileSpec) -> ProfileSpec:
    """Return the spec with what a dry run does not read at its default."""
    config = spec.config
    plain = TrainingConfig(strategy=config.strategy)
    others = {name: getattr(plain, name) for name in STEADY_STEPS if name != config.strategy}
    optimizer = replace(config.optimizer, learning_rate=OptimizerConfig().learning_rate)
    return replace(
        spec,
        name="point",
        steps=StepPlan(),
        checkpoint=None,
        workload=replace(spec.workload, seed=0),
        config=replace(config, optimizer=optimizer, **others),
    )
